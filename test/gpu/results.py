#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What must stay flat, and what a killed worker must not leave behind.

Usage: results.py LIBGPULOAN [--results N] [--kills N] [--parent torch|plain]

results   N (10,000) results of 64 KiB to 4 MiB from one worker: device memory, descriptors and Python objects of both sides after the
          first tenth and at the end
kills     N (100) workers that are killed at random moments (seeded) while they write results: the parent's device memory is back
          within a second, the next worker works
capture   torch.cuda.graph capture in parent and worker while loans are out: not invalidated, replays give the right values (torch only)

Prints a row for each check; the last line is 'N passed, N failed'. `--parent plain` needs no framework (simulated driver)."""
import argparse
import ctypes
import gc
import json
import os
import pathlib
import random
import sys
import threading
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "lib/python")]
from frameworks import Job, end  # noqa: E402

TIMEOUT, TOTAL = 30, 280
KIB, MIB = 1 << 10, 1 << 20
IDLE = 64 * MIB  # that the arena may keep for a worker


# ---- Workers ----------------------------------------------------------------------------------------------------------------------

def counts():
    gc.collect()
    return {"descriptors": len(os.listdir("/proc/self/fd")), "objects": len(gc.get_objects())}


def work_bytes(peer):
    """No framework: result after result of host bytes until it is killed, or as many as a job says."""
    for loan in peer:
        words = loan.user.decode().split()
        loan.tensor
        loan.done()
        if words[0] == "counts":
            text = json.dumps(counts()).encode()
            with peer.request((len(text),), "uint8", timeout=TIMEOUT, user=b"counts") as out:
                out.copy_from(text)
            continue
        data = bytes([int(words[2])]) * int(words[3])
        for number in range(int(words[1])):
            with peer.request((len(data),), "uint8", timeout=TIMEOUT, user=b"bytes %d" % number) as out:
                out.copy_from(data)


def work_torch(peer):
    """results N: tensors that count up; counts; capture: a graph that is captured while a loan is out and works on it."""
    import torch
    torch.zeros(1, device="cuda")
    for loan in peer:
        words = loan.user.decode().split()
        try:
            if words[0] == "counts":
                loan.tensor
                text = json.dumps(counts()).encode()
                with peer.request((len(text),), "uint8", timeout=TIMEOUT, user=b"counts") as out:
                    out.copy_from(text)
            elif words[0] == "capture":
                capture_in_worker(torch, peer, loan)
            else:
                loan.tensor
                for number in range(int(words[1])):
                    out = peer.request((size_of(number) // 4,), "int32", timeout=TIMEOUT, user=str(number).encode())
                    out.tensor.torch().fill_(number)
                    out.done()
            loan.done()
        except Exception as error:
            traceback.print_exc()
            loan.fail(str(error)[:500])


def capture_in_worker(torch, peer, loan):
    source = loan.tensor.torch()
    out = peer.request(source.shape, "float32", timeout=TIMEOUT, user=b"capture")
    target = out.tensor.torch()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warms up
        torch.mul(source, 2, out=target)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.mul(source, 2, out=target)
        time.sleep(0.3)  # the library's threads work meanwhile
    target.zero_()
    graph.replay()
    out.done()
    torch.cuda.synchronize()


def size_of(number):
    """64 KiB to 4 MiB, in another order each round."""
    return (1 + number * 37 % 64) * 64 * KIB


# ---- The parent -------------------------------------------------------------------------------------------------------------------

class Device:
    """Free memory, by the driver: also what other processes took."""

    def __init__(self):
        import gpuloan
        self.driver = ctypes.CDLL(gpuloan.driver_info().path)
        context, device = ctypes.c_void_p(), ctypes.c_int()
        for code in (self.driver.cuInit(0), self.driver.cuDeviceGet(ctypes.byref(device), 0),
                     self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), self.driver.cuCtxSetCurrent(context)):
            if code != 0:
                raise OSError(f"the driver says {code}")

    def free(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if self.driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) != 0:
            raise OSError("cuMemGetInfo failed")
        return free.value


class Rows:
    def __init__(self):
        self.passed = self.failed = 0

    def add(self, name, good, detail):
        self.passed, self.failed = self.passed + bool(good), self.failed + (not good)
        print(f"{'ok' if good else 'FAILED':7} {name:34} {detail}", flush=True)

    def last(self):
        print(f"{self.passed} passed, {self.failed} failed", flush=True)


def start(parent, arguments, kind):
    return parent.spawn([sys.executable, __file__, arguments.library, "--worker", kind], timeout=TIMEOUT)


def worker_counts(parent, peer):
    peer.lend(Job(), "read", user=b"counts").wait(TIMEOUT)
    result = parent.next_result(TIMEOUT, peer)
    return json.loads(result.copy_to_host())


def snapshot(parent, peer, device):
    end = time.monotonic() + 2  # what is idle above the limit goes back once the worker has unmapped it
    while parent.stats().idle_bytes > IDLE and time.monotonic() < end:
        time.sleep(0.01)
    theirs = worker_counts(parent, peer)
    return {"parent's descriptors": len(os.listdir("/proc/self/fd")), "parent's objects": counts()["objects"],
            "worker's descriptors": theirs["descriptors"], "worker's objects": theirs["objects"], "device MiB in use": -(device.free() // MIB)}


def many_results(rows, parent, device, arguments):
    """Flat: no descriptor more, at most 100 objects and what the arena may keep idle more after the first tenth."""
    torch = arguments.parent == "torch"
    peer = start(parent, arguments, "torch" if torch else "bytes")
    wrong, before, total, step = 0, None, arguments.results, arguments.results // 10
    for tenth in range(10):
        loan = peer.lend(Job(), "read", user=f"results {step}".encode() if torch else f"bytes {step} 7 {64 * KIB}".encode())
        for _ in range(step):
            result = parent.next_result(TIMEOUT, peer)
            if torch:
                tensor, number = result.torch(), int(result.user)  # those that end in one turn of the loop come in any order
                wrong += tuple(tensor.shape) != (size_of(number) // 4,) or (number % 50 == 0 and not bool((tensor == number).all()))
                del tensor
            else:
                wrong += result.copy_to_host() != b"\7" * (64 * KIB)
            del result
        loan.wait(TIMEOUT)
        del loan
        if tenth == 0:
            before = snapshot(parent, peer, device)
    after = snapshot(parent, peer, device)
    rows.add(f"{total} results", wrong == 0, f"{wrong} wrong")
    for name, allowed in (("parent's descriptors", 0), ("worker's descriptors", 0), ("parent's objects", 100), ("worker's objects", 100),
                          ("device MiB in use", IDLE // MIB)):
        rows.add(f"flat: {name}", after[name] - before[name] <= allowed,
                 f"{before[name]} after a tenth, {after[name]} at the end (at most {allowed} more)" if "MiB" not in name else
                 f"{after[name] - before[name]:+} (at most +{allowed})")
    end(peer)


def kills(rows, parent, device, arguments):
    """Each worker writes results without end and is killed at some moment. The parent keeps none of them. A first worker that ends well
    says how much the device has when nobody is there."""
    import gpuloan
    chance = random.Random(20)
    start_free, slowest, bad = None, 0.0, []
    for number in range(arguments.kills + 1):
        peer = start(parent, arguments, "bytes")
        size = chance.choice((64 * KIB, MIB, 8 * MIB))
        loan = peer.lend(Job(), "read", user=f"bytes 100000 {number % 250} {size}".encode())
        result = parent.next_result(TIMEOUT, peer)  # it works
        if result.copy_to_host() != bytes([number % 250]) * size:
            bad.append(f"worker {number}: the first result has wrong bytes")
        del result
        stop = time.monotonic() + chance.uniform(0, 0.03)
        while time.monotonic() < stop:
            try:
                parent.next_result(0.005, peer)
            except gpuloan.Timeout:
                pass
        peer.process.kill()
        begin = time.monotonic()
        peer.process.wait(TIMEOUT)
        del loan
        drain(parent, peer, gpuloan)
        peer.close()
        if start_free is None:
            start_free = settled(device, None, begin)[0]
            continue
        free, took = settled(device, start_free, begin)
        slowest = max(slowest, took)
        if free < start_free:
            bad.append(f"worker {number}: {(start_free - free) / MIB:.1f} MiB missing {took:.2f} s after its death; {vars(parent.stats())}")
            start_free = free  # so that each leak is told once
    for text in bad[:10]:
        print(f"        {text}")
    rows.add(f"{arguments.kills} kills", not bad, f"{len(bad)} left something; slowest return {slowest * 1000:.0f} ms (at most 1000)")


def drain(parent, peer, gpuloan):
    """Takes what the dead worker had finished and what it had not, in any order, until nothing more will come."""
    while True:
        try:
            parent.next_result(TIMEOUT, peer)
        except gpuloan.LoanError:
            continue
        except gpuloan.PeerError as error:
            if not error.user:  # of no result
                return


def settled(device, wanted, begin):
    """(free bytes, seconds) once they are `wanted` again, or after a second from `begin`; without `wanted` after a second."""
    while True:
        gc.collect(0)
        free, took = device.free(), time.monotonic() - begin
        if (wanted is not None and free >= wanted) or took > 1:
            return free, took
        time.sleep(0.002)


def capture(rows, parent, arguments):
    """A graph is captured here while a loan is out to the worker, in the worker while it holds that loan and a result; then both replay."""
    import torch
    peer = start(parent, arguments, "torch")
    source = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    held = torch.ones(1 << 20, device="cuda")
    target = torch.zeros_like(source)
    torch.add(source, 1, out=target)
    torch.cuda.synchronize()
    loans = [peer.lend(source, "read", user=b"capture"), peer.lend(held, "read", user=b"results 1")]
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            torch.add(source, 1, out=target)
            time.sleep(0.3)
        target.zero_()
        graph.replay()
        torch.cuda.synchronize()
        rows.add("capture in the parent", bool((target == source + 1).all()), "replayed")
    except Exception as error:
        rows.add("capture in the parent", False, f"{type(error).__name__}: {error}")
    try:
        result = parent.next_result(TIMEOUT, peer)
        good = result.user == b"capture" and bool((result.torch() == source * 2).all())
        rows.add("capture in the worker", good, "replayed into its result")
        parent.next_result(TIMEOUT, peer)
        for loan in loans:
            loan.wait(TIMEOUT)
    except Exception as error:
        rows.add("capture in the worker", False, f"{type(error).__name__}: {error}")
    end(peer)


def too_long(rows):
    rows.add("time", False, f"the whole run took more than {TOTAL} s")
    rows.last()
    os._exit(1)


def main(arguments):
    import gpuloan
    if arguments.worker:
        with gpuloan.worker(timeout=TIMEOUT) as peer:
            (work_torch if arguments.worker == "torch" else work_bytes)(peer)
        return 0
    if arguments.parent == "torch":
        import torch
        torch.zeros(1, device="cuda")
    rows, device = Rows(), Device()
    watchdog = threading.Timer(TOTAL, too_long, (rows,))
    watchdog.daemon = True
    watchdog.start()
    with gpuloan.Exporter(idle_bytes=IDLE) as parent:
        steps = [lambda: many_results(rows, parent, device, arguments), lambda: kills(rows, parent, device, arguments)]
        if arguments.parent == "torch":
            steps.append(lambda: capture(rows, parent, arguments))
        for step in steps:
            try:
                step()
            except Exception as error:
                traceback.print_exc()
                rows.add("a step", False, f"{type(error).__name__}: {error}")
    watchdog.cancel()
    rows.last()
    return 0 if rows.failed == 0 and rows.passed else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("library")
    parser.add_argument("--results", type=int, default=10000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--parent", choices=("torch", "plain"), default="torch")
    parser.add_argument("--worker")
    parsed = parser.parse_args()
    os.environ["GPULOAN_LIBRARY"] = parsed.library
    sys.exit(main(parsed))
