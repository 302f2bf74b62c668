#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A runtime with workers: a parent gives jobs to a worker process, gets tensors back, and survives the worker's crash.

    worker_runtime.py            the worker is this file too; with PyTorch where it is installed, else with bytes
    worker_runtime.py ./worker   the same with a worker in C, worker.c

Tensors never travel: the parent lends its input, the worker asks for results and writes into them in place. A job is named in the
user bytes of the loan: echo, halves (a result of two tensors), fill SEED DTYPE SHAPE, check SEED, die. Test pattern of fill and check:
element i is (31 i + SEED) % 65521 % 17. Without a GPU: GPULOAN_DRIVER=sim worker_runtime.py."""
import contextlib
import math
import os
import signal
import struct
import sys

import gpuloan

TIMEOUT = 30  # seconds that one job may take
FORMATS = {"uint8": "B", "int64": "q", "float32": "f"}


def torch_of_gpu():
    """PyTorch, if it is there and has a GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def pattern(seed, dtype, count):
    return struct.pack(f"<{count}{FORMATS[dtype]}", *((31 * i + seed) % 65521 % 17 for i in range(count)))


# ---- The worker -------------------------------------------------------------------------------------------------------------------

def echo(peer, tensor, words):
    with peer.request(tensor.shape, tensor.dtype, user=b"echo") as out:
        out.copy_from(tensor)  # one copy on the device


def halves(peer, tensor, words):
    """Two results. With PyTorch both are views of the loans' memory, and nothing leaves the device."""
    count = math.prod(tensor.shape)
    torch = torch_of_gpu()
    elements = tensor.torch().reshape(-1) if torch else tensor.copy_to_host()
    for number, (first, last) in enumerate(((0, count // 2), (count // 2, count))):
        with peer.request((last - first,), tensor.dtype, user=b"halves %d" % number) as out:
            if torch:
                out.torch().copy_(elements[first:last])
            else:
                out.copy_from(elements[first * tensor.itemsize:last * tensor.itemsize])


def fill(peer, tensor, words):
    seed, dtype, shape = int(words[1]), words[2], tuple(map(int, words[3].split(",")))
    with peer.request(shape, dtype, user=b"fill %d" % seed) as out:
        out.copy_from(pattern(seed, dtype, math.prod(shape)))


def check(peer, tensor, words):
    count, size, seen = math.prod(tensor.shape), tensor.itemsize, tensor.copy_to_host()
    wanted = pattern(int(words[1]), tensor.dtype, count)
    wrong = sum(seen[i:i + size] != wanted[i:i + size] for i in range(0, len(wanted), size))
    with peer.request((2,), "int64", user=b"check") as out:
        out.copy_from(struct.pack("<2q", wrong, count))


def die(peer, tensor, words):
    os.kill(os.getpid(), signal.SIGKILL)


JOBS = {job.__name__: job for job in (echo, halves, fill, check, die)}


def serve():
    with gpuloan.worker() as peer:
        for loan in peer:  # until the parent is gone
            words = loan.user.decode().split()
            try:
                with loan as tensor:  # done at the end; failed, with the reason for the parent, after an exception
                    JOBS[words[0]](peer, tensor, words)
            except gpuloan.PeerError:
                raise
            except Exception as error:
                print(f"the job {words} failed: {error}", file=sys.stderr)


# ---- The parent -------------------------------------------------------------------------------------------------------------------

class Runtime:
    """One worker, and the next one when that has died."""

    def __init__(self, parent, command):
        self.parent, self.command, self.peer = parent, command, None

    def run(self, job, tensor=None, results=1):
        """The job's results, each a DeviceArray. Raises LoanError with the worker's reason, or PeerError when it died."""
        if self.peer is None:
            self.peer = self.parent.spawn(self.command, timeout=TIMEOUT)
            print(f"worker {self.peer.process.pid} started")
        try:
            source = self.peer.empty(0, "uint8") if tensor is None else tensor  # without elements: a job without an input
            loan = self.peer.lend(source, "read", user=job.encode())
            loan.wait(TIMEOUT)
            return [self.parent.next_result(TIMEOUT, self.peer) for _ in range(results)]
        except gpuloan.LoanError:
            self.drop_results()
            raise
        except (gpuloan.PeerError, gpuloan.Timeout):
            self.peer.process.kill()
            print(f"worker {self.peer.process.pid} is gone ({self.peer.process.wait(TIMEOUT)}); the parent goes on")
            self.peer.close()
            self.peer = None
            raise

    def drop_results(self):
        """What a failed job had asked for has failed with it, or is of no use: the next job's results come next."""
        with contextlib.suppress(gpuloan.Timeout, gpuloan.PeerError):
            while True:
                with contextlib.suppress(gpuloan.LoanError):
                    self.parent.next_result(0, self.peer)


def expect(what, good):
    if not good:
        sys.exit(f"WRONG: {what}")
    print(f"ok: {what}")


def use(runtime, seed):
    """Two jobs, in a chain: a tensor that the worker made is lent to it again, and comes back in two pieces."""
    torch = torch_of_gpu()
    if torch:
        source = ((torch.arange(6000, device="cuda") * 31 + seed) % 65521 % 17).to(torch.float32).reshape(60, 100)
    else:
        source, = runtime.run(f"fill {seed} float32 60,100")
    counted, = runtime.run(f"check {seed}", source)
    expect("the worker sees the values of the input", struct.unpack("<2q", counted.copy_to_host()) == (0, 6000))
    first, second = runtime.run("halves", source, results=2)
    expect("two tensors came back, in order", (first.user, second.user) == (b"halves 0", b"halves 1"))
    wanted = pattern(seed, "float32", 6000)
    expect("each with its half of the values", (first.copy_to_host(), second.copy_to_host()) == (wanted[:12000], wanted[12000:]))
    if torch:
        expect("as tensors of PyTorch's", bool(torch.equal(torch.cat((first.torch(), second.torch())), source.reshape(-1))))


def main():
    command = sys.argv[1:] or [sys.executable, os.path.abspath(__file__), "--worker"]
    with gpuloan.Exporter() as parent:
        runtime = Runtime(parent, command)
        use(runtime, 5)
        try:
            runtime.run("die")
            expect("a crash is an error", False)
        except gpuloan.PeerError as error:
            expect(f"the crash was an error of the job: {error.name}", True)
        use(runtime, 6)
        try:
            runtime.run("fill 6 complex64 4")  # fails once it has memory for its result
            expect("a job that fails is an error", False)
        except gpuloan.LoanError as error:
            expect(f"a failed job tells its reason: {error}", True)
        use(runtime, 7)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--worker"] else main()
