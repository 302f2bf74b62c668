# SPDX-License-Identifier: MIT
"""As much of PyTorch as torch_tensors.py uses, on whatever driver GPULOAN_DRIVER names by its path: memory of the device's
current pool, as backend:cudaMallocAsync has it, or of a MemPool's allocator. So that the script itself is tested where there is neither a GPU nor PyTorch."""
import array
import contextlib
import ctypes as c
import os
import types

int32, int64, float32, uint8 = "i", "q", "f", "B"
SIZES = {int32: 4, int64: 8, float32: 4, uint8: 1}
driver = c.CDLL(os.environ["GPULOAN_DRIVER"])


def need(function, *arguments):
    result = getattr(driver, function)(*arguments)
    if result != 0:
        raise RuntimeError(f"{function} says {result}")


class PluggableAllocator:
    current = None

    def __init__(self, library, malloc, free):
        library = c.CDLL(library)
        self.malloc, self.free = getattr(library, malloc), getattr(library, free)
        self.malloc.restype, self.malloc.argtypes = c.c_void_p, (c.c_size_t, c.c_int, c.c_void_p)
        self.free.restype, self.free.argtypes = None, (c.c_void_p, c.c_size_t, c.c_int, c.c_void_p)

    def allocator(self):
        return self


@contextlib.contextmanager
def use_mem_pool(pool):
    PluggableAllocator.current = pool
    yield
    PluggableAllocator.current = None


class Memory:
    def __init__(self, size):
        self.allocator = PluggableAllocator.current
        if self.allocator is not None:
            self.pointer, self.size = self.allocator.malloc(size, 0, None), size
            if self.pointer is None:
                raise MemoryError(size)
            return
        pointer = c.c_uint64()
        need("cuMemAllocAsync", c.byref(pointer), c.c_size_t(size), None)
        self.pointer, self.size = pointer.value, size

    def __del__(self):
        if self.allocator is not None:
            self.allocator.free(self.pointer, self.size, 0, None)
            return
        driver.cuMemFreeAsync(c.c_uint64(self.pointer), None)


class Tensor:
    def __init__(self, memory, dtype, first, count):
        self.memory, self.dtype, self.first, self.count = memory, dtype, first, count

    def data_ptr(self):
        return self.memory.pointer + self.first * SIZES[self.dtype]

    def untyped_storage(self):
        return types.SimpleNamespace(data_ptr=lambda: self.memory.pointer, nbytes=lambda: self.memory.size)

    def numel(self):
        return self.count

    def element_size(self):
        return SIZES[self.dtype]

    def __getitem__(self, part):
        first, end, step = part.indices(self.count)
        assert step == 1
        return Tensor(self.memory, self.dtype, self.first + first, max(end - first, 0))

    def bytes(self):
        data = c.create_string_buffer(self.count * self.element_size())
        need("cuMemcpyDtoHAsync_v2", data, c.c_uint64(self.data_ptr()), c.c_size_t(len(data)), None)
        need("cuStreamSynchronize", None)
        return data.raw

    def put(self, data):
        assert len(data) == self.count * self.element_size()
        need("cuMemcpyHtoDAsync_v2", c.c_uint64(self.data_ptr()), data, c.c_size_t(len(data)), None)
        need("cuStreamSynchronize", None)
        return self

    def zero_(self):
        return self.put(bytes(self.count * self.element_size()))

    def any(self):
        return self.bytes().strip(b"\0") != b""

    def __eq__(self, value):
        assert value == 0
        return types.SimpleNamespace(all=lambda: not self.any())


def empty(count, dtype):
    return Tensor(Memory(count * SIZES[dtype]), dtype, 0, count)


def zeros(count, device, dtype=float32):
    return empty(count, dtype).zero_()


def zeros_like(tensor):
    return zeros(tensor.count, "cuda", tensor.dtype)


def randn(count, device):
    return empty(count, float32).put(os.urandom(4 * count))


def arange(count, device=None, dtype=None, out=None):
    tensor = out if out is not None else empty(count, dtype)
    return tensor.put(array.array(tensor.dtype, range(count)).tobytes())


def equal(left, right):
    return left.bytes() == right.bytes()


def init():
    context = c.c_void_p()
    need("cuInit", 0)
    need("cuDevicePrimaryCtxRetain", c.byref(context), 0)
    need("cuCtxPushCurrent_v2", context)


cuda = types.SimpleNamespace(init=init, synchronize=lambda: need("cuCtxSynchronize"),
                             current_stream=lambda: types.SimpleNamespace(cuda_stream=0),
                             memory=types.SimpleNamespace(CUDAPluggableAllocator=PluggableAllocator), MemPool=lambda allocator: allocator,
                             use_mem_pool=use_mem_pool)
