#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A PyTorch parent and workers in PyTorch, CuPy, JAX and C, both directions, every value checked on the device.

Usage: frameworks.py LIBGPULOAN WORKER_C [--allocator default|torch_pool|expandable|swap] [--workers torch,cupy,jax,c] [--quick]
       [--parent torch|plain]

WORKER_C is docs/examples/worker.c, built. Inputs are read loans of the parent's tensors, made by the chosen allocator; the worker counts
the elements that are not the test pattern of pattern.py. Results are asked for by the worker, filled by it and checked by the parent, in
the arena or (rows 'own') in a tensor of the parent's. Prints a row for each: allocator, worker, direction, case, dtype, shape, rung,
bytes copied, milliseconds, ok. The last line is 'N passed, N failed'. A worker that dies is a failed row, and a new one takes its place.

`--parent plain --workers plain,c --quick` needs no framework: it tries this script's logic on the simulated driver."""
import argparse
import ctypes
import os
import pathlib
import signal
import sys
import threading
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "lib/python")]
from pattern import FRAMEWORKS, ITEMSIZE, PIECE, elements  # noqa: E402

TIMEOUT = 60  # seconds, of any one wait
TOTAL = 300   # of the whole run
GIB = 1 << 30
SMALL, WIDE = (1021, 513), (700, 1300)
HUGE = {"6 GiB": (25, PIECE), "40 GiB": (161, PIECE)}  # float32: 6.25 and 40.2 GiB


# ---- The worker -------------------------------------------------------------------------------------------------------------------

def answer(peer, framework, loan, words):
    """One job; what it means is in docs/examples/worker.c. A further word 't' of fill: made as the transpose of another array."""
    if words[0] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if words[0] == "check":
        array = loan.tensor
        wrong = framework.wrong_of(array, int(words[1]))
        with peer.request((2,), "int64", timeout=TIMEOUT, user=b"check") as out:
            out_bytes = wrong.to_bytes(8, "little") + elements(array.shape).to_bytes(8, "little")
            out.copy_from(out_bytes)
    elif words[0] == "fill":
        shape = tuple(int(each) for each in words[3].split(","))
        out = peer.request(shape, words[2], timeout=TIMEOUT, user=" ".join(words[:2]).encode())
        framework.write(out, int(words[1]), "t" in words[4:])
        out.done()
    elif words[0] == "echo":
        array = loan.tensor
        out = peer.request(array.shape, array.dtype, timeout=TIMEOUT, user=b"echo")
        out.copy_from(array)
        out.done()
    else:
        raise ValueError(f"no job of this worker's: {words}")


def work(kind):
    import gpuloan
    framework = FRAMEWORKS[kind]()
    with gpuloan.worker(timeout=TIMEOUT) as peer:
        while True:
            loan = peer.next_loan(TIMEOUT * 5)
            if loan is None:
                return 0
            try:
                loan.tensor
                answer(peer, framework, loan, loan.user.decode().split())
                loan.done()
            except Exception as error:  # the parent is told why
                traceback.print_exc()
                loan.fail(f"{type(error).__name__}: {error}"[:500])


# ---- The parent's memory ----------------------------------------------------------------------------------------------------------

class TorchMemory:
    """Tensors of PyTorch's, by the allocator that was chosen."""

    def __init__(self, allocator):
        self.framework, self.allocator = FRAMEWORKS["torch"](), allocator
        self.torch = self.framework.module

    def empty(self, elements_, dtype):
        import gpuloan
        make = lambda: self.torch.empty(elements_, device="cuda", dtype=getattr(self.torch, dtype))  # noqa: E731
        if self.allocator != "torch_pool":
            return make()
        with gpuloan.torch_pool():
            return make()

    def make(self, case, filled):
        """A tensor, or a view of one, filled with the pattern or with zeros."""
        if case.kind == "transposed":
            tensor = self.empty(elements(case.shape), case.dtype).view(case.shape[::-1]).t()
        elif case.kind == "offset":
            base = self.empty(case.offset // ITEMSIZE[case.dtype] + elements(case.shape) + 1000, case.dtype)
            tensor = base[case.offset // ITEMSIZE[case.dtype]:][:elements(case.shape)].view(case.shape)
        else:
            tensor = self.empty(elements(case.shape), case.dtype).view(case.shape)
        if filled:
            self.framework.fill(tensor, case.seed)
        else:
            self.framework.bits(tensor).zero_()
        return tensor

    def wrong(self, tensor, case):
        return self.framework.wrong(tensor, case.seed)

    def free(self):
        import gpuloan
        self.torch.cuda.synchronize()
        gpuloan.torch_pool_release()
        self.torch.cuda.empty_cache()


class PlainTensor:
    """Device memory by the driver alone, that looks like a tensor with a data_ptr."""

    def __init__(self, memory, case):
        self.shape, self.dtype, self.driver = case.shape, case.dtype, memory.driver
        self.is_cuda, self.size = True, elements(case.shape) * ITEMSIZE[case.dtype]
        pointer = ctypes.c_uint64()
        if self.size and memory.driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(self.size)) != 0:
            raise MemoryError(self.size)
        self.pointer = pointer.value

    def data_ptr(self):
        return self.pointer

    def element_size(self):
        return ITEMSIZE[self.dtype]

    def stride(self):
        return tuple(elements(self.shape[i + 1:]) for i in range(len(self.shape)))

    def __del__(self):
        if self.pointer:
            self.driver.cuMemFree_v2(ctypes.c_uint64(self.pointer))


class PlainMemory:
    def __init__(self, _):
        import gpuloan
        self.framework = FRAMEWORKS["plain"]()
        self.driver = ctypes.CDLL(gpuloan.driver_info().path)
        context, device = ctypes.c_void_p(), ctypes.c_int()
        for code in (self.driver.cuInit(0), self.driver.cuDeviceGet(ctypes.byref(device), 0),
                     self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), self.driver.cuCtxSetCurrent(context),
                     self.driver.cuStreamCreate(ctypes.byref(context), 1)):
            if code != 0:
                raise OSError(f"the driver says {code}")
        self.stream = context

    def make(self, case, filled):
        tensor = PlainTensor(self, case)
        data = self.framework.pattern(case.seed, case.dtype, elements(case.shape)) if filled else bytes(tensor.size)
        if tensor.size:
            self.driver.cuMemcpyHtoDAsync_v2(ctypes.c_uint64(tensor.pointer), data, ctypes.c_size_t(tensor.size), self.stream)
            self.driver.cuStreamSynchronize(self.stream)
        return tensor

    def wrong(self, tensor, case):
        data = ctypes.create_string_buffer(tensor.size)
        if tensor.size:
            self.driver.cuMemcpyDtoHAsync_v2(data, ctypes.c_uint64(tensor.pointer), ctypes.c_size_t(tensor.size), self.stream)
            self.driver.cuStreamSynchronize(self.stream)
        return self.framework.differ(data.raw, case.seed, case.dtype, case.shape)

    def free(self):
        pass


# ---- The parent -------------------------------------------------------------------------------------------------------------------

class Case:
    def __init__(self, direction, name, dtype, shape, kind="plain", offset=0, seed=0):
        self.direction, self.name, self.dtype, self.shape, self.kind, self.offset, self.seed = direction, name, dtype, shape, kind, offset, seed


class Job:
    """A tensor without elements, which carries what is to be done."""
    __cuda_array_interface__ = {"shape": (0,), "typestr": "|u1", "data": (0, False), "version": 3, "strides": None}


def cases(arguments, kind):
    """The largest first: the pool of cudaMallocAsync keeps what it has, and that serves the others."""
    found = []
    if not arguments.quick:
        # JAX takes 60 GiB for a result of 40, which is too much beside what such a pool keeps.
        ways = ("input",) if (arguments.allocator, kind) == ("swap", "jax") else ("input", "result")
        found += [Case(way, "40 GiB", "float32", HUGE["40 GiB"]) for way in ways]
        found += [Case(way, "6 GiB", "float32", HUGE["6 GiB"]) for way in ("input", "result")]
        found += [Case(way, "at 3 GiB", "float32", (1 << 10, 1 << 10), "offset", 3 * GIB + 4096) for way in ("input", "own")]
    for dtype in ("uint8", "float32", "bfloat16", "float8_e4m3fn"):
        found += [Case("input", dtype, dtype, SMALL), Case("result", dtype, dtype, SMALL), Case("own", dtype, dtype, SMALL)]
    found += [Case("input", "zero-size", "float32", (0, 7)), Case("result", "zero-size", "bfloat16", (3, 0))]
    if arguments.parent == "torch":
        found += [Case("input", "transposed", dtype, WIDE, "transposed") for dtype in ("float32", "bfloat16", "float8_e4m3fn")]
    found += [Case("result", "transposed", "float32", WIDE, "transposed")]
    for number, case in enumerate(found):
        case.seed = 7 + 5 * number
    return found


class Run:
    def __init__(self, arguments, parent, memory):
        self.arguments, self.parent, self.memory = arguments, parent, memory
        self.passed = self.failed = 0
        self.own = None
        parent.grant = self.grant

    def grant(self, request):
        tensor, self.own = self.own, None
        return tensor

    def start(self, kind):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTORCH_")}
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        command = [self.arguments.worker_c] if kind == "c" else [sys.executable, __file__, self.arguments.library, "-", "--worker", kind]
        return self.parent.spawn(command, env=environment, timeout=TIMEOUT)

    def input(self, peer, case):
        """The worker reads a tensor of ours and says how many elements are wrong."""
        tensor = self.memory.make(case, filled=True)
        loan = peer.lend(tensor, "read", user=f"check {case.seed}".encode())
        loan.wait(TIMEOUT)
        result = self.parent.next_result(TIMEOUT, peer)
        numbers = result.copy_to_host()
        wrong, seen = (int.from_bytes(numbers[at:at + 8], "little") for at in (0, 8))
        return loan.report(), "" if (wrong, seen) == (0, elements(case.shape)) else f"{wrong} of {seen} wrong at the worker"

    def result(self, peer, case):
        """The worker makes a tensor; we check it. 'own': in memory of ours."""
        own = self.own = self.memory.make(case, filled=False) if case.direction == "own" else None
        shape = ",".join(map(str, case.shape))
        text = f"fill {case.seed} {case.dtype} {shape}{' t' if case.kind == 'transposed' else ''}"
        loan = peer.lend(Job(), "read", user=text.encode())
        loan.wait(TIMEOUT)
        result = self.parent.next_result(TIMEOUT, peer)
        if (tuple(result.shape), result.dtype, result.user) != (case.shape, case.dtype, f"fill {case.seed}".encode()):
            return result.report, f"came as {result.dtype} {result.shape} {result.user!r}"
        wrong = self.memory.framework.wrong_of(result, case.seed)
        if own is not None:
            wrong += self.memory.wrong(own, case)
        return result.report, "" if wrong == 0 else f"{wrong} wrong"

    def row(self, kind, case, peer):
        """True while the worker is usable."""
        report, begin = None, time.monotonic()
        try:
            self.memory.free()
            report, why = (self.input if case.direction == "input" else self.result)(peer, case)
            copied = report.copied_bytes
            if not why and copied and self.arguments.allocator != "swap":
                why = f"copied: {report.rung_reason}"
            alive = True
        except Exception as error:
            why, alive = f"{type(error).__name__}: {error}", False
            if os.environ.get("FRAMEWORKS_TRACE"):
                traceback.print_exc()
        self.own = None
        shape = "x".join(map(str, case.shape))
        rung, copied = (report.rung, report.copied_bytes) if report is not None else ("-", "-")
        print(f"{self.arguments.allocator:10} {kind:6} {case.direction:6} {case.name:14} {case.dtype:13} {shape:14} {rung!s:5} {copied!s:>11} "
              f"{(time.monotonic() - begin) * 1000:9.1f} ms  {'FAILED: ' + why if why else 'ok'}", flush=True)
        self.passed, self.failed = self.passed + (not why), self.failed + bool(why)
        return alive

    def kind(self, kind):
        peer = None
        for case in cases(self.arguments, kind):
            try:
                peer = peer or self.start(kind)
            except Exception as error:
                print(f"{self.arguments.allocator:10} {kind:6} start  FAILED: {type(error).__name__}: {error}", flush=True)
                self.failed += 1
                return
            if not self.row(kind, case, peer):
                end(peer)
                peer = None
        end(peer)


def end(peer):
    if peer is not None:
        peer.close()
        try:
            peer.process.wait(10)
        except Exception:
            peer.process.kill()
            peer.process.wait(10)


def too_long(run):
    print(f"the whole run took more than {TOTAL} s\n{run.passed} passed, {run.failed + 1} failed", flush=True)
    os._exit(1)


def main(arguments):
    import gpuloan
    if arguments.allocator == "swap":
        gpuloan.pool_install(0)
    memory = (TorchMemory if arguments.parent == "torch" else PlainMemory)(arguments.allocator)
    options = {"rungs": ("vmm", "pool", "ipc", "host")} if arguments.allocator == "swap" else {}
    with gpuloan.Exporter(**options) as parent:
        run = Run(arguments, parent, memory)
        watchdog = threading.Timer(TOTAL, too_long, (run,))
        watchdog.daemon = True
        watchdog.start()
        for kind in arguments.workers.split(","):
            run.kind(kind)
        memory.free()
        watchdog.cancel()
    print(f"{run.passed} passed, {run.failed} failed", flush=True)
    return 0 if run.failed == 0 and run.passed else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("library")
    parser.add_argument("worker_c")
    parser.add_argument("--allocator", choices=("default", "torch_pool", "expandable", "swap"), default="default")
    parser.add_argument("--workers", default="torch,cupy,jax,c")
    parser.add_argument("--parent", choices=("torch", "plain"), default="torch")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker")
    parsed = parser.parse_args()
    os.environ["GPULOAN_LIBRARY"] = parsed.library
    if parsed.worker:
        sys.exit(work(parsed.worker))
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = {"expandable": "expandable_segments:True", "swap": "backend:cudaMallocAsync"}.get(
        parsed.allocator, "")
    sys.exit(main(parsed))
