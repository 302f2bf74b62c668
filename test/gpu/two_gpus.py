#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Two GPUs of one machine: which one is meant, and what a loan from the one to a worker on the other costs.

Usage: two_gpus.py LIBGPULOAN GPULOAN DEVICE_TEST [real|sim]; GPULOAN is the command, DEVICE_TEST of test/contract. It runs

- device_test;
- `gpuloan lend` and `borrow` with other CUDA_VISIBLE_DEVICES, a file for each GPU, both sides' UUIDs compared;
- `gpuloan demo` with its worker on the other GPU, both ways;
- loans of one GPU's memory to a worker that computes on the other, both ways, for read and for write, all calls of the exporter
  from threads without a current context; the worker's copies and the whole turns are timed beside bare peer copies.

Prints one table last, and exits non-zero when something was wrong. With sim it runs on two simulated devices, where the times
mean nothing."""
import ctypes as c
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

TEXT = 512
COPIES = 8   # timed in one row
TURNS = 16
SLOWEST = 0.8  # of the bare copy, that a loan has to reach on a real GPU
READY_PEER, LOST, OFFERED = 1, 2, 5


# ---- The library --------------------------------------------------------------------------------------------------------

class Sized(c.Structure):
    def __init__(self, **members):
        super().__init__(**members)
        self.size = c.sizeof(self)


class ContextOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("role", c.c_uint32), ("loop", c.c_uint32), ("engine", c.c_uint32), ("flags", c.c_uint32),
                ("driver", c.c_char_p), ("device", c.c_int32), ("rungs", c.c_uint32), ("gate", c.c_uint32)]


class RegionOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("bytes", c.c_uint64), ("alignment", c.c_uint64), ("access", c.c_uint32), ("memory", c.c_uint32)]


class LendOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("access", c.c_uint32), ("policy", c.c_uint32), ("rungs", c.c_uint32), ("gate", c.c_uint32),
                ("memory", c.c_uint32), ("keep_open", c.c_uint32), ("stream", c.c_void_p)]


class Event(Sized):
    _fields_ = [("size", c.c_size_t), ("type", c.c_uint32), ("status", c.c_int), ("peer", c.c_void_p), ("loan", c.c_void_p),
                ("request", c.c_void_p), ("text", c.c_char * TEXT)]


class View(Sized):
    _fields_ = [("size", c.c_size_t), ("pointer", c.c_uint64), ("host", c.c_void_p), ("bytes", c.c_uint64), ("access", c.c_uint32),
                ("turn", c.c_uint32)]


class DriverInfo(Sized):
    _fields_ = [("size", c.c_size_t), ("version", c.c_int32), ("simulated", c.c_uint32), ("devices", c.c_uint32),
                ("path", c.c_char * 256), ("found_by", c.c_char * 64)]


CPU_STREAM = c.c_void_p(2**64 - 1)  # GPULOAN_STREAM_CPU
REQUIRE_ZERO_COPY, CONTEXT_DEVICE = 1, 2


class Library:
    def __init__(self, path, driver):
        self.lib = c.CDLL(path)
        self.driver = driver.encode()
        self.lib.gpuloan_error_text.restype = c.c_char_p
        self.lib.gpuloan_context_destroy.restype = self.lib.gpuloan_loan_unref.restype = None
        self.lib.gpuloan_region_pointer.restype = c.c_uint64
        self.lib.gpuloan_lend.argtypes = [c.c_void_p, c.c_uint64, c.c_uint64, c.c_void_p, c.c_void_p]

    def __call__(self, name, *arguments):
        status = getattr(self.lib, "gpuloan_" + name)(*arguments)
        if status != 0:
            raise SystemExit(f"gpuloan_{name}: status {status}: {self.lib.gpuloan_error_text().decode()}")

    def context(self, role, device):
        made = c.c_void_p()
        self("context_create", c.byref(ContextOptions(role=role, flags=CONTEXT_DEVICE, driver=self.driver, device=device)), c.byref(made))
        return made

    def event(self, context, wanted):
        while True:
            got = Event()
            self("context_next_event", context, 30000, c.byref(got))
            if got.type == wanted:
                return got
            if got.type == LOST:
                raise SystemExit("the other side was lost: " + got.text.decode())


# ---- The driver ---------------------------------------------------------------------------------------------------------

class Cuda:
    """The primary context of one device, current in the thread that made it; memory and one stream of it."""

    def __init__(self, library, device):
        info = DriverInfo()
        library("driver_probe", library.driver, c.byref(info))
        self.simulated, self.devices = info.simulated != 0, info.devices
        self.cu = c.CDLL(info.path.decode())
        self("cuInit", 0)
        self.context = self.retain(device)
        self("cuCtxPushCurrent_v2", self.context)
        self.stream = c.c_void_p()
        self("cuStreamCreate", c.byref(self.stream), 1)

    def __call__(self, name, *arguments):
        result = getattr(self.cu, name)(*arguments)
        if result != 0:
            raise SystemExit(f"{name}: CUresult {result}")

    def retain(self, device):
        context = c.c_void_p()
        self("cuDevicePrimaryCtxRetain", c.byref(context), device)
        return context

    def alloc(self, count):
        pointer = c.c_uint64()
        self("cuMemAlloc_v2", c.byref(pointer), c.c_size_t(count))
        return pointer

    def fill(self, pointer, word, count):
        self("cuMemsetD32Async", c.c_uint64(pointer), c.c_uint(word), c.c_size_t(count // 4), self.stream)
        self.synchronize()

    def copy(self, to, source, count):
        self("cuMemcpyDtoDAsync_v2", c.c_uint64(to), c.c_uint64(source), c.c_size_t(count), self.stream)

    def synchronize(self):
        self("cuStreamSynchronize", self.stream)

    def holds(self, pointer, word, count):
        piece = min(count, 1 << 26)
        wanted = word.to_bytes(4, "little") * (piece // 4)
        host = c.create_string_buffer(piece)
        for at in range(0, count, piece):
            self("cuMemcpyDtoHAsync_v2", host, c.c_uint64(pointer + at), c.c_size_t(piece), self.stream)
            self.synchronize()
            if host.raw != wanted:
                return False
        return True

    def uuid(self, device):
        raw = c.create_string_buffer(16)
        self("cuDeviceGetUuid_v2", raw, device)
        return raw.raw.hex()

    def device_of(self, pointer):
        ordinal, attribute = c.c_int(-1), c.c_int(9)
        out = c.c_void_p(c.addressof(ordinal))
        self("cuPointerGetAttributes", 1, c.byref(attribute), c.byref(out), c.c_uint64(pointer))
        return ordinal.value

    def timed(self, copy):
        """Seconds that COPIES of `copy` take, the driver warm."""
        copy()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(COPIES):
            copy()
        self.synchronize()
        return time.perf_counter() - start


# ---- Processes of the measurement ---------------------------------------------------------------------------------------

def word_of(lender, access):
    return 0x51000000 + lender * 0x10000 + access * 0x100 + 0x2B


def bare(library, worker, lender, count):
    """Copies between cuMemAlloc memory of two devices in one process, on the worker's stream: seconds for read and write."""
    cuda = Cuda(library, worker)
    own, other = cuda.alloc(count).value, cuda.retain(lender)
    if not cuda.simulated:
        cuda("cuCtxEnablePeerAccess", other, 0)
    cuda("cuCtxPushCurrent_v2", other)
    there = cuda.alloc(count).value
    if not cuda.simulated:
        cuda("cuCtxEnablePeerAccess", cuda.context, 0)
    cuda("cuCtxPopCurrent_v2", c.byref(c.c_void_p()))

    def copy(to, to_context, source, source_context):
        if cuda.simulated:
            cuda.copy(to, source, count)
        else:
            cuda("cuMemcpyPeerAsync", c.c_uint64(to), to_context, c.c_uint64(source), source_context, c.c_size_t(count), cuda.stream)

    read = cuda.timed(lambda: copy(own, cuda.context, there, other))
    write = cuda.timed(lambda: copy(there, other, own, cuda.context))
    print(json.dumps([read, write]))


def work(library, worker, lender, count, fd):
    """The importer, on its own device: for read the view is copied into memory of that one, for write the other way."""
    cuda = Cuda(library, worker)
    own = cuda.alloc(count).value
    context = library.context(2, worker)
    peer = c.c_void_p()
    library("context_adopt", context, fd, 30000, c.byref(peer))
    rows = []
    for access in (1, 2):
        loan = c.c_void_p(library.event(context, OFFERED).loan)
        cuda.fill(own, 0 if access == 1 else word_of(lender, access), count)
        for turn in range(TURNS + 2):
            view = View()
            library("loan_acquire", loan, 30000, c.byref(view))
            if turn == 0:
                on = cuda.device_of(view.pointer)
                row = {"uuid": cuda.uuid(on), "own": on == worker}
            ends = (own, view.pointer) if access == 1 else (view.pointer, own)
            if turn == 1:
                row["seconds"] = cuda.timed(lambda: cuda.copy(*ends, count))
            else:
                cuda.copy(*ends, count)
            library("loan_done", loan, cuda.stream)
        library("loan_wait_end", loan, 30000)
        cuda.synchronize()
        row["good"] = cuda.holds(own, word_of(lender, access), count)
        rows.append(row)
        library.lib.gpuloan_loan_unref(loan)
    library.lib.gpuloan_context_destroy(context)
    print(json.dumps(rows))


def bare_thread(cuda, call):
    """Calls it in a thread without a current context, and sees to it that there is none afterwards."""
    found = []

    def run():
        current = c.c_void_p()
        cuda("cuCtxGetCurrent", c.byref(current))
        try:
            found.append(current.value)
            found.append(call())
            cuda("cuCtxGetCurrent", c.byref(current))
            found.append(current.value)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[-1], BaseException):
        raise found[-1]
    if found[0] is not None or found[2] is not None:
        raise SystemExit("a thread without a current context got one")
    return found[1]


def lend(library, lender, worker, count):
    """The exporter. Its main thread has the context of the device that it lends nothing of."""
    cuda = Cuda(library, lender)
    aside = c.c_void_p()
    cuda("cuCtxPopCurrent_v2", c.byref(aside))
    other = cuda.retain(worker)
    apart = lambda call: bare_thread(cuda, call)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen([sys.executable, *sys.argv[:5], "work", str(worker), str(lender), str(count), str(theirs.fileno())],
                               pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
    theirs.close()
    cuda("cuCtxPushCurrent_v2", other)
    context = library.context(1, lender)
    library("context_attach", context, ours.detach(), None)
    peer = c.c_void_p(apart(lambda: library.event(context, READY_PEER)).peer)
    rows = []
    for access in (1, 2):
        region, loan = c.c_void_p(), c.c_void_p()
        apart(lambda: library("region_create", peer, c.byref(RegionOptions(bytes=count, access=2)), c.byref(region)))
        pointer = library.lib.gpuloan_region_pointer(region)
        word = word_of(lender, access)
        cuda("cuCtxPushCurrent_v2", cuda.context)
        cuda.fill(pointer, word if access == 1 else 0, count)
        cuda("cuCtxPopCurrent_v2", c.byref(aside))
        options = LendOptions(access=access, keep_open=1, policy=REQUIRE_ZERO_COPY, stream=CPU_STREAM)
        apart(lambda: library("lend", peer, pointer, count, c.byref(options), c.byref(loan)))
        apart(lambda: library("loan_wait_done", loan, 30000))

        def turns():
            library("loan_ready", loan, CPU_STREAM)  # the worker's own timing
            library("loan_wait_done", loan, 60000)
            start = time.perf_counter()
            for _ in range(TURNS):
                library("loan_ready", loan, CPU_STREAM)
                library("loan_wait_done", loan, 30000)
            return time.perf_counter() - start

        seconds = apart(turns)
        apart(lambda: library("reclaim", loan, 30000))
        cuda("cuCtxPushCurrent_v2", cuda.context)
        rows.append({"turns": seconds, "good": cuda.holds(pointer, word, count), "uuid": cuda.uuid(lender)})
        cuda("cuCtxPopCurrent_v2", c.byref(aside))
        library.lib.gpuloan_loan_unref(loan)
        apart(lambda: library("region_destroy", region))
    out = process.communicate(timeout=60)[0]
    if process.returncode != 0:
        raise SystemExit(f"the worker ended with {process.returncode}")
    library.lib.gpuloan_context_destroy(context)
    print(json.dumps([dict(theirs, **{"lent_" + key: value for key, value in mine.items()})
                      for mine, theirs in zip(rows, json.loads(out))]))


# ---- The run ------------------------------------------------------------------------------------------------------------

class Run:
    def __init__(self, command, device_test, driver, folder):
        self.command, self.device_test, self.driver, self.folder = command, device_test, driver, folder
        self.failed, self.rows, self.number = [], [], 0

    def row(self, name, good, text):
        self.rows.append(f"{'ok  ' if good else 'FAIL'} {name:44} {text}")
        print(self.rows[-1], flush=True)
        if not good:
            self.failed.append(name)

    def probe(self):
        out = subprocess.run([self.command, "probe", "--driver", self.driver, "--json"], capture_output=True, text=True, timeout=60)
        found = json.loads(out.stdout)
        self.simulated = found["driver"]["simulated"]
        self.uuids = [device["uuid"] for device in found["devices"]]
        for device in found["devices"]:
            print(f"# device {device['ordinal']}: {device['name']}, {device['uuid']}, reaches {device.get('peers')}")
        if len(self.uuids) < 2:
            raise SystemExit("this needs two devices")

    def contract(self):
        start = time.monotonic()
        out = subprocess.run([self.device_test, "--driver", self.driver], capture_output=True, text=True, timeout=100)
        print(out.stdout + out.stderr, flush=True)
        self.row("device_test", out.returncode == 0, out.stdout.strip().splitlines()[-1].lstrip("# ") + f", {time.monotonic() - start:.1f} s")

    def file_of(self, machine_device):
        path = os.path.join(self.folder, f"device{machine_device}")
        if not os.path.exists(path):
            with open(path, "wb") as out:
                out.write((f"bytes of device {machine_device} " * 200_000).encode())
        return path

    def transfer(self, name, lend_sees, lend_device, borrow_sees, borrow_device, wanted):
        """A file of its own for each GPU, by `gpuloan lend` and `borrow`; both have to work on the one with UUID `wanted`."""
        self.number += 1
        path, to = os.path.join(self.folder, f"s{self.number}"), os.path.join(self.folder, f"to{self.number}")
        source = self.file_of(self.uuids.index(wanted))

        def start(verb, sees, device, *more):
            environment = dict(os.environ, CUDA_VISIBLE_DEVICES=sees)
            return subprocess.Popen([self.command, verb, "--driver", self.driver, "--json", "--timeout", "30", "--socket", path,
                                     "--device", str(device), *more], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

        sides = [start("lend", lend_sees, lend_device, "--from", source), start("borrow", borrow_sees, borrow_device, "--to", to)]
        found, text = [], ""
        for side in sides:
            out, errors = side.communicate(timeout=60)
            if side.returncode != 0:
                text += errors.decode().strip()[:300] + " "
            else:
                found.append(json.loads(out))
        good = len(found) == 2 and all(side["device"]["uuid"] == wanted for side in found)
        good = good and found[0]["loan"]["rung"] == "vmm" and found[0]["loan"]["copied_bytes"] == 0
        good = good and open(to, "rb").read() == open(source, "rb").read()
        seen = " and ".join(side["device"]["uuid"][:12] for side in found)
        self.row(name, good, text or f"both on {seen}, {found[0]['loan']['rung']}")

    def visible(self):
        first, second = self.uuids[:2]
        short = lambda uuid: uuid[:12]
        self.transfer("orders 0,1 and 1,0: device 0", "0,1", 0, "1,0", 1, first)
        self.transfer("orders 0,1 and 1,0: device 1", "0,1", 1, "1,0", 0, second)
        self.transfer("subsets 1 and 0,1", "1", 0, "0,1", 1, second)
        self.transfer("subsets by UUID and by short UUID", second, 0, short(second), 0, second)
        self.transfer("order by UUID, subset by number", f"{second},{first}", 1, "0", 0, first)

    def demo(self):
        for device, worker in ((0, 1), (1, 0)):
            out = subprocess.run([self.command, "demo", "--driver", self.driver, "--json", "--timeout", "60", "--device", str(device),
                                  "--worker-device", str(worker), "--size", "32MiB"], capture_output=True, text=True, timeout=90)
            loans = json.loads(out.stdout)["workers"][0]["loans"] if out.returncode == 0 else []
            good = len(loans) == 2 and all(loan["rung"] == "vmm" and loan["copied_bytes"] == 0 for loan in loans)
            text = ", ".join(f"{loan['title']} {loan['rung']} copied {loan['copied_bytes']}" for loan in loans)
            self.row(f"demo: device {device}, worker on {worker}", good, text or out.stderr.strip()[:300])

    def step(self, what, *arguments):
        out = subprocess.run([sys.executable, *sys.argv[:5], what, *map(str, arguments)], stdout=subprocess.PIPE, text=True, timeout=90)
        if out.returncode != 0:
            raise SystemExit(f"{what} {arguments} ended with {out.returncode}")
        return json.loads(out.stdout)

    def bandwidth(self):
        count = 4 << 20 if self.simulated else 1 << 30
        for lender, worker in ((0, 1), (1, 0)):
            for access, name, plain, loan in zip((1, 2), ("read", "write"), self.step("bare", worker, lender, count),
                                                 self.step("lend", lender, worker, count)):
                speed = lambda seconds, copies: copies * count / seconds / 1e9
                rates = speed(plain, COPIES), speed(loan["seconds"], COPIES), speed(loan["lent_turns"], TURNS)
                good = loan["good"] and loan["lent_good"] and loan["uuid"] == loan["lent_uuid"] and not loan["own"]
                good = good and (self.simulated or min(rates[1:]) >= SLOWEST * rates[0])
                self.row(f"device {lender} lent for {name} to a worker on {worker}", good,
                         f"bare peer copy {rates[0]:6.1f} GB/s, in a loan {rates[1]:6.1f} ({rates[1] / rates[0]:.2f}), "
                         f"{TURNS} turns {rates[2]:6.1f} ({rates[2] / rates[0]:.2f}); threads without a context")

    def run(self):
        start = time.monotonic()
        self.probe()
        for part in (self.visible, self.demo, self.bandwidth, self.contract):
            try:
                part()
            except (SystemExit, subprocess.TimeoutExpired, ValueError, KeyError, IndexError) as error:
                self.row(part.__name__, False, str(error)[:300])
        print(f"\n# two GPUs, {'SIMULATED' if self.simulated else 'real'} driver, {time.monotonic() - start:.0f} s")
        print("\n".join(self.rows))
        return 1 if self.failed else 0


def main():
    if len(sys.argv) < 4:
        print(__doc__, file=sys.stderr)
        return 2
    if len(sys.argv) == 4:
        sys.argv.append("real")
    library, command, device_test, driver = sys.argv[1:5]
    step = sys.argv[5:6]
    if step:
        numbers = [int(word) for word in sys.argv[6:]]
        {"bare": bare, "work": work, "lend": lend}[step[0]](Library(library, driver), *numbers)
        return 0
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    with tempfile.TemporaryDirectory(prefix="gpuloan-two-") as folder:
        os.environ.update(GPULOAN_SIM_STATE=os.path.join(folder, "sim"), GPULOAN_SIM_DEVICES="2")
        return Run(command, device_test, driver, folder).run()


sys.exit(main())
