#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""PyTorch tensors of one allocator, lent by pointer and filled by a worker that knows nothing of PyTorch.

Usage: torch_tensors.py LIBGPULOAN GPULOAN NATIVE|EXPANDABLE|MEMPOOL|ASYNC|SWAP [LIMIT_MIB]. The process lends a tensor for read, `gpuloan demo-worker`
copies it into the tensor that this process grants it, in place, and both are compared: whole tensors of several sizes, and views
that begin inside their block. Prints a row for each; exits non-zero when one failed.

MEMPOOL: tensors of a torch.cuda.MemPool over gpuloan_torch_malloc; vmm without a copy. With LIMIT_MIB none larger than half of it.

SWAP (EXPERIMENTAL): cudaMallocAsync as in ASYNC, but gpuloan's pool is put in the place of the device's own before PyTorch
loads, and the pool rung is allowed. What touches no more pieces of 32 MiB than LIMIT_MIB (5248) does then goes over pool in place,
anything larger as a copy, and no worker dies (P3)."""
import contextlib
import ctypes as c
import os
import socket
import subprocess
import sys

LIBRARY, COMMAND, ALLOCATOR = sys.argv[1:4]
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = {
    "NATIVE": "", "MEMPOOL": "", "EXPANDABLE": "expandable_segments:True", "ASYNC": "backend:cudaMallocAsync",
    "SWAP": "backend:cudaMallocAsync"}[ALLOCATOR]
LIMIT_MIB = int(sys.argv[4]) if len(sys.argv) > 4 else 5248
lib = c.CDLL(LIBRARY)
lib.gpuloan_error_text.restype = lib.gpuloan_rung_name.restype = c.c_char_p


def check(status):
    if status != 0:
        raise SystemExit(f"{ALLOCATOR}: status {status}: {lib.gpuloan_error_text().decode()}")


if ALLOCATOR == "SWAP":
    check(lib.gpuloan_pool_install(0))
import torch

TEXT = 512
MIB = 1 << 20
VMM, POOL, IPC, HOST = 1, 2, 4, 8


class Sized(c.Structure):
    def __init__(self, **members):
        super().__init__(**members)
        self.size = c.sizeof(self)


class ContextOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("role", c.c_uint32), ("loop", c.c_uint32), ("engine", c.c_uint32), ("flags", c.c_uint32),
                ("driver", c.c_char_p), ("device", c.c_int32), ("rungs", c.c_uint32), ("gate", c.c_uint32),
                ("gpu_wait_limit", c.c_uint32), ("slots", c.c_uint32), ("canary_timeout_ms", c.c_uint32), ("idle_bytes", c.c_uint64),
                ("account_bytes", c.c_uint64), ("pool_import_limit", c.c_uint64)]


class LendOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("access", c.c_uint32), ("policy", c.c_uint32), ("rungs", c.c_uint32), ("gate", c.c_uint32),
                ("memory", c.c_uint32), ("keep_open", c.c_uint32), ("stream", c.c_void_p)]


class Event(Sized):
    _fields_ = [("size", c.c_size_t), ("type", c.c_uint32), ("status", c.c_int), ("peer", c.c_void_p), ("loan", c.c_void_p),
                ("request", c.c_void_p), ("text", c.c_char * TEXT)]


class Report(Sized):
    _fields_ = [("size", c.c_size_t), ("id", c.c_uint64), ("bytes", c.c_uint64), ("access", c.c_uint32), ("memory", c.c_uint32),
                ("rung", c.c_uint32), ("gate", c.c_uint32), ("turns", c.c_uint32), ("turns_done", c.c_uint32), ("ended", c.c_uint32),
                ("outcome", c.c_int), ("memory_state", c.c_uint32), ("canary", c.c_uint32), ("copied_bytes", c.c_uint64),
                ("exposed_bytes", c.c_uint64), ("step_ns", c.c_uint64 * 8), ("rung_reason", c.c_char * TEXT)]


for name in ("gpuloan_context_destroy", "gpuloan_loan_unref"):
    getattr(lib, name).restype = None
lib.gpuloan_lend.argtypes = [c.c_void_p, c.c_uint64, c.c_uint64, c.c_void_p, c.c_void_p]
lib.gpuloan_request_grant_with.argtypes = [c.c_void_p, c.c_uint64, c.c_void_p, c.c_void_p]
PEER_READY, PEER_LOST, REQUEST, ENDED = 1, 2, 4, 8


def event(context, wanted, peer=None):
    while True:
        got = Event()
        check(lib.gpuloan_context_next_event(context, 30000, c.byref(got)))
        if got.type == wanted:
            return got
        if got.type == PEER_LOST and peer is not None and got.peer == peer.value:  # others ended with their loans
            raise SystemExit(f"{ALLOCATOR}: the worker was lost: {got.text.decode()}")


def expected(report, rung):
    """Both loans went over this rung: pool in place, vmm by a copy on the device. None: any rung will do."""
    return rung is None or (report.rung == rung and report.copied_bytes == (0 if rung == POOL or ALLOCATOR == "MEMPOOL" else report.bytes))


PIECE = 32 * MIB


def way(tensor):
    """The rung that a swapped pool's tensor, or a view of it, has to take."""
    if ALLOCATOR != "SWAP":
        return VMM if ALLOCATOR == "MEMPOOL" else None
    storage = tensor.untyped_storage()
    start = storage.data_ptr() % PIECE
    return POOL if -(-(start + storage.nbytes()) // PIECE) <= -(-LIMIT_MIB * MIB // PIECE) and storage.nbytes() <= LIMIT_MIB * MIB else VMM


def through_worker(context, name, source, target):
    """`target` gets the bytes of `source`, by a worker; both are contiguous."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker = subprocess.Popen([COMMAND, "demo-worker", "--fd", str(theirs.fileno()), "--timeout", "30"], pass_fds=[theirs.fileno()])
    theirs.close()
    check(lib.gpuloan_context_attach(context, ours.detach(), None))
    peer = c.c_void_p(event(context, PEER_READY).peer)
    stream = torch.cuda.current_stream().cuda_stream
    count = source.numel() * source.element_size()
    options = LendOptions(access=1, stream=stream)
    read, write = c.c_void_p(), c.c_void_p()
    check(lib.gpuloan_lend(peer, source.data_ptr(), count, c.byref(options), c.byref(read)))
    request = c.c_void_p(event(context, REQUEST, peer).request)
    options = LendOptions(access=2, stream=stream)
    check(lib.gpuloan_request_grant_with(request, target.data_ptr(), c.byref(options), c.byref(write)))
    check(lib.gpuloan_loan_wait_end(write, 30000))
    check(lib.gpuloan_loan_wait_end(read, 30000))
    same = bool(torch.equal(source, target))
    rows, ways = [], []
    for loan, tensor in ((read, source), (write, target)):
        report = Report()
        check(lib.gpuloan_loan_report_get(loan, c.byref(report)))
        ways.append(expected(report, way(tensor)))
        us = (report.step_ns[7] - report.step_ns[0]) / 1000
        rows.append(f"{lib.gpuloan_rung_name(report.rung).decode()} copied {report.copied_bytes} exposed {report.exposed_bytes} {us:.0f} us")
        lib.gpuloan_loan_unref(loan)
    worker.wait(30)
    print(f"{ALLOCATOR:10} {name:24} {'same' if same else 'DIFFERENT'}{'' if all(ways) else ' WRONG RUNG'}"
          f"{'' if worker.returncode == 0 else f' WORKER ENDED {worker.returncode}'}  read: {rows[0]}  write: {rows[1]}", flush=True)
    return same and all(ways) and worker.returncode == 0


def of_size(mebibytes):
    """A tensor that starts with a piece, if the pool gives one soon: what does not is kept until then."""
    kept = []
    for _ in range(3):
        tensor = torch.zeros(mebibytes * MIB // 8, device="cuda", dtype=torch.int64)
        if tensor.data_ptr() % PIECE == 0:
            break
        kept.append((tensor, torch.zeros(PIECE - tensor.data_ptr() % PIECE, device="cuda", dtype=torch.uint8)))
    return tensor


def swapped_sizes(context):
    """Around the import limit, and far above it: pool in place up to it, a copy beyond. Also views, of which not their own size
    counts but their allocation's."""
    good = True
    for mebibytes in (LIMIT_MIB - 1, LIMIT_MIB, LIMIT_MIB + 1, LIMIT_MIB + 16, LIMIT_MIB * 6144 // 5248, LIMIT_MIB * 16384 // 5248,
                      LIMIT_MIB):  # the last one out of what larger ones left in the pool
        source, target = of_size(mebibytes), of_size(mebibytes)
        torch.arange(source.numel(), out=source)
        good &= through_worker(context, f"{mebibytes} MiB", source, target)
        target.zero_()
        good &= through_worker(context, f"view of {mebibytes} MiB", source[1001:51002], target[70_003:120_004])
        good &= not bool(target[:70_003].any()) and not bool(target[120_004:].any())
        del source, target
    return good


torch.cuda.init()
torch.zeros(1, device="cuda")
context = c.c_void_p()
options = ContextOptions(role=1)
if ALLOCATOR == "SWAP":
    options.rungs, options.pool_import_limit = VMM | POOL | IPC | HOST, LIMIT_MIB * MIB
check(lib.gpuloan_context_create(c.byref(options), c.byref(context)))
stack = contextlib.ExitStack()
if ALLOCATOR == "MEMPOOL":
    allocator = torch.cuda.memory.CUDAPluggableAllocator(LIBRARY, "gpuloan_torch_malloc", "gpuloan_torch_free")
    pool = torch.cuda.MemPool(allocator.allocator())
    stack.enter_context(torch.cuda.use_mem_pool(pool))
good = swapped_sizes(context) if ALLOCATOR == "SWAP" else True
for name, elements in (("1 MiB", 1 << 18), ("100003 floats", 100003), ("1 GiB", 1 << 28), ("6 GiB", 6 << 28)):
    if (ALLOCATOR == "SWAP" or len(sys.argv) > 4) and elements * 4 > LIMIT_MIB * MIB // 2:
        continue  # the sizes above have it
    source = torch.randn(elements, device="cuda") if elements <= 1 << 28 else torch.arange(elements, device="cuda", dtype=torch.int32)
    target = torch.zeros_like(source)
    good &= through_worker(context, name, source, target)
    del source, target
base, result = torch.randn(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
good &= through_worker(context, "view [1000:50001]", base[1000:50001], result[777:49778])
good &= bool((result[:777] == 0).all() and (result[49778:] == 0).all())
lib.gpuloan_context_destroy(context)
stack.close()
if ALLOCATOR == "SWAP":
    del base, result
    torch.cuda.synchronize()
    check(lib.gpuloan_pool_uninstall(0))
sys.exit(0 if good else 1)
