#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""PyTorch tensors of one allocator, lent by pointer and filled by a worker that knows nothing of PyTorch.

Usage: torch_tensors.py LIBGPULOAN GPULOAN NATIVE|EXPANDABLE|ASYNC. The process lends a tensor for read, `gpuloan demo-worker`
copies it into the tensor that this process grants it, in place, and both are compared: whole tensors of several sizes, and views
that begin inside their block. Prints a row for each; exits non-zero when one failed."""
import ctypes as c
import os
import socket
import subprocess
import sys

LIBRARY, COMMAND, ALLOCATOR = sys.argv[1:4]
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = {
    "NATIVE": "", "EXPANDABLE": "expandable_segments:True", "ASYNC": "backend:cudaMallocAsync"}[ALLOCATOR]
import torch

TEXT = 512


class Sized(c.Structure):
    def __init__(self, **members):
        super().__init__(**members)
        self.size = c.sizeof(self)


class ContextOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("role", c.c_uint32), ("loop", c.c_uint32), ("engine", c.c_uint32), ("flags", c.c_uint32),
                ("driver", c.c_char_p), ("device", c.c_int32), ("rungs", c.c_uint32), ("gate", c.c_uint32)]


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


lib = c.CDLL(LIBRARY)
lib.gpuloan_error_text.restype = lib.gpuloan_rung_name.restype = c.c_char_p
for name in ("gpuloan_context_destroy", "gpuloan_loan_unref"):
    getattr(lib, name).restype = None
lib.gpuloan_lend.argtypes = [c.c_void_p, c.c_uint64, c.c_uint64, c.c_void_p, c.c_void_p]
lib.gpuloan_request_grant_with.argtypes = [c.c_void_p, c.c_uint64, c.c_void_p, c.c_void_p]
PEER_READY, PEER_LOST, REQUEST, ENDED = 1, 2, 4, 8


def check(status):
    if status != 0:
        raise SystemExit(f"{ALLOCATOR}: status {status}: {lib.gpuloan_error_text().decode()}")


def event(context, wanted, peer=None):
    while True:
        got = Event()
        check(lib.gpuloan_context_next_event(context, 30000, c.byref(got)))
        if got.type == wanted:
            return got
        if got.type == PEER_LOST and peer is not None and got.peer == peer.value:  # others ended with their loans
            raise SystemExit(f"{ALLOCATOR}: the worker was lost: {got.text.decode()}")


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
    rows = []
    for loan in (read, write):
        report = Report()
        check(lib.gpuloan_loan_report_get(loan, c.byref(report)))
        us = (report.step_ns[7] - report.step_ns[0]) / 1000
        rows.append(f"{lib.gpuloan_rung_name(report.rung).decode()} copied {report.copied_bytes} exposed {report.exposed_bytes} {us:.0f} us")
        lib.gpuloan_loan_unref(loan)
    worker.wait(30)
    print(f"{ALLOCATOR:10} {name:24} {'same' if same else 'DIFFERENT'}  read: {rows[0]}  write: {rows[1]}", flush=True)
    return same and worker.returncode == 0


torch.cuda.init()
torch.zeros(1, device="cuda")
context = c.c_void_p()
check(lib.gpuloan_context_create(c.byref(ContextOptions(role=1)), c.byref(context)))
good = True
for name, elements in (("1 MiB", 1 << 18), ("100003 floats", 100003), ("1 GiB", 1 << 28), ("6 GiB", 6 << 28)):
    source = torch.randn(elements, device="cuda") if elements <= 1 << 28 else torch.arange(elements, device="cuda", dtype=torch.int32)
    target = torch.zeros_like(source)
    good &= through_worker(context, name, source, target)
    del source, target
base, result = torch.randn(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
good &= through_worker(context, "view [1000:50001]", base[1000:50001], result[777:49778])
good &= bool((result[:777] == 0).all() and (result[49778:] == 0).all())
lib.gpuloan_context_destroy(context)
sys.exit(0 if good else 1)
