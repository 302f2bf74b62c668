#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Tries whether this interpreter's framework and that one's hand tensors to each other as they should.

    python3 qualify.py -- WORKER_PYTHON [torch|cupy|jax|none]

Run it under the parent's interpreter, with PyTorch if that has it, and name the interpreter of the worker and, if you like, its framework
(else the first of torch, cupy and jax that has CUDA there). For each rung that may carry loans a new worker gets gpuloan's canary
battery, tensors of several types and sizes to read, results to write in the arena and in the parent's memory and a job that fails, and is
killed at last. Prints TAP, a row for each rung and case, and exits with
  0   all is good
  1   not all: the last line has the first rung and case that failed
  77  nothing was tried, as a framework of the two cannot use a GPU (a build for the CPU, say): the plan, 1..0 # SKIP, says which and why
Without a GPU: GPULOAN_DRIVER=sim, whose memory no framework can use; each that is there is a skipped row. Put it where new patch
releases of pinned frameworks are tried, and let 77 fail there too."""
import ctypes
import importlib
import importlib.util
import os
import signal
import struct
import subprocess
import sys

# The parent's gpuloan.py, and nothing else of the folder it is in: that may have another framework.
if sys.argv[1:2] in (["--worker"], ["--look"]):
    _spec = importlib.util.spec_from_file_location("gpuloan", sys.argv[3])
    gpuloan = sys.modules["gpuloan"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(gpuloan)
else:
    import gpuloan

TIMEOUT = 30
SKIPPED = 77
FRAMEWORKS = ("torch", "cupy", "jax")
RUNGS = ("vmm", "ipc", "host")
ITEMSIZE = {"uint8": 1, "float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
FP8 = (0x00, 0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E)  # 0 to 7


def packed(value, dtype):
    if dtype == "uint8":
        return bytes([value])
    if dtype == "float8_e4m3fn":
        return bytes([FP8[value]])
    return struct.pack("<f", value)[2 if dtype == "bfloat16" else 0:]


def data(dtype, count, more=0):
    """Element i is i % 7, and `more`."""
    return (b"".join(packed(i % 7 + more, dtype) for i in range(7)) * (count // 7 + 1))[:count * ITEMSIZE[dtype]]


# ---- The worker -------------------------------------------------------------------------------------------------------------------

def without_cuda(name, module):
    """Why the framework cannot use the GPU; "" where it can."""
    try:
        if name == "torch":
            built = getattr(module.version, "cuda", None)
            return "" if module.cuda.is_available() else "it sees no CUDA device" if built else "it is built without CUDA"
        if name == "cupy":
            return "" if module.cuda.runtime.getDeviceCount() else "it sees no CUDA device"
        on_gpu = any(device.platform in ("gpu", "cuda") for device in module.devices())
        return "" if on_gpu else "it is built for the CPU, or sees no CUDA device"
    except Exception as error:  # its runtime is not there
        return " ".join(f"{type(error).__name__}: {error}".split())


def framework(name):
    """(name, module, why it cannot be used) of the one that was asked for, else of the first that can be, else of the first."""
    found = []
    for each in FRAMEWORKS if name == "any" else () if name == "none" else (name,):
        try:
            module = importlib.import_module(each)
        except ImportError:
            if name != "any":
                raise
        else:
            found.append((each, module, without_cuda(each, module)))
    return next((one for one in found if not one[2]), found[0] if found else ("none", None, ""))


def look(name):
    """For the parent, before it starts workers."""
    name, module, why = framework(name)
    print(name, getattr(module, "__version__", ""), why, sep="\t")
    return 0


def plus_one(name, module, tensor, out):
    """out = tensor + 1, computed in the framework; False: it has no arithmetic for this type, so out = tensor."""
    if name == "torch":
        out.torch().copy_((tensor.torch().to(module.float32) + 1).to(getattr(module, tensor.dtype)))
    elif name == "jax":
        out.copy_from((tensor.jax().astype("float32") + 1).astype(getattr(module.numpy, tensor.dtype)).block_until_ready())
    elif name == "cupy":
        plain = tensor.dtype in ("uint8", "float32")
        out.cupy()[...] = tensor.cupy() + 1 if plain else tensor.cupy()
        return plain
    else:
        out.copy_from(tensor)
        return False
    return True


def can_compute(name, dtype):
    return name in ("torch", "jax") or (name == "cupy" and dtype in ("uint8", "float32"))


def serve(name):
    name, module, _ = framework(name)
    if name == "cupy":
        module.zeros(1)
    version = f"{name} {module.__version__}" if module else "no framework"
    with gpuloan.worker(timeout=TIMEOUT) as peer:
        for loan in peer:
            try:
                with loan as tensor:
                    if loan.user == b"die":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if loan.user == b"version":
                        with peer.request((len(version),), "uint8") as out:
                            out.copy_from(version.encode())
                        continue
                    if loan.user != b"next":
                        raise ValueError("this job fails, as it should")
                    more = b"1" if can_compute(name, tensor.dtype) else b"0"
                    out = peer.request(tensor.shape, tensor.dtype, user=more, timeout=TIMEOUT)
                    plus_one(name, module, tensor, out.tensor)
                    out.done()
            except gpuloan.PeerError:
                raise
            except Exception as error:
                sys.stderr.write(f"# {type(error).__name__}: {error}\n")


# ---- The parent's memory ----------------------------------------------------------------------------------------------------------

class Plain:
    """Memory of cuMemAlloc's, that looks like a tensor: where there is no PyTorch."""

    def __init__(self, driver, dtype, count):
        self.driver, self.dtype, self.shape, self.pointer = driver, dtype, (count,), ctypes.c_uint64()
        if count and driver.cuMemAlloc_v2(ctypes.byref(self.pointer), ctypes.c_size_t(count * ITEMSIZE[dtype])) != 0:
            raise MemoryError(count)

    def data_ptr(self):
        return self.pointer.value

    def element_size(self):
        return ITEMSIZE[self.dtype]

    def stride(self):
        return (1,)

    def __del__(self):
        if self.pointer.value:
            self.driver.cuMemFree_v2(self.pointer)


class PlainMemory:
    name = "no framework"

    def __init__(self):
        self.driver, context, self.stream = ctypes.CDLL(gpuloan.driver_info().path), ctypes.c_void_p(), ctypes.c_void_p()
        for code in (self.driver.cuInit(0), self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
                     self.driver.cuCtxSetCurrent(context), self.driver.cuStreamCreate(ctypes.byref(self.stream), 1)):
            if code != 0:
                raise SystemExit(f"Bail out! the driver says {code}")

    def make(self, dtype, count, content):
        tensor = Plain(self.driver, dtype, count)
        if count:
            self.driver.cuMemcpyHtoDAsync_v2(tensor.pointer, content, ctypes.c_size_t(len(content)), self.stream)
            self.driver.cuStreamSynchronize(self.stream)
        return tensor

    def view(self, tensor, first):
        """Elements from `first` on."""
        class View:
            dtype, shape, base = tensor.dtype, (tensor.shape[0] - first,), tensor
            data_ptr = staticmethod(lambda: tensor.data_ptr() + first * ITEMSIZE[tensor.dtype])
            element_size, stride = tensor.element_size, tensor.stride
        return View()

    def read(self, array):
        return array.copy_to_host()


class TorchMemory:
    def __init__(self, torch):
        self.torch, self.name = torch, f"torch {torch.__version__}"

    def make(self, dtype, count, content):
        host = self.torch.frombuffer(bytearray(content or b"\0"), dtype=self.torch.uint8)[:len(content)]
        return host.cuda().view(getattr(self.torch, dtype))

    def view(self, tensor, first):
        return tensor[first:]

    def read(self, array):
        """Through PyTorch, as an application would."""
        return bytes(array.torch().view(self.torch.uint8).cpu().tolist())


def memory():
    """The parent's, and its (framework, why it cannot be used)."""
    try:
        import torch
    except ImportError:
        return PlainMemory(), ("", "")
    why = without_cuda("torch", torch) or simulated()
    return PlainMemory() if why else TorchMemory(torch), (f"torch {torch.__version__}", why)


def simulated():
    return "it cannot use memory of the simulated driver" if gpuloan.driver_info().simulated else ""


def look_at_worker(python, name):
    """(framework, why it cannot be used) of the worker's. Where it does not even start, the battery tells."""
    command = [python, os.path.abspath(__file__), "--look", name, os.path.abspath(gpuloan.__file__)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, env=Battery.environment())
    except OSError as error:
        sys.exit(f"Bail out! The worker's interpreter cannot be started: {error}")
    if found.returncode != 0 and name in FRAMEWORKS:
        sys.exit(f"Bail out! {python} cannot import {name}: {(found.stderr.splitlines() or ['it says nothing'])[-1]}")
    words = (found.stdout.splitlines() or [""])[-1].split("\t")
    if found.returncode != 0 or len(words) != 3 or words[0] == "none":
        return "", ""
    return f"{words[0]} {words[1]}", words[2] or simulated()


# ---- The battery ------------------------------------------------------------------------------------------------------------------

class Battery:
    def __init__(self, command, ours):
        self.command, self.ours, self.rows, self.first_failure, self.worker = command, ours, 0, None, "?"

    def row(self, rung, case, why="", skip=""):
        self.rows += 1
        print(f"{'not ok' if why else 'ok'} {self.rows} - {rung} {case}{f' # SKIP {skip}' if skip else ''}", flush=True)
        if why:
            print(f"# {why}", flush=True)
            self.first_failure = self.first_failure or f"{rung} {case}: {why}"

    def attempt(self, rung, case, function):
        try:
            self.row(rung, case, function() or "")
        except gpuloan.Error as error:
            demoted = [text for text in (self.peer.info().canary_text,) if text] if not isinstance(error, gpuloan.PeerError) else []
            if error.name == "GPULOAN_ERR_NO_RUNG" and not demoted:
                self.row(rung, case, skip=str(error)[:200])
            else:
                self.row(rung, case, f"{error.name}: {error}")
        except Exception as error:
            self.row(rung, case, f"{type(error).__name__}: {error}")

    def job(self, tensor, user):
        self.peer.lend(tensor, "read", user=user).wait(TIMEOUT)
        return self.parent.next_result(TIMEOUT, self.peer)

    def case(self, dtype, count, first=0, own=False):
        """The worker reads `count` elements of ours and answers with each of them plus 1, where its framework can compute that."""
        tensor = self.ours.make(dtype, count, data(dtype, count))
        target = self.ours.make(dtype, count - first, bytes((count - first) * ITEMSIZE[dtype])) if own else None
        self.parent.grant = lambda request: target
        result = self.job(self.ours.view(tensor, first) if first else tensor, b"next")
        self.parent.grant = None
        wanted = data(dtype, count, int(result.user))[first * ITEMSIZE[dtype]:]
        seen = self.ours.read(result) if count else b""
        if (result.dtype, tuple(result.shape)) != (dtype, (count - first,)):
            return f"came as {result.dtype} {result.shape}"
        return "" if seen == wanted else f"{sum(a != b for a, b in zip(seen, wanted))} of {len(wanted)} bytes are wrong"

    def fails(self):
        try:
            self.peer.lend(self.ours.make("uint8", 64, bytes(64)), "read", user=b"fail").wait(TIMEOUT)
        except gpuloan.LoanError as error:
            return "" if "as it should" in str(error) else f"the reason was lost: {error}"
        return "no error"

    def dies(self):
        try:
            self.peer.lend(self.ours.make("uint8", 64, bytes(64)), "read", user=b"die").wait(TIMEOUT)
        except gpuloan.PeerError:
            return ""
        return "no error"

    @staticmethod
    def environment():
        """This process' without PYTHONPATH, which may lead to the parent's framework."""
        return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def rung(self, rung):
        with gpuloan.Exporter(rungs=(rung,)) as self.parent:
            self.peer = self.parent.spawn(self.command, env=self.environment(), timeout=TIMEOUT)
            own = rung == "ipc"  # the arena's memory is none that this rung carries
            for dtype in ITEMSIZE:
                self.attempt(rung, f"{dtype}, 5000 elements", lambda: self.case(dtype, 5000, own=own))
            # At a multiple of 16 bytes: JAX takes no other.
            self.attempt(rung, "float32, a view", lambda: self.case("float32", 5000, first=1236, own=own))
            self.attempt(rung, "float32, zero-size", lambda: self.case("float32", 0))
            self.attempt(rung, "uint8, 4 MiB and a byte", lambda: self.case("uint8", (4 << 20) + 1, own=own))
            self.attempt(rung, "result in the parent's memory", lambda: self.case("float32", 70000, own=True))
            self.attempt(rung, "a job that fails", self.fails)
            canary = self.peer.info().canary_text
            self.row(rung, "canary", canary)
            self.attempt(rung, "a worker that dies", self.dies)
            self.peer.process.kill()
            self.peer.process.wait(TIMEOUT)


def main(arguments):
    try:
        ours, parents = memory()
    except gpuloan.Error as error:
        sys.exit(f"Bail out! {error}")
    python, name = arguments[0], arguments[1] if len(arguments) > 1 else "any"
    if name not in FRAMEWORKS + ("none", "any") or len(arguments) > 2:
        sys.exit(f"Bail out! {' '.join(arguments[1:])} is no framework: one of {', '.join(FRAMEWORKS)} and none can be named")
    unused = [(side, what, why) for side, (what, why) in (("parent", parents), ("worker", look_at_worker(python, name))) if why]
    if any(not simulated() or (side == "worker" and name != "any") for side, _, _ in unused):
        reasons = "; ".join(f"the {side}'s {what}: {why}" for side, what, why in unused)
        print(f"TAP version 13\n1..0 # SKIP {reasons}")
        return SKIPPED
    name = "none" if simulated() else name
    battery = Battery([python, os.path.abspath(__file__), "--worker", name, os.path.abspath(gpuloan.__file__)], ours)
    print(f"TAP version 13\n# parent: {ours.name}; worker: {python}, {name}", flush=True)
    for rung in RUNGS:
        try:
            battery.rung(rung)
        except Exception as error:
            battery.row(rung, "the worker starts", f"{type(error).__name__}: {error}")
    for side, what, why in unused:
        battery.row(side, what, skip=why)
    print(f"1..{battery.rows}")
    print("# all rungs and cases are good" if battery.first_failure is None else f"# FAILED: {battery.first_failure}", flush=True)
    return 0 if battery.first_failure is None else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(serve(sys.argv[2]))
    if sys.argv[1:2] == ["--look"]:
        sys.exit(look(sys.argv[2]))
    words = [word for word in sys.argv[1:] if word != "--"]
    if not words or words[0].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(words))
