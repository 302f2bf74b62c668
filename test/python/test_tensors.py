# SPDX-License-Identifier: MIT
"""Tensors in and out: every dtype, shape and layout, and what is refused with which words."""
import ctypes
import importlib.util
import itertools
import json
import struct
import sys
import threading
import types
import unittest
from unittest import mock

from support import Case, PATIENCE, collect, eventually, main
import fakes
import gpuloan

FLIP = bytes(255 - value for value in range(256))


def elements(tensor):
    """The elements of a fake in C order, read element by element."""
    size = tensor.kind.itemsize
    raw = tensor.block.read()[tensor.offset:]
    for index in itertools.product(*map(range, tensor.shape)):
        start = sum(i * step for i, step in zip(index, tensor.strides)) * size
        yield raw[start:start + size]


def content(tensor):
    return b"".join(elements(tensor))


class Mirrored(Case):
    """Each tensor goes to a worker and comes back inverted: values, dtype, shape and strides are checked on the way."""

    def setUp(self):
        super().setUp()
        self.peer = self.spawn("mirror")

    def mirror(self, tensor, **options):
        self.peer.lend(tensor, user=b"tag", **options)
        result = self.parent.next_result(PATIENCE)
        seen = json.loads(result.user)
        self.assertEqual(seen["user"], "tag")
        self.assertEqual((seen["dtype"], tuple(seen["shape"])), (tensor.kind.name, tensor.shape))
        self.assertEqual(tuple(seen["strides"]), tensor.strides)
        self.assertTrue(seen["read_only"])
        self.assertEqual((result.dtype, result.shape), (tensor.kind.name, tensor.shape))
        self.assertEqual(result.copy_to_host(), content(tensor).translate(FLIP))
        self.assertIs(result.peer, self.peer)
        return seen, result

    def test_every_dtype_and_protocol(self):
        for number, name in enumerate(gpuloan._TYPES):
            size = gpuloan._TYPES[name].itemsize
            data = bytes((value * 7 + number) % 256 for value in range(6 * size))
            kinds = [fakes.Torch, fakes.Dlpack]
            if gpuloan._TYPES[name].typestr[1] == name[0]:
                kinds.append(fakes.Cuda)
            for kind in kinds:
                with self.subTest(dtype=name, protocol=kind.__name__):
                    self.mirror(kind(name, (2, 3), data))

    def test_unversioned_dlpack(self):
        tensor = fakes.Dlpack("bfloat16", (4,), bytes(range(8)), versioned=False)
        self.mirror(tensor)
        self.assertEqual(tensor.streams, [gpuloan.STREAM_LEGACY])

    def test_views(self):
        data = bytes(range(96))
        views = {"transposed": ((4, 6), (1, 4)), "strided": ((3, 2), (8, 2)), "broadcast": ((3, 4), (0, 1)), "scalar": ((), ()),
                 "one element with any stride": ((1, 1), (99, 7)), "five dimensions": ((2, 1, 3, 1, 2), (12, 5, 4, 1, 2))}
        for name, (shape, strides) in views.items():
            with self.subTest(name):
                self.mirror(fakes.Torch("float32", shape, data, strides))

    def test_range_is_the_smallest(self):
        loan = self.peer.lend(fakes.Torch("float32", (3, 2), bytes(96), (8, 2)))
        self.assertEqual(loan.report().bytes, ((3 - 1) * 8 + 2 + 1) * 4)
        self.parent.next_result(PATIENCE)

    def test_no_elements(self):
        for shape in ((0,), (3, 0, 5), (0, 0)):
            with self.subTest(shape=shape):
                seen, result = self.mirror(fakes.Torch("bfloat16", shape))
                self.assertEqual((seen["nbytes"], seen["pointer"]), (0, False))
                self.assertEqual((result.nbytes, result.pointer, result.copy_to_host()), (0, 0, b""))

    def test_offset_of_3_gib(self):
        block = fakes.Block((3 << 30) + 4096)
        block.write(bytes(range(64)), 3 << 30)
        tensor = fakes.Torch("uint8", (8, 8), strides=(1, 8), block=block, offset=3 << 30)
        self.peer.lend(tensor, user=b"far")
        result = self.parent.next_result(PATIENCE)
        expected = bytes(255 - (row + 8 * column) for row in range(8) for column in range(8))
        self.assertEqual(result.copy_to_host(), expected)

    def test_results_go_on_to_the_worker(self):
        _, result = self.mirror(fakes.Torch("uint8", (4,), b"abcd"))
        self.peer.lend(result, user=b"again")
        self.assertEqual(self.parent.next_result(PATIENCE).copy_to_host(), b"abcd")

    def test_jax_is_waited_for_and_read_only(self):
        tensor = fakes.Jax("float16", (2,), b"1234")
        self.mirror(tensor)
        self.assertTrue(tensor.ready)
        with self.refused(gpuloan.CallError, "read-only", "JAX", "request"):
            self.peer.lend(tensor, "write")

    def test_plain_c_metadata(self):
        """A lend without a description, as a C program's, is an array of bytes."""
        self.assertEqual(gpuloan._unpack(b"hello", 17), (gpuloan._TYPES["uint8"], (17,), (1,), 0, b"hello"))


class WrittenInPlace(Case):
    def test_layouts_that_fill_their_range(self):
        peer = self.spawn("invert")
        for shape, strides in (((4, 6), (6, 1)), ((4, 6), (1, 4)), ((2, 3, 4), (4, 8, 1)), ((0, 3), (3, 1)), ((1, 5), (77, 1))):
            with self.subTest(shape=shape, strides=strides):
                data = bytes(range(gpuloan._count(shape) * 4))
                tensor = fakes.Torch("float32", shape, data, strides)
                before = content(tensor)
                peer.lend(tensor, "write").wait(PATIENCE)
                self.assertEqual(content(tensor), before.translate(FLIP))


class Refusals(Case):
    def setUp(self):
        super().setUp()
        self.peer = self.spawn("hold")

    def test_write_layouts(self):
        cases = {"share memory": [((3, 4), (0, 1)), ((3, 3), (2, 1)), ((2, 2), (1, 1))],
                 "does not fill": [((3, 2), (8, 2)), ((4,), (2,)), ((2, 3), (4, 1))]}
        for words, layouts in cases.items():
            for shape, strides in layouts:
                with self.subTest(shape=shape, strides=strides), self.refused(gpuloan.CallError, words, "contiguous copy"):
                    self.peer.lend(fakes.Torch("uint8", shape, bytes(64), strides), "write")

    def test_tensors(self):
        masked, locked = fakes.Cuda("uint8", (2,), b"ab"), fakes.Cuda("uint8", (2,), b"ab")
        masked.mask, locked.read_only = object(), True
        odd = fakes.Torch("float32", (2,), bytes(8))
        odd.is_conj = lambda: True
        packed = fakes.Dlpack("uint8", (2,), b"ab")
        packed.kind = packed.kind._replace(bits=4)
        for words, tensor, access in (
            (("CPU memory", "tensor.cuda()", "request host memory"), fakes.Torch("float32", (2,), bytes(8), device="cpu"), "read"),
            (("CPU memory", "move it"), fakes.Dlpack("float32", (2,), bytes(8), device=(1, 0)), "read"),
            (("pinned",), fakes.Dlpack("float32", (2,), bytes(8), device=(3, 0)), "read"),
            (("device type 10",), fakes.Dlpack("float32", (2,), bytes(8), device=(10, 0)), "read"),
            (("on the device 'meta'",), fakes.Torch("float32", (2,), bytes(8), device="meta"), "read"),
            (("negative stride",), fakes.Torch("uint8", (3,), bytes(8), (-1,)), "read"),
            (("mask",), masked, "read"),
            (("read-only",), locked, "write"),
            (("read-only",), fakes.Dlpack("uint8", (2,), b"ab", read_only=True), "write"),
            (("is_conj", "resolve_conj()"), odd, "read"),
            (("4 bits", "as uint8"), packed, "read"),
            (("no tensor", "__dlpack__"), [1, 2], "read"),
            (("2 strides (2, 1)", "1 dimensions"), fakes.Torch("uint8", (2,), bytes(8), (2, 1)), "read"),
            (("more than any memory",), fakes.Torch("uint8", (3,), bytes(8), (1 << 62,)), "read"),
            (("access is 4294967298",), fakes.Torch("uint8", (2,), b"ab"), (1 << 32) + 2),
            (("access", "'read'"), fakes.Torch("uint8", (2,), b"ab"), "readwrite"),
        ):
            with self.subTest(words=words), self.refused(gpuloan.CallError, *words):
                self.peer.lend(tensor, access)

    def test_metadata_and_options(self):
        tensor = fakes.Torch("uint8", (2,), b"ab")
        with self.refused(gpuloan.CallError, "4096", "shorter"):
            self.peer.lend(tensor, user=bytes(4096))
        with self.refused(gpuloan.CallError, "rungs", "'vmm'"):
            self.peer.lend(tensor, rungs="vm")
        with self.refused(gpuloan.CallError, "no stream"):
            self.peer.lend(tensor, stream="main")
        self.assertEqual(gpuloan._kept, {})  # nothing that was refused is kept

    def test_unpack_checks_the_peer(self):
        good = gpuloan._pack(gpuloan._Layout(gpuloan._TYPES["float32"], (2, 3), (3, 1), 8, b"user"))
        self.assertEqual(gpuloan._unpack(good, 32).shape, (2, 3))
        wrong = [good[:size] for size in range(5, len(good))] + [good + b"x"]
        for shape, strides, offset in (((2, 3), (3, 1), 12), ((2, 4), (4, 1), 8), ((-2, 3), (3, 1), 0), ((2, 3), (-3, 1), 8),
                                       ((2,), (1 << 62,), 0)):
            wrong.append(gpuloan._pack(gpuloan._Layout(gpuloan._TYPES["float32"], shape, strides, offset, b"")))
        wrong.append(good[:4] + b"\x63" + good[5:])
        for data in wrong:
            with self.subTest(data=data), self.refused(gpuloan.CallError, "peer's description"):
                gpuloan._unpack(data, 32)


class Out(Case):
    """DeviceArrays, as consumers see them."""

    def setUp(self):
        super().setUp()
        peer = self.spawn("mirror")
        peer.lend(fakes.Torch("bfloat16", (2, 3), bytes(range(12))))
        self.array = self.parent.next_result(PATIENCE)
        self.bytes = bytes(range(12)).translate(FLIP)

    def read(self, pointer):
        buffer = ctypes.create_string_buffer(12)
        fakes.driver.copy("DtoH", ctypes.addressof(buffer), pointer, 12, 1)
        return buffer.raw

    def test_cuda_array_interface(self):
        interface = self.array.__cuda_array_interface__
        self.assertEqual((interface["shape"], interface["typestr"], interface["strides"], interface["version"]), ((2, 3), "<u2", None, 3))
        self.assertEqual(interface["data"], (self.array.pointer, False))
        self.assertEqual(self.read(interface["data"][0]), self.bytes)

    def test_dlpack(self):
        self.assertEqual(self.array.__dlpack_device__(), (2, 0))
        for version in (None, (1, 0), (2, 3)):
            consumer = fakes.Consumer(self.array.__dlpack__(stream=1, max_version=version))
            self.assertEqual(consumer._name, b"dltensor" if version is None else b"dltensor_versioned")
            self.assertEqual((consumer.code, consumer.bits, consumer.device), (4, 16, (2, 0)))
            self.assertEqual((consumer.shape, consumer.strides), ([2, 3], [3, 1]))
            self.assertEqual(self.read(consumer.pointer), self.bytes)
            consumer.release()
        with self.assertRaises(BufferError):
            self.array.__dlpack__(copy=True)
        with self.assertRaises(BufferError):
            self.array.__dlpack__(dl_device=(1, 0))

    def test_capsules_that_nobody_takes(self):
        before = len(gpuloan._exports)
        capsules = [self.array.__dlpack__(), self.array.__dlpack__(max_version=(1, 0))]
        self.assertEqual(len(gpuloan._exports), before + 2)
        del capsules
        collect()
        self.assertEqual(len(gpuloan._exports), before)

    def test_capsules_that_die_of_an_exception(self):
        """The interpreter drops what an expression had, and what a consumer refused, with the exception set already."""
        before = len(gpuloan._exports)
        for version in (None, (1, 0)):
            with self.assertRaises(ZeroDivisionError):
                print(self.array.__dlpack__(max_version=version), 1 / 0)
            with self.assertRaises(TypeError):
                int(self.array.__dlpack__(max_version=version))
            with self.assertRaises(AttributeError):
                self.array.__dlpack__(max_version=version).misspelt
        self.assertEqual(len(gpuloan._exports), before)

    def test_module_that_is_loaded_twice(self):
        """What one of them gave away, the other one drops."""
        before = len(gpuloan._exports)
        consumer = fakes.Consumer(self.array.__dlpack__())
        specification = importlib.util.spec_from_file_location("gpuloan_again", gpuloan.__file__)
        again = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(again)
        consumer.release()
        again._dl_take()
        self.assertEqual(len(gpuloan._exports), before)
        consumer = fakes.Consumer(self.array.__dlpack__())
        del again, specification
        collect()  # the library still has the address of what is gone
        consumer.release()
        eventually(lambda: len(gpuloan._exports) == before, "it is dropped")

    def test_many_deleted_at_once_by_another_thread(self):
        before = len(gpuloan._exports)
        consumers = [fakes.Consumer(self.array.__dlpack__()) for _ in range(1000)]
        thread = threading.Thread(target=lambda: [consumer.release() for consumer in consumers])
        thread.start()
        thread.join()
        eventually(lambda: len(gpuloan._exports) == before, "all are dropped")

    def test_copy_from(self):
        self.assertEqual(self.array.copy_from(struct.pack("<6H", *range(6))), 12)
        self.assertEqual(self.array.copy_to_host(), struct.pack("<6H", *range(6)))
        self.assertEqual(self.array.copy_from(fakes.Torch("bfloat16", (2, 3), b"abcdefghijkl")), 12)
        self.assertEqual(self.array.copy_to_host(), b"abcdefghijkl")
        for x, words in ((b"123", "3 bytes"), (fakes.Torch("float16", (2, 3), bytes(12)), "float16"),
                         (fakes.Torch("bfloat16", (3, 2), bytes(12)), "(3, 2)"),
                         (fakes.Torch("bfloat16", (2, 3), bytes(12), (1, 2)), "not contiguous")):
            with self.refused(gpuloan.CallError, words):
                self.array.copy_from(x)
        self.assertEqual(self.array.copy_to_host(), b"abcdefghijkl")


class Empty(Case):
    """Memory that the parent makes by itself, with no framework."""

    options = {"account_bytes": 64 << 20}

    def test_input(self):
        peer = self.spawn("mirror")
        array = peer.empty((2, 3), "float32", alignment=4096)
        self.assertEqual((array.dtype, array.shape, array.strides, array.nbytes), ("float32", (2, 3), (3, 1), 24))
        self.assertEqual((array.pointer % 4096, array.host, array.report), (0, None, None))
        data = struct.pack("<6f", *range(6))
        self.assertEqual(array.copy_from(data), 24)
        loan = peer.lend(array, user=b"input")
        loan.wait(PATIENCE)
        report = loan.report()
        self.assertEqual((str(report.rung), report.copied_bytes), ("vmm", 0))
        result = self.parent.next_result(PATIENCE)
        self.assertEqual((result.dtype, result.shape), ("float32", (2, 3)))
        self.assertEqual(bytes(255 - value for value in result.copy_to_host()), data)
        self.assertEqual(array.copy_to_host(), data)  # still this process' own

    def test_written_in_place(self):
        peer = self.spawn("invert")
        array = peer.empty(4, "uint8", access="write")
        array.copy_from(b"\x00\x01\x02\x03")
        peer.lend(array, "write").wait(PATIENCE)
        self.assertEqual(array.copy_to_host(), b"\xff\xfe\xfd\xfc")

    def test_without_elements(self):
        peer = self.spawn("mirror")
        peer.lend(peer.empty((0, 3), "int16")).wait(PATIENCE)
        self.assertEqual(self.parent.next_result(PATIENCE).shape, (0, 3))

    def test_lives_as_long_as_it_is_referenced_or_lent(self):
        peer = self.spawn("hold")
        array = peer.empty(4096, "uint8")
        consumer = fakes.Consumer(array.__dlpack__())
        del array
        collect()
        self.assertEqual(self.parent.stats().live_bytes, 4096)
        consumer.release()
        self.assertEqual(self.parent.stats().live_bytes, 0)
        array = peer.empty(4096, "uint8")
        array.copy_from(bytes(4096))
        loan = peer.lend(array)
        peer.process.kill()
        with self.refused(gpuloan.PeerError):
            loan.wait(PATIENCE)
        self.assertEqual(array.copy_to_host(), bytes(4096))  # the parent's, also without the worker
        del array, loan
        eventually(lambda: collect() or self.parent.stats().live_bytes == 0, "the memory is back")

    def test_host_memory(self):
        peer = self.spawn("mirror")
        array = peer.empty(4, "uint8", memory="host")
        array.host[:] = b"abcd"
        loan = peer.lend(array, memory="host")
        loan.wait(PATIENCE)
        self.assertEqual(str(loan.report().rung), "host")
        self.assertEqual(self.parent.next_result(PATIENCE).copy_to_host(), bytes(255 - value for value in b"abcd"))

    def test_refused(self):
        peer = self.spawn("mirror")
        for arguments, options, words in (((4, "float4"), {}, "float4"), ((4, "uint8"), {"access": "both"}, "access"),
                                          ((4, "uint8"), {"memory": "disk"}, "memory"), ((4, "uint8"), {"alignment": 3}, "power of two"),
                                          ((1 << 30, "uint8"), {}, "limit of 67108864")):
            with self.subTest(arguments), self.refused(gpuloan.CallError, words):
                peer.empty(*arguments, **options)
        array = peer.empty(4, "uint8")
        with self.refused(gpuloan.CallError, "write"):
            peer.lend(array, "write")
        peer.close()
        with self.refused(gpuloan.CallError, "closed"):
            peer.empty(4, "uint8")


class EmptyWithoutDevice(Case):
    options = {"device": -1}

    def test_input(self):
        """A parent and a worker without a GPU: in place, nothing is copied."""
        peer = self.spawn("mirror")
        array = peer.empty((2, 2), "int16")
        array.host[:] = b"abcdefgh"
        loan = peer.lend(array)
        loan.wait(PATIENCE)
        self.assertEqual((str(loan.report().rung), loan.report().copied_bytes), ("host", 0))
        self.assertEqual(self.parent.next_result(PATIENCE).copy_to_host(), bytes(255 - value for value in b"abcdefgh"))
        peer.lend(peer.empty(0, "uint8")).wait(PATIENCE)


class Frameworks(Case):
    """What the views in frameworks hand over, with stand-ins for their modules."""

    def setUp(self):
        super().setUp()
        self.peer = self.spawn("mirror")
        real = mock.patch.object(gpuloan._Context, "simulated", lambda context: False)
        real.start()
        self.addCleanup(real.stop)

    def array(self, dtype, shape=(2, 2)):
        size = gpuloan._count(shape) * gpuloan._TYPES[dtype].itemsize
        self.peer.lend(fakes.Torch(dtype, shape, bytes(range(size))))
        return self.parent.next_result(PATIENCE)

    def test_torch(self):
        class Tensor:
            def __init__(self, consumer, dtype):
                self.consumer, self.dtype = consumer, dtype

            def view(self, dtype):
                return Tensor(self.consumer, dtype)

        def from_dlpack(capsule):
            consumer = fakes.Consumer(capsule)
            self.assertEqual(consumer._name, b"dltensor")  # which every version takes
            return Tensor(consumer, "by code %d, %d bits" % (consumer.code, consumer.bits))

        torch = types.ModuleType("torch")
        torch.cuda = types.SimpleNamespace(is_initialized=lambda: False)
        torch.utils = types.SimpleNamespace(dlpack=types.SimpleNamespace(from_dlpack=from_dlpack))
        torch.empty = lambda shape, dtype, device: ("empty", shape, dtype, device)
        torch.__version__ = "0"
        for name in ("float32", "bfloat16", "float8_e4m3fn", "bool", "uint16", "complex64"):
            setattr(torch, name, "torch." + name)
        with mock.patch.dict(sys.modules, torch=torch):
            for name, dtype, code, bits in (("float32", "by code 2, 32 bits", 2, 32), ("bfloat16", "by code 4, 16 bits", 4, 16),
                                            ("complex64", "by code 5, 64 bits", 5, 64), ("float8_e4m3fn", "torch.float8_e4m3fn", 1, 8),
                                            ("bool", "torch.bool", 1, 8), ("uint16", "torch.uint16", 0, 16)):
                array = self.array(name)
                tensor = array.torch()
                self.assertEqual((tensor.dtype, tensor.consumer.code, tensor.consumer.bits), (dtype, code, bits))
                self.assertEqual((tensor.consumer.pointer, tensor.consumer.shape), (array.pointer, [2, 2]))
                tensor.consumer.release()
            self.assertEqual(self.array("float32", (0, 3)).torch(), ("empty", (0, 3), "torch.float32", "cuda:0"))
            with self.refused(gpuloan.CallError, "no dtype float8_e5m2"):
                self.array("float8_e5m2").torch()

    def test_jax(self):
        taken = []

        def from_dlpack(array):
            consumer = fakes.Consumer(array.__dlpack__(stream=1, max_version=(1, 1)))
            consumer.release()
            if consumer.code > 6:
                raise TypeError("Unknown DLPack type")
            taken.append((consumer.code, consumer.bits))
            return taken[-1]

        jax, dlpack = types.ModuleType("jax"), types.ModuleType("jax.dlpack")
        jax.dlpack, dlpack.from_dlpack = dlpack, from_dlpack
        jax.numpy = types.SimpleNamespace(float8_e4m3fn="jax fp8")
        jax.lax = types.SimpleNamespace(bitcast_convert_type=lambda array, dtype: ("cast", array, dtype))
        with mock.patch.dict(sys.modules, {"jax": jax, "jax.dlpack": dlpack}):
            self.assertEqual(self.array("float32").jax(), (2, 32))
            self.assertEqual(self.array("bfloat16").jax(), (4, 16))
            self.assertEqual(self.array("float8_e4m3fn").jax(), ("cast", (1, 8), "jax fp8"))

    def test_cupy_and_numba(self):
        cupy, numba, cuda = types.ModuleType("cupy"), types.ModuleType("numba"), types.ModuleType("numba.cuda")
        numba.cuda = cuda
        cupy.asarray = cuda.as_cuda_array = lambda array: array.__cuda_array_interface__["typestr"]
        cupy.empty = lambda shape, dtype: ("empty", shape, dtype)
        with mock.patch.dict(sys.modules, {"cupy": cupy, "numba": numba, "numba.cuda": cuda}):
            array = self.array("bfloat16")
            self.assertEqual((array.cupy(), array.numba()), ("<u2", "<u2"))
            self.assertEqual(self.array("float8_e5m2", (0,)).cupy(), ("empty", (0,), "|u1"))


class Streams(unittest.TestCase):
    """Whose current stream is taken, with stand-ins for the frameworks' modules."""

    def test_objects(self):
        for stream, value in ((0, 1), (7, 7), (types.SimpleNamespace(cuda_stream=9), 9), (types.SimpleNamespace(ptr=0), 1),
                              (types.SimpleNamespace(__cuda_stream__=lambda: (0, 11)), 11),
                              (types.SimpleNamespace(__cuda_stream__=(0, 12)), 12),
                              (types.SimpleNamespace(handle=ctypes.c_void_p(13)), 13)):
            self.assertEqual(gpuloan._stream_of(stream), value)
        for stream in (-1, 1 << 64):
            with self.assertRaisesRegex(ValueError, "stream is"):
                gpuloan._stream_of(stream)

    def test_of_no_stream(self):
        """A producer is told so in DLPack's word."""
        asked = []
        tensor = fakes.Dlpack("uint8", (2,), b"ab")
        tensor.__class__ = type("Asked", (fakes.Dlpack,), {
            "__dlpack__": lambda self, stream=None, **options: (asked.append(stream), fakes.Dlpack.__dlpack__(self, stream, **options))[1]})
        for stream in (gpuloan.STREAM_CPU, 7):
            gpuloan._source(tensor, stream)
        self.assertEqual(asked, [-1, 7])

    def test_current(self):
        asked = []
        torch, cupy = types.ModuleType("torch"), types.ModuleType("cupy")
        torch.cuda = types.SimpleNamespace(is_initialized=lambda: True, current_stream=lambda device: (
            asked.append(device), types.SimpleNamespace(cuda_stream=21))[1])
        cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=22))
        of_torch = type("Tensor", (), {"__module__": "torch", "device": "cuda:3"})()
        of_cupy = type("ndarray", (), {"__module__": "cupy._core"})()
        with mock.patch.dict(sys.modules, torch=torch, cupy=cupy):
            self.assertEqual([gpuloan._stream_of(None, x, 5) for x in (of_torch, of_cupy, object())], [21, 22, 21])
            self.assertEqual(asked, ["cuda:3", 5])
            torch.cuda.is_initialized = lambda: False
            self.assertEqual(gpuloan._stream_of(None, object()), 22)
            named = types.SimpleNamespace(__cuda_array_interface__={"stream": 23})  # numba's arrays say theirs
            self.assertEqual(gpuloan._stream_of(None, named), 23)
            named.__cuda_array_interface__["stream"] = None
            self.assertEqual(gpuloan._stream_of(None, named), 22)
        with mock.patch.dict(sys.modules, cupy=cupy):
            self.assertEqual(gpuloan._stream_of(None, object()), 22)
        self.assertEqual(gpuloan._stream_of(None, object()), gpuloan.STREAM_LEGACY)


if __name__ == "__main__":
    main()
