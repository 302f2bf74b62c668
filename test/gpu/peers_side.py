#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""One measurement of peers.py, and the workers of its methods: peers_side.py LIBGPULOAN METHOD BYTES latency|peak|kill [--quick].
Prints one line of JSON."""
import ctypes as c
import gc
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "lib/python")]
from peers_others import ENDLESS, GIB, LIMIT, MIB, CoreMethod, Died, TorchMethod  # noqa: E402


# ---- The driver -------------------------------------------------------------------------------------------------------------------

class Driver:
    """A few calls in the primary context, which the frameworks share."""

    def __init__(self):
        import gpuloan
        self.calls, self.context, device = c.CDLL(gpuloan.driver_info().path), c.c_void_p(), c.c_int()
        self("cuInit", 0)
        self("cuDeviceGet", c.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", c.byref(self.context), device)
        self.enter()
        self.stream = c.c_void_p()
        self("cuStreamCreate", c.byref(self.stream), 1)

    def __call__(self, name, *arguments):
        code = getattr(self.calls, name)(*arguments)
        if code != 0:
            raise OSError(f"{name}: CUresult {code}")

    def enter(self):
        """For each thread."""
        self("cuCtxSetCurrent", self.context)

    def free(self):
        free, total = c.c_size_t(), c.c_size_t()
        self("cuMemGetInfo_v2", c.byref(free), c.byref(total))
        return free.value

    def fill(self, pointer, value, size):
        self("cuMemsetD8Async", c.c_uint64(pointer), c.c_ubyte(value), c.c_size_t(size), self.stream)

    def wait(self):
        self("cuStreamSynchronize", self.stream)

    def write_until_killed(self, pointer, size):
        while True:
            for _ in range(16):
                self.fill(pointer, 1, size)
            self.wait()

    def ends(self, pointer, size):
        """The first and the last byte."""
        seen = (c.c_ubyte * 2)()
        for at, source in enumerate((pointer, pointer + size - 1)):
            self("cuMemcpyDtoHAsync_v2", c.byref(seen, at), c.c_uint64(source), c.c_size_t(1), self.stream)
        self.wait()
        return tuple(seen)


# ---- gpuloan.py -------------------------------------------------------------------------------------------------------------------

class ModuleMethod:
    """A job, and the result that the worker asks for: in Python on both sides."""

    def __init__(self, method, driver):
        import gpuloan
        from frameworks import Job
        self.gpuloan, self.job, self.driver, self.value, self.tensor = gpuloan, Job(), driver, 0, None
        self.parent = gpuloan.Exporter(idle_bytes=2 * MIB)
        self.parent.__enter__()
        self.peer = self.parent.spawn([sys.executable, __file__, sys.argv[1], "module-worker", "0", "latency"], timeout=LIMIT)
        self.process = self.peer.process

    def round(self, size):
        self.value = (self.value + 1) % 128
        self.tensor = None
        self.loan = self.peer.lend(self.job, "read", user=b"%d %d" % (size, self.value))
        self.tensor = self.parent.next_result(LIMIT, self.peer)

    def work(self):
        pass

    def check(self, size):
        return self.tensor.nbytes == size and self.driver.ends(self.tensor.pointer, size) == (self.value, self.value)

    def endless(self, size):
        self.loan = self.peer.lend(self.job, "read", user=b"%d %d" % (size, ENDLESS))

    def told(self):
        try:
            self.parent.next_result(5, self.peer)
        except self.gpuloan.Timeout:
            return None
        except self.gpuloan.Error as error:
            return error.name
        return None

    def drop(self):
        self.tensor = self.loan = None
        gc.collect()

    def end(self):
        self.drop()
        self.peer.close()
        self.process.wait(LIMIT)


def module_worker(driver):
    import gpuloan
    with gpuloan.worker(timeout=LIMIT) as peer:
        for loan in peer:
            size, value = map(int, loan.user.split())
            loan.tensor
            loan.done()
            out = peer.request((size,), "uint8", timeout=LIMIT)
            if value == ENDLESS:
                driver.write_until_killed(out.tensor.pointer, size)
            driver.fill(out.tensor.pointer, value, size)
            out.done(stream=driver.stream.value)


# ---- gpuloan's C interface --------------------------------------------------------------------------------------------------------

class Sized(c.Structure):
    def __init__(self, **members):
        super().__init__(size=c.sizeof(self), **members)


class ContextOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("role", c.c_uint32), ("loop", c.c_uint32), ("engine", c.c_uint32), ("flags", c.c_uint32),
                ("driver", c.c_char_p), ("device", c.c_int32), ("rungs", c.c_uint32), ("gate", c.c_uint32), ("gpu_wait_limit", c.c_uint32),
                ("slots", c.c_uint32), ("canary_timeout_ms", c.c_uint32), ("idle_bytes", c.c_uint64), ("account_bytes", c.c_uint64),
                ("pool_import_limit", c.c_uint64)]


class RegionOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("bytes", c.c_uint64), ("alignment", c.c_uint64), ("access", c.c_uint32), ("memory", c.c_uint32)]


class LendOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("access", c.c_uint32), ("policy", c.c_uint32), ("rungs", c.c_uint32), ("gate", c.c_uint32),
                ("memory", c.c_uint32), ("keep_open", c.c_uint32), ("stream", c.c_void_p), ("metadata", c.c_char_p),
                ("metadata_bytes", c.c_size_t), ("release", c.c_void_p), ("release_user", c.c_void_p), ("exclusive", c.c_uint32)]


class Event(Sized):
    _fields_ = [("size", c.c_size_t), ("type", c.c_uint32), ("status", c.c_int), ("peer", c.c_void_p), ("loan", c.c_void_p),
                ("request", c.c_void_p), ("text", c.c_char * 512)]


class View(Sized):
    _fields_ = [("size", c.c_size_t), ("pointer", c.c_uint64), ("host", c.c_void_p), ("bytes", c.c_uint64), ("access", c.c_uint32),
                ("turn", c.c_uint32), ("metadata", c.c_void_p), ("metadata_bytes", c.c_size_t)]


EXPORTER, IMPORTER, WRITE, THREAD, CALLER, STREAM_CPU = 1, 2, 2, 0, 1, c.c_void_p(-1)
PEER_READY, PEER_LOST, LOAN_OFFERED = 1, 2, 5
TIMEOUT, STATE = -2, -4


class Library:
    def __init__(self, path, method, role):
        self.lib, self.context = c.CDLL(path), c.c_void_p()
        self.lib.gpuloan_error_text.restype = self.lib.gpuloan_status_name.restype = c.c_char_p
        self.lib.gpuloan_region_pointer.restype = c.c_uint64
        self.lib.gpuloan_loan_unref.restype = self.lib.gpuloan_context_destroy.restype = self.lib.gpuloan_peer_close.restype = None
        self.lib.gpuloan_lend.argtypes = [c.c_void_p, c.c_uint64, c.c_uint64, c.c_void_p, c.c_void_p]
        options = ContextOptions(role=role, loop=CALLER if method == "loans" else THREAD, idle_bytes=2 * MIB)
        self("context_create", c.byref(options), c.byref(self.context))

    def __call__(self, name, *arguments, fine=()):
        status = getattr(self.lib, "gpuloan_" + name)(*arguments)
        if status != 0 and status not in fine:
            raise Died(f"{self.lib.gpuloan_status_name(status).decode()}: {self.lib.gpuloan_error_text().decode()}")
        return status

    def event(self, *wanted):
        while True:
            event = Event()
            self("context_next_event", self.context, LIMIT * 1000, c.byref(event))
            if event.type in wanted:
                return event


class LoanMethod:
    """loans: both contexts are driven by their callers, who block. turns: each has its thread, and adaptive spinning."""

    def __init__(self, method, driver):
        self.method, self.driver, self.count = method, driver, 0
        self.library = Library(sys.argv[1], method, EXPORTER)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ, GPULOAN_FD=str(theirs.fileno()))
        self.process = subprocess.Popen([sys.executable, __file__, sys.argv[1], method + "-worker", "0", "latency"],
                                        pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self.library("context_attach", self.library.context, ours.detach(), None)
        self.peer = c.c_void_p(self.library.event(PEER_READY).peer)
        self.region, self.loan, self.size = None, None, 0

    def room(self, size):
        if self.region is None or self.size != size:
            self.drop()
            self.region, self.size = c.c_void_p(), size
            self.library("region_create", self.peer, c.byref(RegionOptions(bytes=size, access=WRITE)), c.byref(self.region))
            self.pointer = self.library.lib.gpuloan_region_pointer(self.region)

    def lend(self, metadata=b""):
        self.loan = c.c_void_p()
        options = LendOptions(access=WRITE, keep_open=self.method == "turns", metadata=metadata or None, metadata_bytes=len(metadata))
        self.library("lend", self.peer, self.pointer, self.size, c.byref(options), c.byref(self.loan))

    def round(self, size):
        if self.size != size:
            self.room(size)
        self.count += 1
        if self.method == "turns":
            if self.loan is None:
                self.lend()
            else:
                self.library("loan_ready", self.loan, STREAM_CPU)
            self.library("loan_wait_done", self.loan, LIMIT * 1000)
        else:
            self.lend()
            self.library("loan_wait_end", self.loan, LIMIT * 1000)
            self.library.lib.gpuloan_loan_unref(self.loan)
            self.loan = None

    def work(self):
        if self.method == "loans":
            self.library("context_dispatch", self.library.context, 0)

    def check(self, size):
        value = self.count % 128
        return self.driver.ends(self.pointer, size) == (value, value)

    def endless(self, size):
        self.room(size)
        self.lend(b"endless")

    def told(self):
        try:
            status = self.library("loan_wait_end", self.loan, 5000, fine=(TIMEOUT,))
            return None if status == TIMEOUT else "OK"
        except Died as death:
            return str(death).split(":")[0]

    def drop(self):
        if self.loan is not None:
            if self.method == "turns":
                self.library("reclaim", self.loan, LIMIT * 1000)
            self.library.lib.gpuloan_loan_unref(self.loan)
            self.loan = None
        if self.region is not None:
            self.library("region_destroy", self.region)
            self.region, self.size = None, 0

    def end(self):
        self.drop()
        self.library.lib.gpuloan_peer_close(self.peer)
        self.process.wait(LIMIT)


def loan_worker(method, driver):
    library, peer, count = Library(sys.argv[1], method, IMPORTER), c.c_void_p(), 0
    library("context_adopt", library.context, int(os.environ["GPULOAN_FD"]), LIMIT * 1000, c.byref(peer))
    while True:
        event = library.event(LOAN_OFFERED, PEER_LOST)
        if event.type == PEER_LOST:
            return
        loan, view = c.c_void_p(event.loan), View()
        while library("loan_acquire", loan, LIMIT * 1000, c.byref(view), fine=(STATE,)) == 0:
            if view.metadata_bytes:
                driver.write_until_killed(view.pointer, view.bytes)
            count += 1
            driver.fill(view.pointer, count % 128, view.bytes)
            library("loan_done", loan, driver.stream)
            if method == "loans":
                break
        library.lib.gpuloan_loan_unref(loan)


# ---- The measurements -------------------------------------------------------------------------------------------------------------

METHODS = {"queue": TorchMethod, "pipe": TorchMethod, "shm": TorchMethod, "core": CoreMethod, "module": ModuleMethod, "loans": LoanMethod,
           "turns": LoanMethod}


def latency(method, size, quick, driver):
    many = 300 if size <= 2 * MIB else 100 if size <= 64 * MIB else 20 if size <= GIB else 5
    many = max(2, (many if method != "shm" else min(20, many // 5)) // (10 if quick else 1))
    peer = METHODS[method](method, driver)
    times = []
    for number in range(many + max(2, many // 10)):
        begin = time.perf_counter_ns()
        peer.round(size)
        times.append(time.perf_counter_ns() - begin)
    if not peer.check(size):
        raise Died("the worker's bytes are not what it should have written")
    peer.end()
    return {"us": statistics.median(times[-many:]) / 1000, "rounds": many}


def peak(method, size, _, driver):
    """The most device memory that one handover takes beyond what is in use before, by looking all the time."""
    peer = METHODS[method](method, driver)
    for _ in range(2):
        peer.round(64 << 10)
    peer.drop()
    time.sleep(0.2)
    before, lowest, stop = driver.free(), [driver.free()], threading.Event()

    def look():
        driver.enter()
        while not stop.is_set():
            lowest[0] = min(lowest[0], driver.free())
    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    peer.round(size)
    lowest[0] = min(lowest[0], driver.free())
    stop.set()
    looker.join()
    good = peer.check(size)
    peer.end()
    if not good:
        raise Died("the worker's bytes are not what it should have written")
    return {"bytes": before - lowest[0]}


def kill(method, size, _, driver):
    """A first worker ends well, so that what stays of it is no loss. The second is killed while it writes."""
    first = METHODS[method](method, driver)
    first.round(size)
    first.end()
    time.sleep(0.5)
    before = driver.free()
    peer = METHODS[method](method, driver)
    peer.round(64 << 10)
    peer.drop()
    peer.endless(size)
    time.sleep(0.5)
    begin = time.monotonic()
    os.kill(peer.process.pid, signal.SIGKILL)
    how = peer.told()
    told = None if how is None else (time.monotonic() - begin) * 1000
    peer.process.join() if hasattr(peer.process, "join") else peer.process.wait()
    peer.drop()
    end = time.monotonic() + 2
    while driver.free() < before and time.monotonic() < end:
        peer.work()
        time.sleep(0.01)
    return {"told_ms": told, "how": how, "missing": max(0, before - driver.free())}


if __name__ == "__main__":
    os.environ["GPULOAN_LIBRARY"] = sys.argv[1]
    method, size, what = sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if method == "module-worker":
        module_worker(Driver())
    elif method.endswith("-worker"):
        loan_worker(method.removesuffix("-worker"), Driver())
    else:
        print(json.dumps({"latency": latency, "peak": peak, "kill": kill}[what](method, size, "--quick" in sys.argv, Driver())), flush=True)
        os._exit(0)  # whatever a killed worker left of other people's queues
