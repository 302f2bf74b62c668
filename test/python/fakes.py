# SPDX-License-Identifier: MIT
"""Tensors of no framework over real (simulated) driver memory, in the three ways that frameworks show theirs; and a consumer of
DLPack. Their dtypes, shapes and strides are whatever the test says."""
import contextlib
import ctypes

import gpuloan

driver = gpuloan._Driver.of(None)


@contextlib.contextmanager
def primary():
    """Works in the primary CUDA context of device 0."""
    context = ctypes.c_void_p()
    if not driver._primary.get(0):
        driver._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(0))
        driver._primary[0] = context.value
    driver._call("cuCtxPushCurrent_v2", ctypes.c_void_p(driver._primary[0]))
    try:
        yield
    finally:
        driver._call("cuCtxPopCurrent_v2", ctypes.byref(context))


class Block:
    """`size` bytes of cuMemAlloc, freed with the last reference."""

    live = 0

    def __init__(self, size):
        pointer = ctypes.c_uint64()
        with primary():
            driver._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)))
        self.pointer, self.size = pointer.value, size
        Block.live += 1

    def write(self, data, offset=0):
        buffer = ctypes.create_string_buffer(data, len(data))
        driver.copy("HtoD", self.pointer + offset, ctypes.addressof(buffer), len(data), 1)

    def read(self, size=None, offset=0):
        buffer = ctypes.create_string_buffer(self.size if size is None else size)
        driver.copy("DtoH", ctypes.addressof(buffer), self.pointer + offset, len(buffer), 1)
        return buffer.raw

    def __del__(self, live=[]):
        Block.live -= 1
        with primary():
            driver._call("cuMemFree_v2", ctypes.c_uint64(self.pointer))


class Named:
    """As torch.dtype: str() is all there is."""

    def __init__(self, name):
        self._name = name

    def __repr__(self):
        return "torch." + self._name


class Device:
    def __init__(self, kind, index=0):
        self.type, self.index = kind, index

    def __str__(self):
        return self.type


class Base:
    def __init__(self, dtype, shape, data=b"", strides=None, block=None, offset=0):
        self.kind = gpuloan._type_of(dtype)
        self.shape = tuple(shape)
        self.strides = gpuloan._contiguous_strides(shape) if strides is None else tuple(strides)
        self.block = block or Block(offset + len(data) or gpuloan._count(shape) * self.kind.itemsize + offset)
        self.offset = offset
        if data:
            self.block.write(data, offset)

    @property
    def address(self):
        return self.block.pointer + self.offset


class Torch(Base):
    def __init__(self, *arguments, device="cuda", **options):
        super().__init__(*arguments, **options)
        self.dtype = Named(self.kind.name)
        self.device = Device(device)

    def data_ptr(self):
        return self.address if gpuloan._count(self.shape) else 0

    def stride(self):
        return self.strides

    def element_size(self):
        return self.kind.itemsize


class Cuda(Base):
    """As CuPy and numba."""

    read_only = False
    mask = None

    @property
    def __cuda_array_interface__(self):
        strides = tuple(step * self.kind.itemsize for step in self.strides)
        return {"shape": self.shape, "typestr": self.kind.typestr, "data": (self.address, self.read_only), "version": 3,
                "strides": strides, "mask": self.mask}


class Dlpack(Base):
    def __init__(self, *arguments, versioned=True, device=(2, 0), read_only=False, **options):
        super().__init__(*arguments, **options)
        self.versioned, self.place, self.read_only, self.streams = versioned, device, read_only, []

    def __dlpack_device__(self):
        return self.place

    def __dlpack__(self, stream=None, **options):
        if options and not self.versioned:
            raise TypeError("max_version is not known here")
        self.streams.append(stream)
        return gpuloan._dl_export(self.block, self.address, self.place, self.kind, self.shape, self.strides, self.read_only, self.versioned)


class Jax(Dlpack):
    ready = False

    def block_until_ready(self):
        self.ready = True


class Consumer:
    """Takes a DLPack capsule as a framework does: renames it, reads the tensor, and calls its deleter when told to."""

    def __init__(self, capsule):
        api = ctypes.pythonapi
        self._name = next(name for name in (gpuloan._VERSIONED, gpuloan._PLAIN) if gpuloan._capsule_valid(id(capsule), name))
        self._used = b"used_" + self._name
        self._address = gpuloan._capsule_pointer(id(capsule), self._name)
        rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", api))
        rename(capsule, self._used)
        kind = gpuloan._DLManagedVersioned if self._name == gpuloan._VERSIONED else gpuloan._DLManaged
        self.managed = kind.from_address(self._address)
        tensor = self.managed.tensor
        self.pointer, self.code, self.bits = tensor.data or 0, tensor.code, tensor.bits
        self.shape, self.strides = tensor.shape[:tensor.ndim], tensor.strides[:tensor.ndim]
        self.device = (tensor.device_type, tensor.device_id)

    def release(self):
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.managed.deleter)(self._address)
