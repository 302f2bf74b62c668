# SPDX-License-Identifier: MIT
"""A test pattern that every framework can make and check in its own way, on the device.

Element i of a tensor, in row-major order of its indices, is (31 i + seed) % 65521 % 17: 0 to 16, exact in every dtype here. The pattern
repeats after 65521 elements. So a tensor of more than PIECE elements is given as rows whose length is a multiple of that, and each row is
the same.

A framework is a class with `wrong_of(array, seed)` (how many elements of a gpuloan.DeviceArray are not the pattern; it looks through a
view in the framework, whose shape and dtype it compares) and `write(out, seed, transposed)` (fills a gpuloan.Result)."""
import math
import struct

PERIOD = 65521
PIECE = PERIOD * 1024
ITEMSIZE = {"uint8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "int64": 8}


def code(value, dtype):
    """The bits of a small integer."""
    if dtype == "float32":
        return struct.unpack("<I", struct.pack("<f", value))[0]
    if dtype == "bfloat16":
        return code(value, "float32") >> 16
    if dtype == "float8_e4m3fn" and value > 0:
        exponent = int(math.log2(value))
        return exponent + 7 << 3 | (value * 8 >> exponent) % 8
    return value


def elements(shape):
    return math.prod(shape)


def row_length(shape):
    """How many elements repeat: all of them, or a row's."""
    total = elements(shape)
    if total <= PIECE:
        return total
    assert len(shape) == 2 and shape[1] % PERIOD == 0 and shape[1] <= PIECE, shape
    return shape[1]


class Torch:
    name = "torch"

    def __init__(self):
        import torch
        torch.cuda.init()
        self.module = torch
        self.integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def bits(self, tensor):
        return tensor.view(self.integers[tensor.element_size()])

    def pattern(self, seed, dtype, count):
        torch = self.module
        values = (torch.arange(count, device="cuda", dtype=torch.int32) % PERIOD * 31 + seed) % PERIOD % 17
        return values.to(torch.float32).to(getattr(torch, dtype))

    def fill(self, tensor, seed):
        """Of any strides."""
        row = self.pattern(seed, str(tensor.dtype).split(".")[-1], row_length(tensor.shape))
        if tensor.numel() == row.numel():
            self.bits(tensor).copy_(self.bits(row.reshape(tensor.shape)))
        else:
            self.bits(tensor).copy_(self.bits(row).expand(tensor.shape))

    def wrong(self, tensor, seed):
        row = self.bits(self.pattern(seed, str(tensor.dtype).split(".")[-1], row_length(tensor.shape)))
        if tensor.numel() == row.numel():
            return int((self.bits(tensor) != row.reshape(tensor.shape)).sum())
        found = self.module.zeros((), device="cuda", dtype=self.module.int64)
        for each in self.bits(tensor):
            found += (each != row).sum()
        return int(found)

    def wrong_of(self, array, seed):
        tensor = array.torch()
        assert tuple(tensor.shape) == tuple(array.shape) and str(tensor.dtype) == f"torch.{array.dtype}", (tensor.shape, tensor.dtype)
        return self.wrong(tensor, seed)

    def write(self, out, seed, transposed):
        tensor = out.tensor.torch()
        if transposed:  # made as the transpose of another one
            other = self.module.empty(tensor.shape[::-1], device="cuda", dtype=tensor.dtype).t()
            self.fill(other, seed)
            self.bits(tensor).copy_(self.bits(other))
        else:
            self.fill(tensor, seed)


class Cupy:
    name = "cupy"

    def __init__(self):
        import cupy
        cupy.zeros(1)
        self.module = cupy

    def tensor(self, array):
        tensor = array.cupy()
        assert tensor.shape == array.shape and (array.dtype != "float32" or tensor.dtype == self.module.float32), tensor.dtype
        return tensor

    def bits(self, tensor):
        return tensor.view(getattr(self.module, f"uint{tensor.dtype.itemsize * 8}"))

    def pattern(self, seed, dtype, count):
        cupy = self.module
        codes = cupy.asarray([code(value, dtype) for value in range(17)], dtype=f"uint{ITEMSIZE[dtype] * 8}")
        return codes[(cupy.arange(count, dtype=cupy.int32) % PERIOD * 31 + seed) % PERIOD % 17]

    def wrong_of(self, array, seed):
        tensor = self.bits(self.tensor(array))
        row = self.pattern(seed, array.dtype, row_length(array.shape))
        if tensor.size == row.size:
            return int((tensor != row.reshape(tensor.shape)).sum())
        return sum(int((each != row).sum()) for each in tensor)

    def write(self, out, seed, transposed):
        tensor = self.bits(self.tensor(out.tensor))
        row = self.pattern(seed, out.tensor.dtype, row_length(tensor.shape))
        if tensor.size != row.size:
            for each in tensor:
                each[...] = row
            return
        row = row.reshape(tensor.shape)
        tensor[...] = self.module.asfortranarray(row) if transposed else row


class Jax:
    """Writes by copy_from: its arrays are immutable."""
    name = "jax"

    def __init__(self):
        import jax
        self.module, self.numpy = jax, jax.numpy
        self.pattern = jax.jit(self._pattern, static_argnums=(1, 2))
        self.count_wrong = jax.jit(lambda tensor, row: self.numpy.sum(tensor != row))
        self.count_wrong_row = jax.jit(
            lambda tensor, row, at: self.numpy.sum(jax.lax.dynamic_index_in_dim(tensor, at, 0, keepdims=False) != row))
        self.repeat = jax.jit(self.numpy.broadcast_to, static_argnums=1)
        self.pattern(0, "float32", 16).block_until_ready()

    def _pattern(self, seed, dtype, count):
        values = (self.numpy.arange(count, dtype="int32") % PERIOD * 31 + seed) % PERIOD % 17
        return values.astype(self.numpy.float32).astype(getattr(self.numpy, dtype))

    def tensor(self, array):
        tensor = array.jax()
        assert tensor.shape == array.shape and str(tensor.dtype) == array.dtype, (tensor.shape, tensor.dtype)
        return tensor

    def wrong_of(self, array, seed):
        if elements(array.shape) == 0:
            return elements(self.tensor(array).shape)
        tensor = self.tensor(array)
        row = self.pattern(seed, array.dtype, row_length(array.shape))
        if tensor.size == row.size:
            return int(self.count_wrong(tensor, row.reshape(tensor.shape)))
        return sum(int(self.count_wrong_row(tensor, row, at)) for at in range(tensor.shape[0]))

    def write(self, out, seed, transposed):
        shape = tuple(out.tensor.shape)
        if elements(shape) == 0:
            out.copy_from(self.numpy.zeros(shape, getattr(self.numpy, out.tensor.dtype)))
            return
        row = self.pattern(seed, out.tensor.dtype, row_length(shape))
        if elements(shape) != row.size:
            array = self.repeat(row, shape)
        elif transposed:
            array = row.reshape(shape).T.copy().T
        else:
            array = row.reshape(shape)
        out.copy_from(array.block_until_ready())


class Plain:
    """No framework: by host bytes."""
    name = "plain"

    def pattern(self, seed, dtype, count):
        codes = [code(value, dtype).to_bytes(ITEMSIZE[dtype], "little") for value in range(17)]
        return b"".join(codes[(31 * i + seed) % PERIOD % 17] for i in range(count))

    def wrong_of(self, array, seed):
        """Of a DeviceArray of any strides: copy_to_host gives row-major bytes."""
        return self.differ(array.copy_to_host(), seed, array.dtype, array.shape)

    def differ(self, seen, seed, dtype, shape):
        size, wanted = ITEMSIZE[dtype], self.pattern(seed, dtype, elements(shape))
        if len(seen) != len(wanted):
            raise ValueError(f"{len(seen)} bytes instead of {len(wanted)}")
        return 0 if seen == wanted else sum(seen[i:i + size] != wanted[i:i + size] for i in range(0, len(seen), size))

    def write(self, out, seed, transposed):
        out.copy_from(self.pattern(seed, out.tensor.dtype, elements(out.tensor.shape)))


FRAMEWORKS = {each.name: each for each in (Torch, Cupy, Jax, Plain)}
