# SPDX-License-Identifier: MIT
"""gpuloan: lends GPU memory from one process to another on the same Linux host without copying it, and gets it back safely.

The parent (exporter) lends its tensors to workers, and workers write results into memory of the parent's:

    with gpuloan.Exporter() as parent:                          # worker.py:
        peer = parent.spawn([sys.executable, "worker.py"])      # with gpuloan.worker() as peer:
        peer.lend(tensor)                                       #     for loan in peer:
        result = parent.next_result(timeout=60).torch()         #         with loan as x, peer.request(x.shape, x.dtype) as y:
                                                                #             y.torch().copy_(x.torch() * 2)

Only the standard library is needed. Tensors come in from any framework that has data_ptr, __cuda_array_interface__ or
__dlpack__, and go out by the latter two. Sizes and offsets are bytes, strides are elements, timeouts are seconds; a timeout of
None waits until it happens or the other side is gone. docs/contract.md (installed as share/doc/gpuloan/contract.md) has the
rules of the library underneath.
"""
from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import enum
import gc
import math
import operator
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import weakref
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_ubyte, c_void_p
from typing import Any, Callable, Deque, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

__all__ = [
    "Exporter", "Peer", "Loan", "DeviceArray", "Request", "Deny", "worker", "connect", "Worker", "Borrowed", "Result", "Report",
    "Error", "CallError", "Timeout", "LoanError", "PeerError", "DeviceError", "ProcessError",
    "Access", "Memory", "Rung", "Gate", "Engine", "Policy", "Canary", "MemoryState", "STREAM_LEGACY", "STREAM_PER_THREAD", "STREAM_CPU",
    "torch_pool", "torch_pool_release", "pool_install", "pool_uninstall", "driver_info", "device_info", "version",
]

_VERSION = (0, 1)  # major and minor of the C interface that is declared below
_METADATA_MAX = 4096
_TEXT_MAX = 512
_SLICE_MS = 100  # of a wait in the library, so that signals and close() are noticed

# ---- Enums, as in gpuloan.h ---------------------------------------------------------------------------------------


class _Named(enum.IntEnum):
    """A number of the header that prints as its name."""

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class Access(_Named):
    READ = 1
    WRITE = 2


class Memory(_Named):
    DEVICE = 0
    HOST = 1


class Rung(_Named):
    NONE = 0
    VMM = 1
    POOL = 2
    IPC = 4
    HOST = 8


class Gate(_Named):
    AUTO = 0
    MEMOP = 1
    EVENT = 2
    HOST = 3


class Engine(_Named):
    AUTO = 0
    EPOLL = 1
    IO_URING = 2


class Policy(_Named):
    BEST = 0
    REQUIRE_ZERO_COPY = 1


class Canary(_Named):
    NOT_ATTEMPTED = 0
    VERIFIED = 1
    DEMOTED = 2


class MemoryState(_Named):
    HELD = 0
    RELEASED = 1
    QUARANTINED = 2
    RETIRED = 3
    SURRENDERED = 4


class Role(_Named):
    EXPORTER = 1
    IMPORTER = 2


class _Event(_Named):
    NONE = 0
    PEER_READY = 1
    PEER_LOST = 2
    PEER_REFUSED = 3
    REQUEST = 4
    LOAN_OFFERED = 5
    LOAN_READY = 6
    LOAN_DONE = 7
    LOAN_ENDED = 8


_CONTEXT_NO_DEVICE = 1
_CONTEXT_DEVICE = 2
STREAM_LEGACY = 1  #: the legacy default stream
STREAM_PER_THREAD = 2  #: the per-thread default stream
STREAM_CPU = ctypes.c_size_t(-1).value  #: no stream: the work was the CPU's and is done
_STEPS = ("EXPORT", "READY", "IMPORT", "WRITE", "DONE", "UNIMPORT", "ACK", "RELEASE")


def _number(kind: Any, value: Any, what: str) -> int:
    """The number of an enum given by number or by name; UNSUPPORTED names are refused with those that exist."""
    if value is None:
        return 0
    try:
        return int(kind(value) if isinstance(value, int) else kind[str(value).upper()])
    except (KeyError, ValueError):
        names = ", ".join(repr(str(one)) for one in kind)
        raise _invalid(f"{what} is {value!r}; it has to be one of {names}") from None


def _rung_mask(value: Any) -> int:
    if value is None:
        return 0
    mask = 0
    single = isinstance(value, int) or not hasattr(value, "__iter__")
    for one in value.replace(",", " ").split() if isinstance(value, str) else (value,) if single else value:
        mask |= _number(Rung, one, "rungs")
    if mask == 0:
        raise _invalid(f"rungs is {value!r}, which leaves nothing to lend over: name one or more of 'vmm', 'pool', 'ipc' and 'host', or "
                       "leave it out")
    return mask


_BYTES_MAX = 2**63 - 1


def _whole(value: Any, what: str, least: int = 0, most: int = _BYTES_MAX) -> int:
    """An integer of the caller's, in its limits: 4.5 is none, and neither is "4"."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {value!r}, and has to be an integer") from None
    if not least <= number <= most:
        raise ValueError(f"{what} is {number}, and has to be from {least} to {most}")
    return number


def _extents(shape: Any, what: str = "shape") -> Tuple[int, ...]:
    """A shape: an integer, or a sequence of them."""
    if not hasattr(shape, "__iter__"):
        return (_whole(shape, what),)
    return tuple(_whole(extent, f"{what}[{index}] of {shape!r}") for index, extent in enumerate(shape))


def _wire(text: Any, what: str) -> bytes:
    """Text for the other side. What UTF-8 has no bytes for (a file name's, say) is escaped."""
    if not isinstance(text, str):
        raise _invalid(f"{what} is {text!r}, and has to be a str")
    return text.encode(errors="backslashreplace")


def _words(error: Any) -> str:
    """An exception's own words, as far as it has any."""
    try:
        return str(error)
    except Exception:
        return ""


def _seconds(timeout: Any) -> Optional[float]:
    """A timeout; None: without a limit."""
    if timeout is None:
        return None
    try:
        seconds = math.fsum((timeout,))
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise _invalid(f"timeout is {timeout!r}, and has to be seconds, or None for no limit")
    return None if seconds == math.inf else seconds


def _policy(value: Any) -> int:
    if isinstance(value, str) and value not in ("best", "zero_copy", "require_zero_copy"):
        raise _invalid(f"policy is {value!r}; it has to be 'best' or 'zero_copy'")
    return int(Policy.REQUIRE_ZERO_COPY) if value == "zero_copy" else _number(Policy, value, "policy")


# ---- Errors -------------------------------------------------------------------------------------------------------


class Error(Exception):
    """What the library refused or could not do. str() is its whole sentence: the cause, and what to do.

    status: the number in gpuloan_status; name: "GPULOAN_ERR_..."; peer and user: of the worker and the request that failed,
    where next_result raised it, else None and b"".
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.peer: Optional[Peer] = None
        self.user = b""

    @property
    def name(self) -> str:
        """"GPULOAN_ERR_..."."""
        return str(_lib.gpuloan_status_name(self.status).decode())


class CallError(Error):
    """Nothing changed: correct the call or try again (-1 to -12)."""


class Timeout(CallError, TimeoutError):
    """The time given passed first; what was waited for may still happen."""

    __str__ = Exception.__str__  # not OSError's


class LoanError(Error):
    """The loan ended without success: cancelled, failed, denied or returned (-20 ...)."""


class PeerError(Error):
    """The peer and its loans are gone (-40 ...)."""


class DeviceError(Error):
    """GPU work is not possible, or not any more (-60 ...)."""


class ProcessError(Error):
    """This is a forked child of the process that made the object, or a bug in gpuloan (-80 ...)."""


TimeoutError_ = Timeout
_INVALID, _TIMEOUT, _BUSY, _STATE, _UNSUPPORTED = -1, -2, -3, -4, -9
_DENIED, _RETURNED, _PEER_LOST, _CONNECT, _FORKED = -22, -23, -40, -46, -80


def _error(status: int, text: str) -> Error:
    """The exception of the status' group."""
    if status == _TIMEOUT:
        return Timeout(status, text)
    groups = ((-20, CallError), (-40, LoanError), (-60, PeerError), (-80, DeviceError))
    for first, kind in groups:
        if status > first:
            return kind(status, text)
    return ProcessError(status, text)


def _invalid(text: str) -> Error:
    return _error(_INVALID, text)


def _check(status: int) -> None:
    if status:
        raise _error(status, _lib.gpuloan_error_text().decode(errors="replace"))


# ---- The C interface ----------------------------------------------------------------------------------------------


class _Sized(ctypes.Structure):
    """A struct that starts with its size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(size=ctypes.sizeof(self), **fields)


class _ContextOptions(_Sized):
    _fields_ = [("size", c_size_t), ("role", c_uint32), ("loop", c_uint32), ("engine", c_uint32), ("flags", c_uint32),
                ("driver", c_char_p), ("device", c_int32), ("rungs", c_uint32), ("gate", c_uint32),
                ("gpu_wait_limit", c_uint32), ("slots", c_uint32), ("canary_timeout_ms", c_uint32), ("idle_bytes", c_uint64),
                ("account_bytes", c_uint64), ("pool_import_limit", c_uint64)]


class _EventStruct(_Sized):
    _fields_ = [("size", c_size_t), ("type", c_uint32), ("status", c_int), ("peer", c_void_p), ("loan", c_void_p),
                ("request", c_void_p), ("text", c_char * _TEXT_MAX)]


class _Stats(_Sized):
    _fields_ = [("size", c_size_t), ("engine", c_uint32), ("peers", c_uint32), ("loans_out", c_uint64),
                ("loans_total", c_uint64), ("loans_failed", c_uint64), ("chunks", c_uint64), ("live_bytes", c_uint64),
                ("idle_bytes", c_uint64), ("retired_bytes", c_uint64), ("surrendered_bytes", c_uint64),
                ("quarantined_bytes", c_uint64), ("imported_bytes", c_uint64), ("copied_bytes", c_uint64),
                ("gpu_waits", c_uint32), ("engine_reason", c_char * _TEXT_MAX), ("driver_text", c_char * _TEXT_MAX),
                ("pool_exported_bytes", c_uint64)]


class _Key(ctypes.Structure):
    _fields_ = [("bytes", c_ubyte * 32)]


class _PeerInfo(_Sized):
    _fields_ = [("size", c_size_t), ("pid", c_int32), ("lost", c_uint32), ("protocol", c_uint32), ("has_device", c_uint32),
                ("vmm_canary", c_uint32), ("pidfd", c_uint32), ("loans_out", c_uint64), ("account", c_char * 64),
                ("ipc_canary", c_uint32), ("pool_canary", c_uint32), ("foreign_vmm_canary", c_uint32),
                ("host_canary", c_uint32), ("canary_text", c_char * (4 * _TEXT_MAX))]


class _LendOptions(_Sized):
    _fields_ = [("size", c_size_t), ("access", c_uint32), ("policy", c_uint32), ("rungs", c_uint32), ("gate", c_uint32),
                ("memory", c_uint32), ("keep_open", c_uint32), ("stream", c_void_p), ("metadata", c_char_p),
                ("metadata_bytes", c_size_t), ("release", c_void_p), ("release_user", c_void_p), ("exclusive", c_uint32)]


class _RegionOptions(_Sized):
    _fields_ = [("size", c_size_t), ("bytes", c_uint64), ("alignment", c_uint64), ("access", c_uint32), ("memory", c_uint32)]


class _RequestInfo(_Sized):
    _fields_ = [("size", c_size_t), ("peer", c_void_p), ("bytes", c_uint64), ("alignment", c_uint64), ("memory", c_uint32),
                ("onward", c_uint32), ("metadata", c_void_p), ("metadata_bytes", c_size_t)]


class _RequestOptions(_Sized):
    _fields_ = [("size", c_size_t), ("bytes", c_uint64), ("alignment", c_uint64), ("memory", c_uint32), ("onward", c_uint32),
                ("metadata", c_char_p), ("metadata_bytes", c_size_t)]


class _View(_Sized):
    _fields_ = [("size", c_size_t), ("pointer", c_uint64), ("host", c_void_p), ("bytes", c_uint64), ("access", c_uint32),
                ("turn", c_uint32), ("metadata", c_void_p), ("metadata_bytes", c_size_t)]


class _LoanReport(_Sized):
    _fields_ = [("size", c_size_t), ("id", c_uint64), ("bytes", c_uint64), ("access", c_uint32), ("memory", c_uint32),
                ("rung", c_uint32), ("gate", c_uint32), ("turns", c_uint32), ("turns_done", c_uint32), ("ended", c_uint32),
                ("outcome", c_int), ("memory_state", c_uint32), ("canary", c_uint32), ("copied_bytes", c_uint64),
                ("exposed_bytes", c_uint64), ("step_ns", c_uint64 * 8), ("rung_reason", c_char * _TEXT_MAX),
                ("gate_reason", c_char * _TEXT_MAX), ("outcome_text", c_char * _TEXT_MAX), ("writers", c_char * _TEXT_MAX)]


class _DeviceInfo(_Sized):
    _fields_ = [("size", c_size_t), ("ordinal", c_int32), ("floors", c_uint32), ("missing", c_uint32),
                ("compute_mode", c_int32), ("integrated", c_uint32), ("total_bytes", c_uint64), ("granularity", c_uint64),
                ("uuid", c_ubyte * 16), ("name", c_char * 128), ("floor_reason", c_char * _TEXT_MAX), ("peers", c_uint64),
                ("pool_import_limit", c_uint64), ("pool_import_limit_source", c_uint32), ("mps", c_uint32)]


class _DriverInfo(_Sized):
    _fields_ = [("size", c_size_t), ("version", c_int32), ("simulated", c_uint32), ("devices", c_uint32),
                ("path", c_char * 256), ("found_by", c_char * 64)]


_FUNCTIONS: Dict[str, Tuple[Any, List[Any]]] = {
    "status_name": (c_char_p, [c_int]),
    "error_text": (c_char_p, []),
    "version_text": (c_char_p, []),
    "context_create": (c_int, [POINTER(_ContextOptions), POINTER(c_void_p)]),
    "context_destroy": (None, [c_void_p]),
    "context_fd": (c_int, [c_void_p]),
    "context_next_event": (c_int, [c_void_p, c_uint32, POINTER(_EventStruct)]),
    "context_stats": (c_int, [c_void_p, POINTER(_Stats)]),
    "context_invite": (c_int, [c_void_p, c_char_p, POINTER(_Key)]),
    "key_format": (None, [POINTER(_Key), c_char * 65]),
    "key_parse": (c_int, [c_char_p, POINTER(_Key)]),
    "context_listen": (c_int, [c_void_p, c_char_p]),
    "context_attach": (c_int, [c_void_p, c_int, c_char_p]),
    "context_connect": (c_int, [c_void_p, c_char_p, POINTER(_Key), c_uint32, POINTER(c_void_p)]),
    "context_adopt": (c_int, [c_void_p, c_int, c_uint32, POINTER(c_void_p)]),
    "peer_info_get": (c_int, [c_void_p, POINTER(_PeerInfo)]),
    "peer_close": (None, [c_void_p]),
    "region_create": (c_int, [c_void_p, POINTER(_RegionOptions), POINTER(c_void_p)]),
    "region_destroy": (c_int, [c_void_p]),
    "region_pointer": (c_uint64, [c_void_p]),
    "region_host": (c_void_p, [c_void_p]),
    "lend": (c_int, [c_void_p, c_uint64, c_uint64, POINTER(_LendOptions), POINTER(c_void_p)]),
    "loan_ready": (c_int, [c_void_p, c_void_p]),
    "reclaim": (c_int, [c_void_p, c_uint32]),
    "loan_cancel": (c_int, [c_void_p, c_char_p]),
    "request_info_get": (c_int, [c_void_p, POINTER(_RequestInfo)]),
    "request_grant": (c_int, [c_void_p, POINTER(_LendOptions), POINTER(c_void_p), POINTER(c_void_p)]),
    "request_grant_with": (c_int, [c_void_p, c_uint64, POINTER(_LendOptions), POINTER(c_void_p)]),
    "request_deny": (c_int, [c_void_p, c_char_p]),
    "request_send": (c_int, [c_void_p, POINTER(_RequestOptions), POINTER(c_void_p)]),
    "loan_acquire": (c_int, [c_void_p, c_uint32, POINTER(_View)]),
    "loan_done": (c_int, [c_void_p, c_void_p]),
    "loan_return": (c_int, [c_void_p]),
    "loan_fail": (c_int, [c_void_p, c_char_p]),
    "loan_wait_done": (c_int, [c_void_p, c_uint32]),
    "loan_wait_end": (c_int, [c_void_p, c_uint32]),
    "loan_report_get": (c_int, [c_void_p, POINTER(_LoanReport)]),
    "loan_unref": (None, [c_void_p]),
    "driver_probe": (c_int, [c_char_p, POINTER(_DriverInfo)]),
    "device_probe": (c_int, [c_char_p, c_int32, POINTER(_DeviceInfo)]),
    "pool_install": (c_int, [c_int32]),
    "pool_uninstall": (c_int, [c_int32]),
    "dlpack_delete": (None, [c_void_p]),
    "dlpack_delete_versioned": (None, [c_void_p]),
    "dlpack_capsule_free": (None, [c_void_p]),
    "dlpack_take": (c_void_p, []),
    "dlpack_python_set": (c_int, [c_void_p]),
}


def _load() -> ctypes.CDLL:
    """The library: $GPULOAN_LIBRARY, else beside this file, else where the loader finds libgpuloan.so.0."""
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libgpuloan.so.0")
    named = os.environ.get("GPULOAN_LIBRARY")
    path = named or (beside if os.path.exists(beside) else "libgpuloan.so.0")
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        what = "GPULOAN_LIBRARY names a library that cannot be loaded" if named else "libgpuloan.so.0 is not found"
        raise ImportError(f"gpuloan: {what}: {error}. Looked for: GPULOAN_LIBRARY, {beside}, and what the loader finds. Install gpuloan; "
                          "in a prefix of its own the loader needs its folder in LD_LIBRARY_PATH, or ldconfig; or set GPULOAN_LIBRARY to "
                          "the path of the library") from None
    try:
        library.gpuloan_version_text.restype = c_char_p
        have = library.gpuloan_version_text().decode()
    except AttributeError:
        raise ImportError(f"gpuloan: {path} is not a gpuloan library: it has no gpuloan_version_text") from None
    if tuple(have.split(".")[:2]) != tuple(str(part) for part in _VERSION):
        want = ".".join(str(part) for part in _VERSION)
        raise ImportError(f"gpuloan: this module is for version {want} of the library, and {path} is version {have}: install the two of "
                          "one version, or set GPULOAN_LIBRARY")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, "gpuloan_" + name)
        function.restype, function.argtypes = result, arguments
    return library


_lib = _load()


def version() -> str:
    """The version of the library that is loaded: "0.1.0"."""
    return str(_lib.gpuloan_version_text().decode())


def _driver_name(driver: Optional[str]) -> Optional[bytes]:
    return None if driver is None else os.fsencode(driver)


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


class _Fields(types.SimpleNamespace):
    """The fields of an output struct: texts as str, numbers of an enum as that."""

    def __init__(self, source: ctypes.Structure, enums: Mapping[str, Any]) -> None:
        super().__init__()
        for field in source._fields_:
            name = field[0]
            value = getattr(source, name)
            if isinstance(value, bytes):
                value = _text(value)
            elif isinstance(value, ctypes.Array):
                value = bytes(value) if name == "uuid" else tuple(value)
            elif name in enums:
                with contextlib.suppress(ValueError):  # of a newer library
                    value = enums[name](value)
            if name != "size":
                setattr(self, name, value)


class Report(_Fields):
    """The attributes of gpuloan_loan_report; rung, gate, access, memory, memory_state and canary print as their names.

    steps: {"EXPORT": ns, ... "RELEASE": ns}, nanoseconds of CLOCK_MONOTONIC (time.monotonic_ns); 0: not happened, or not known here.
    outcome_name: "GPULOAN_OK" or the error's.
    """

    def __init__(self, source: _LoanReport) -> None:
        super().__init__(source, {"access": Access, "memory": Memory, "rung": Rung, "gate": Gate,
                                  "memory_state": MemoryState, "canary": Canary})
        self.steps = dict(zip(_STEPS, source.step_ns))
        self.outcome_name = _lib.gpuloan_status_name(source.outcome).decode()


def driver_info(driver: Optional[str] = None) -> Any:
    """The attributes of gpuloan_driver_info. driver: "real", "sim", a path, or None: GPULOAN_DRIVER, else the real one."""
    info = _DriverInfo()
    _check(_lib.gpuloan_driver_probe(_driver_name(driver), byref(info)))
    return _Fields(info, {})


def _ordinal(device: Any, least: int = 0) -> int:
    return _whole(device, "device", least, 2**31 - 1)


def device_info(ordinal: int = 0, driver: Optional[str] = None) -> Any:
    """The attributes of gpuloan_device_info (uuid: 16 bytes), of the device with that number in this process."""
    info = _DeviceInfo()
    _check(_lib.gpuloan_device_probe(_driver_name(driver), _ordinal(ordinal), byref(info)))
    return _Fields(info, {})


def pool_install(device: int = 0) -> None:
    """EXPERIMENTAL. Makes what cudaMallocAsync hands out from now on lendable by the rung "pool" (gpuloan_pool_install). For
    PyTorch: before `import torch`, with PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync."""
    _check(_lib.gpuloan_pool_install(_ordinal(device)))


def pool_uninstall(device: int = 0) -> None:
    """EXPERIMENTAL. Undoes pool_install; memory that is still in use stays valid (gpuloan_pool_uninstall)."""
    _check(_lib.gpuloan_pool_uninstall(_ordinal(device)))


_torch_lock = threading.Lock()
_torch_allocator: Any = None  # for ever: blocks of a pool that was released go back through it
_torch_pools: Dict[int, Any] = {}  # by device


def _library_path() -> str:
    """The file of the library that is loaded, for those who have to load it by path."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")
            if path[1] and os.path.basename(path[2]).startswith("libgpuloan.so"):
                return "/" + path[2]
    return str(_lib._name)


@contextlib.contextmanager
def torch_pool(device: Optional[int] = None) -> Iterator[Any]:
    """What PyTorch allocates on `device` (None: its current one) inside the block comes from memory that is lent without a copy.

    A torch.cuda.MemPool over the library's allocator. Tensors may outlive the block. What they leave free serves later ones of the pool
    and nobody else: torch.cuda.empty_cache() does not give it back, torch_pool_release() does.
    """
    global _torch_allocator
    if not hasattr(_lib, "gpuloan_torch_malloc") or not hasattr(_lib, "gpuloan_torch_free"):
        raise _error(_UNSUPPORTED, f"torch_pool: {_library_path()} (version {version()}) has no allocator for PyTorch "
                                   "(gpuloan_torch_malloc, gpuloan_torch_free): install a version of gpuloan that has it")
    torch: Any = __import__("torch")
    if not hasattr(torch.cuda, "MemPool") or not hasattr(torch.cuda, "use_mem_pool"):
        raise _error(_UNSUPPORTED, f"torch_pool: PyTorch {torch.__version__} has no torch.cuda.MemPool: it needs 2.5 or newer. Without it "
                                   "use expandable_segments, or the default allocator, which lends by the rung ipc")
    ordinal = torch.cuda.current_device() if device is None else _ordinal(device)
    with _torch_lock:
        if ordinal not in _torch_pools:
            if _torch_allocator is None:
                _torch_allocator = torch.cuda.memory.CUDAPluggableAllocator(_library_path(), "gpuloan_torch_malloc", "gpuloan_torch_free")
            with torch.cuda.device(ordinal):
                _torch_pools[ordinal] = torch.cuda.MemPool(_torch_allocator.allocator())
        pool = _torch_pools[ordinal]
    with torch.cuda.use_mem_pool(pool, device=ordinal):
        yield pool


def torch_pool_release(device: Optional[int] = None) -> None:
    """Gives the memory of torch_pool() on `device` (None: PyTorch's current one) that no tensor uses back to the device. Tensors keep
    theirs; once they are gone torch.cuda.empty_cache() gives that back. The next torch_pool() begins with a new pool. For when no block of
    torch_pool() is under way and nobody has what one yielded: the pool lives for as long."""
    if not _torch_pools:
        return
    torch: Any = __import__("torch")
    with _torch_lock:
        released = _torch_pools.pop(torch.cuda.current_device() if device is None else _ordinal(device), None)
    if released is not None:
        del released
        torch.cuda.empty_cache()


# ---- Data types ---------------------------------------------------------------------------------------------------


class _Type(NamedTuple):
    name: str
    code: int  # DLPack's
    bits: int
    typestr: str  # of __cuda_array_interface__; an unsigned stand-in where that has no name for it

    @property
    def itemsize(self) -> int:
        return self.bits // 8


_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
_TYPES: Dict[str, _Type] = {
    one.name: one
    for one in [_Type(f"int{bits}", _INT, bits, f"{'|' if bits == 8 else '<'}i{bits // 8}") for bits in (8, 16, 32, 64)]
    + [_Type(f"uint{bits}", _UINT, bits, f"{'|' if bits == 8 else '<'}u{bits // 8}") for bits in (8, 16, 32, 64)]
    + [_Type(f"float{bits}", _FLOAT, bits, f"<f{bits // 8}") for bits in (16, 32, 64)]
    + [_Type("bfloat16", _BFLOAT, 16, "<u2"), _Type("bool", _BOOL, 8, "|b1"), _Type("complex32", _COMPLEX, 32, "<u4")]
    + [_Type(f"complex{bits}", _COMPLEX, bits, f"<c{bits // 8}") for bits in (64, 128)]
    + [_Type("float8_" + kind, code, 8, "|u1") for kind, code in (
        ("e3m4", 7), ("e4m3", 8), ("e4m3b11fnuz", 9), ("e4m3fn", 10), ("e4m3fnuz", 11), ("e5m2", 12), ("e5m2fnuz", 13), ("e8m0fnu", 14))]
}
_BY_CODE = {(one.code, one.bits): one for one in _TYPES.values()}
_BY_TYPESTR = {one.typestr[1:]: one for one in _TYPES.values() if one.typestr[1] == one.name[0]}  # without the stand-ins
_STAND_IN = {8: _TYPES["uint8"], 16: _TYPES["uint16"], 32: _TYPES["uint32"]}


def _type_of(dtype: Any) -> _Type:
    """The type that a name, a torch.dtype, a numpy dtype or a scalar class names."""
    if isinstance(dtype, _Type):
        return dtype
    text = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = str(text).rpartition(".")[2]
    if name not in _TYPES:
        raise _invalid(f"dtype {dtype!r} is none of {', '.join(_TYPES)}: take a view of another type as uint8")
    return _TYPES[name]


def _contiguous_strides(shape: Sequence[int]) -> Tuple[int, ...]:
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _count(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


# ---- DLPack -------------------------------------------------------------------------------------------------------

_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 13
_DL_READ_ONLY = 1
_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("byte_offset", c_uint64)]


class _DLManaged(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


class _DLManagedVersioned(ctypes.Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("manager_ctx", c_void_p), ("deleter", c_void_p),
                ("flags", c_uint64), ("tensor", _DLTensor)]


_capsule_valid = ctypes.PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_capsule_new = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))

# What was exported and not yet deleted, by the address of its managed tensor. One table of the process, as the library is one, however
# often this file is loaded.
_exports: Dict[int, Tuple[Any, ...]] = sys.__dict__.setdefault("_gpuloan_exports", {})


# Deleters and destructors are called while an exception is under way, too, when nothing of Python may be: the library's only note what
# was deleted, and call this when they can. It takes the table and the function as defaults: this module's names may be gone already.
def _dl_take(_: Any = None, exports: Dict[int, Tuple[Any, ...]] = _exports, take: Any = _lib.gpuloan_dlpack_take) -> int:
    address = take()
    while address:
        address = exports.pop(address)[0].manager_ctx
    return 0


class _DLPython(_Sized):
    _fields_ = [("size", c_size_t), ("holds_lock", c_void_p), ("exception", c_void_p), ("call_soon", c_void_p),
                ("capsule_is_valid", c_void_p), ("capsule_pointer", c_void_p), ("take_all", c_void_p)]


def _address(function: Any) -> Any:
    return ctypes.cast(function, c_void_p)


_dl_take_all = ctypes.CFUNCTYPE(c_int, c_void_p)(_dl_take)
_api = ctypes.pythonapi
_api.Py_IncRef(ctypes.py_object(_dl_take_all))  # for ever, as the library has its address
_check(_lib.gpuloan_dlpack_python_set(byref(_DLPython(
    holds_lock=_address(_api.PyGILState_Check), exception=_address(_api.PyErr_Occurred), call_soon=_address(_api.Py_AddPendingCall),
    capsule_is_valid=_address(_api.PyCapsule_IsValid), capsule_pointer=_address(_api.PyCapsule_GetPointer),
    take_all=_address(_dl_take_all)))))


def _dl_export(keep: Any, pointer: int, device: Tuple[int, int], kind: _Type, shape: Sequence[int], strides: Sequence[int],
               read_only: bool, versioned: bool) -> Any:
    """A capsule whose deleter drops `keep`."""
    _dl_take()
    managed: Any = _DLManagedVersioned() if versioned else _DLManaged()
    extents, steps = (c_int64 * len(shape))(*shape), (c_int64 * len(shape))(*strides)
    managed.tensor = _DLTensor(pointer, device[0], device[1], len(shape), kind.code, kind.bits, 1,
                               ctypes.cast(extents, POINTER(c_int64)), ctypes.cast(steps, POINTER(c_int64)), 0)
    managed.deleter = _address(_lib.gpuloan_dlpack_delete_versioned if versioned else _lib.gpuloan_dlpack_delete)
    if versioned:
        managed.major, managed.flags = 1, _DL_READ_ONLY if read_only else 0
    address = ctypes.addressof(managed)
    _exports[address] = (managed, extents, steps, keep)
    return _capsule_new(address, _VERSIONED if versioned else _PLAIN, _address(_lib.gpuloan_dlpack_capsule_free))


# ---- Tensors in ---------------------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """A tensor of somebody's, as far as lending it needs it."""

    keep: Any  # keeps the memory
    pointer: int  # of element 0; of the device, or with `host` of the CPU
    kind: _Type
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]  # elements
    read_only: bool
    host: bool

    @property
    def nbytes(self) -> int:
        return _count(self.shape) * self.kind.itemsize

    @property
    def covered(self) -> int:
        """Bytes from element 0 to the end of the last one."""
        if _count(self.shape) == 0:
            return 0
        return (sum((extent - 1) * step for extent, step in zip(self.shape, self.strides)) + 1) * self.kind.itemsize


def _on_cpu(tensor: Any, how: str = "") -> Error:
    return _invalid(f"the {type(tensor).__name__} is in CPU memory{how}, and only device memory is lent: move it to the GPU first "
                    "(tensor.cuda(), cupy.asarray(x), jax.device_put(x)), or request host memory (memory=\"host\") and write into that")


def _steps(strides: Any) -> Tuple[int, ...]:
    return tuple(_whole(step, f"stride[{index}]", -_BYTES_MAX) for index, step in enumerate(strides))


def _from_data_ptr(tensor: Any) -> _Source:
    device = getattr(tensor, "device", None)
    place = getattr(device, "type", None)
    if place == "cpu":
        raise _on_cpu(tensor)
    if place not in (None, "cuda"):
        raise _invalid(f"the {type(tensor).__name__} is on the device {str(device)!r}: only CUDA memory is lent")
    for lazy in ("is_conj", "is_neg"):
        if getattr(tensor, lazy, lambda: False)():
            raise _invalid(f"the tensor is a lazy view ({lazy}() is true), so its memory has other values: lend tensor.resolve_"
                           f"{lazy[3:]}() instead")
    kind = _type_of(tensor.dtype)
    if tensor.element_size() != kind.itemsize:
        raise _invalid(f"the tensor says {tensor.element_size()} bytes for an element of {kind.name}, which has {kind.itemsize}")
    return _Source(tensor, int(tensor.data_ptr()), kind, _extents(tensor.shape), _steps(tensor.stride()), False, False)


def _from_cuda_array(tensor: Any, interface: Mapping[str, Any]) -> Optional[_Source]:
    typestr = str(interface["typestr"])
    if typestr[0] == ">" or typestr[1:] not in _BY_TYPESTR:
        return None  # "<V2" of a type with a name of its own: DLPack may know it
    if interface.get("mask") is not None:
        raise _invalid("the array has a mask, which cannot be lent: lend its data and its mask one by one")
    kind = _BY_TYPESTR[typestr[1:]]
    shape = _extents(interface["shape"])
    given = interface.get("strides")
    steps = _steps(given or ())
    if any(step % kind.itemsize for step in steps):
        raise _invalid(f"the array's strides {steps} (bytes) are no multiples of its element's {kind.itemsize} bytes")
    strides = _contiguous_strides(shape) if given is None else tuple(step // kind.itemsize for step in steps)
    pointer, read_only = interface["data"]
    return _Source(tensor, int(pointer or 0), kind, shape, strides, bool(read_only), False)


def _from_dlpack(tensor: Any, stream: int) -> _Source:
    where = tuple(int(part) for part in tensor.__dlpack_device__())
    if where[0] in (_DL_CPU, _DL_CUDA_HOST):
        raise _on_cpu(tensor, " (pinned)" if where[0] == _DL_CUDA_HOST else "")
    if where[0] not in (_DL_CUDA, _DL_CUDA_MANAGED):
        raise _invalid(f"the {type(tensor).__name__} is on DLPack's device type {where[0]}: only CUDA memory (2, 13) is lent")
    stream = -1 if stream == STREAM_CPU else stream  # DLPack's word for "waits for nothing"
    try:
        capsule = tensor.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:
        capsule = tensor.__dlpack__(stream=stream)
    read_only = False
    if _capsule_valid(id(capsule), _VERSIONED):
        versioned = _DLManagedVersioned.from_address(_capsule_pointer(id(capsule), _VERSIONED))
        if versioned.major != 1:
            raise _error(_UNSUPPORTED, f"the {type(tensor).__name__} exports DLPack {versioned.major}, and this module reads 0 and 1")
        value, read_only = versioned.tensor, bool(versioned.flags & _DL_READ_ONLY)
    elif _capsule_valid(id(capsule), _PLAIN):
        value = _DLManaged.from_address(_capsule_pointer(id(capsule), _PLAIN)).tensor
    else:
        raise _invalid(f"__dlpack__ of the {type(tensor).__name__} gave no capsule named dltensor or dltensor_versioned")
    kind = _BY_CODE.get((value.code, value.bits))
    if kind is None or value.lanes != 1:
        raise _invalid(f"the {type(tensor).__name__} has DLPack's type {value.code} of {value.bits} bits and {value.lanes} lanes, which "
                       f"cannot be lent: one of {', '.join(_TYPES)} can; lend a view of another type as uint8")
    shape = tuple(value.shape[i] for i in range(value.ndim))
    strides = tuple(value.strides[i] for i in range(value.ndim)) if value.strides else _contiguous_strides(shape)
    # The capsule is not consumed: dropping it calls the producer's deleter.
    return _Source((tensor, capsule), (value.data or 0) + value.byte_offset, kind, shape, strides, read_only, False)


def _is_jax(tensor: Any) -> bool:
    return hasattr(tensor, "block_until_ready")


def _from_jax(tensor: Any, stream: int) -> _Source:
    """JAX arrays are immutable, and complete once block_until_ready has returned."""
    tensor.block_until_ready()
    places = {device.platform for device in tensor.devices()} if hasattr(tensor, "devices") else {"gpu"}
    if places == {"cpu"}:
        raise _on_cpu(tensor)
    source = None
    with contextlib.suppress(Exception):  # its words for "not this dtype" differ between versions
        source = _from_cuda_array(tensor, tensor.__cuda_array_interface__)
    if source is None:
        try:
            source = _from_dlpack(tensor, stream)
        except Exception:  # an old DLPack has no fp8; the array is contiguous then, as JAX makes them
            if not hasattr(tensor, "unsafe_buffer_pointer"):
                raise
            shape = _extents(tensor.shape)
            pointer = int(tensor.unsafe_buffer_pointer())
            source = _Source(tensor, pointer, _type_of(tensor.dtype), shape, _contiguous_strides(shape), True, False)
    return source._replace(read_only=True)


def _source(tensor: Any, stream: int) -> _Source:
    """What `tensor` is. `stream` is where the work of the borrower will be ordered behind (for __dlpack__)."""
    source = _described(tensor, stream)
    if len(source.strides) != len(source.shape):
        raise _invalid(f"the {type(tensor).__name__} says {len(source.strides)} strides {source.strides} for {len(source.shape)} "
                       f"dimensions {source.shape}")
    return source


def _described(tensor: Any, stream: int) -> _Source:
    """The same, as its protocols say it."""
    if isinstance(tensor, DeviceArray):
        return tensor._as_source()
    if _is_jax(tensor):
        return _from_jax(tensor, stream)
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "element_size"):
        return _from_data_ptr(tensor)
    interface = getattr(tensor, "__cuda_array_interface__", None)
    source = None if interface is None else _from_cuda_array(tensor, interface)
    if source is None and hasattr(tensor, "__dlpack__"):
        source = _from_dlpack(tensor, stream)
    if source is None and interface is not None:
        raise _invalid(f"the {type(tensor).__name__} has the type {interface['typestr']!r}, which cannot be lent: lend a view of it as "
                       "uint8")
    if source is None:
        if hasattr(tensor, "__array_interface__"):
            raise _on_cpu(tensor)
        if _buffer_of(tensor) is not None:
            raise _invalid(f"the {type(tensor).__name__} object is in CPU memory, and only device memory is lent: make a tensor on the GPU "
                           "of it, or pass it as user, which takes up to 4096 bytes")
        raise _invalid(f"{type(tensor).__name__} is no tensor: it has neither data_ptr nor __cuda_array_interface__ nor __dlpack__")
    return source


def _check_layout(source: _Source, access: int) -> None:
    """Negative strides are refused; for write also overlaps and holes, since the bytes of a hole may be somebody else's."""
    if any(step < 0 and extent > 1 for extent, step in zip(source.shape, source.strides)):
        raise _invalid(f"the tensor has a negative stride {source.strides}: lend a contiguous copy of it")
    if source.covered > _BYTES_MAX:
        raise _invalid(f"the tensor reaches over {source.covered} bytes (shape {source.shape}, strides {source.strides}): more than any "
                       "memory")
    if access != Access.WRITE or source.nbytes == 0:
        return
    if source.read_only:
        raise _invalid("the tensor is read-only (JAX arrays always are), so it cannot be lent for write: let the worker request a result")
    dense = 1
    for step, extent in sorted((step, extent) for extent, step in zip(source.shape, source.strides) if extent > 1):
        if step < dense:
            raise _invalid(f"elements of the tensor share memory (shape {source.shape}, strides {source.strides}), so it cannot be lent "
                           "for write: lend a contiguous copy of it, or lend it for read")
        if step > dense:
            raise _invalid(f"the tensor does not fill its range of memory (shape {source.shape}, strides {source.strides}), and a write "
                           "loan may change what is between: lend a contiguous copy of it, or lend it for read")
        dense *= extent


# ---- Metadata of a loan or request --------------------------------------------------------------------------------

_HEAD = struct.Struct("<4sBBHII")
_MAGIC = b"GLT1"


class _Layout(NamedTuple):
    kind: _Type
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]  # elements
    offset: int  # bytes from the loan's start to element 0
    user: bytes

    @property
    def nbytes(self) -> int:
        return _count(self.shape) * self.kind.itemsize


def _pack(layout: _Layout) -> bytes:
    ndim = len(layout.shape)
    head = _HEAD.pack(_MAGIC, layout.kind.code, layout.kind.bits, ndim, len(layout.user), 0)
    data = head + struct.pack(f"<{2 * ndim + 1}q", *layout.shape, *layout.strides, layout.offset) + layout.user
    if len(data) > _METADATA_MAX:
        raise _invalid(f"the shape takes {len(data) - len(layout.user)} bytes and user {len(layout.user)} of the {_METADATA_MAX} that "
                       "there are: make user shorter, and send the rest some other way")
    return data


def _wanted(shape: Any, dtype: Any, user: bytes = b"") -> _Layout:
    """Of a new array, which is contiguous."""
    kind, extents = _type_of(dtype), _extents(shape)
    if _count(extents) * kind.itemsize > _BYTES_MAX:
        raise ValueError(f"shape {extents} of {kind.name} has {_count(extents) * kind.itemsize} bytes: more than any memory")
    return _Layout(kind, extents, _contiguous_strides(extents), 0, user)


def _user_bytes(user: Any) -> bytes:
    if isinstance(user, (str, int)):  # bytes() would refuse the one without saying how, and take the other for a length
        raise _invalid(f"user is {user!r}, and has to be bytes: user=str(...).encode()")
    try:
        return bytes(user)
    except TypeError:
        raise _invalid(f"user is {user!r}, and has to be bytes") from None


def _unpack(data: bytes, total: int) -> _Layout:
    """The layout that a peer sent for a loan of `total` bytes. Metadata without the magic (a C program's) is all `user`, and the
    loan an array of uint8. Raises INVALID where it does not fit the loan."""
    if data[:4] != _MAGIC:
        return _Layout(_TYPES["uint8"], (total,), (1,), 0, data)
    try:
        _, code, bits, ndim, user_bytes, _ = _HEAD.unpack_from(data)
        numbers = struct.unpack_from(f"<{2 * ndim + 1}q", data, _HEAD.size)
        kind = _BY_CODE[code, bits]
    except (struct.error, KeyError):
        raise _invalid(f"the peer's description of the loan is cut off, or its type is unknown: {data[:24].hex()}") from None
    shape, strides, offset = numbers[:ndim], numbers[ndim:-1], numbers[-1]
    start = _HEAD.size + 8 * len(numbers)
    source = _Source(None, 0, kind, shape, strides, False, False)
    if len(data) != start + user_bytes or min((0, offset) + numbers) < 0 or offset + source.covered > total:
        raise _invalid(f"the peer's description does not fit its loan of {total} bytes: {kind.name}, shape {shape}, strides {strides}, "
                       f"offset {offset}")
    return _Layout(kind, shape, strides, offset, data[start:])


# ---- Streams and the driver ---------------------------------------------------------------------------------------


def _stream_of(stream: Any, tensor: Any = None, device: Optional[int] = None) -> int:
    """The CUstream that `stream` names; None: the current one of the tensor's framework, else of one that works in this process,
    else the legacy default stream."""
    if stream is None:
        return _current_stream(tensor, device) or STREAM_LEGACY
    if isinstance(stream, int):
        return _whole(stream, "stream", 0, STREAM_CPU) or STREAM_LEGACY
    for name in ("cuda_stream", "ptr", "__cuda_stream__", "handle"):  # torch, CuPy, the protocol, numba
        value = getattr(stream, name, None)
        if value is not None:
            value = value() if callable(value) else value
            value = value[1] if isinstance(value, tuple) else getattr(value, "value", value)
            return int(value or 0) or STREAM_LEGACY
    raise _invalid(f"{type(stream).__name__} is no stream: give an integer, or an object with cuda_stream, ptr or __cuda_stream__")


def _current_stream(tensor: Any, device: Optional[int]) -> int:
    owner = (type(tensor).__module__ or "").partition(".")[0]
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    named = _stream_of_interface(tensor)
    if named:
        return named
    if torch is not None and owner != "cupy" and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return int(torch.cuda.current_stream(tensor.device if owner == "torch" else device).cuda_stream)
    if cupy is not None and owner != "torch" and hasattr(cupy, "cuda"):
        return int(cupy.cuda.get_current_stream().ptr)
    return 0


def _stream_of_interface(tensor: Any) -> int:
    """The stream that an array says its work is in, by the version 3 of __cuda_array_interface__; 0: it says none."""
    if hasattr(tensor, "data_ptr") or _is_jax(tensor):
        return 0  # these have none, and raise for some types
    interface = getattr(tensor, "__cuda_array_interface__", None)
    return int(interface.get("stream") or 0) if isinstance(interface, Mapping) else 0


_drivers: Dict[str, _Driver] = {}


class _Driver:
    """The few calls that copy, of the driver library that gpuloan loaded."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._primary: Dict[int, int] = {}
        self._call("cuInit", c_uint32(0))

    @staticmethod
    def of(name: Optional[str]) -> _Driver:
        path = driver_info(name).path
        if path not in _drivers:
            _drivers[path] = _Driver(path)
        return _drivers[path]

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            text = c_char_p()
            self._library.cuGetErrorName(result, byref(text))
            raise _error(-66, f"{name} failed with {(text.value or b'?').decode()} ({result})")

    def ordinal(self, pointer: int) -> int:
        """The device of a device pointer, by its number in this process."""
        value = c_int(0)
        kinds, places = (c_int * 1)(9), (c_void_p * 1)(ctypes.addressof(value))  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        self._call("cuPointerGetAttributes", c_uint32(1), kinds, places, c_uint64(pointer))
        return value.value

    @contextlib.contextmanager
    def _current(self, pointer: int) -> Iterator[None]:
        """A thread without a CUDA context works in the primary one of the pointer's device."""
        context = c_void_p()
        self._call("cuCtxGetCurrent", byref(context))
        if context.value:
            yield
            return
        ordinal = self.ordinal(pointer)
        if ordinal not in self._primary:  # kept for ever, as the runtime does
            device = c_int()
            self._call("cuDeviceGet", byref(device), c_int(ordinal))
            self._call("cuDevicePrimaryCtxRetain", byref(context), device)
            self._primary[ordinal] = int(context.value or 0)
        self._call("cuCtxPushCurrent_v2", c_void_p(self._primary[ordinal]))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(context))

    def copy(self, way: str, target: int, source: int, size: int, stream: int) -> None:
        """One copy ("DtoD", "HtoD", "DtoH") in `stream`, which is waited for."""
        if size == 0:
            return
        with self._current(source if way == "DtoH" else target):
            pointers = [c_void_p(value) if side == "H" else c_uint64(value) for side, value in ((way[3], target), (way[0], source))]
            self._call(f"cuMemcpy{way}Async_v2", *pointers, c_size_t(size), c_void_p(stream))
            self._call("cuStreamSynchronize", c_void_p(stream))


# ---- Context: what both sides share -------------------------------------------------------------------------------

_contexts: weakref.WeakSet[_Context] = weakref.WeakSet()
_OPTIONS = ("gpu_wait_limit", "slots", "canary_timeout_ms", "idle_bytes", "account_bytes", "pool_import_limit")


class _Context:
    """A gpuloan_context. Every call with a handle of it goes through call() or drop(), so none runs during or after destroy.

    The lock is only held for a few lines, never during a call that waits. It is re-entrant, as the garbage collector may drop a
    handle inside it.
    """

    def __init__(self, role: int, device: Optional[int], driver: Optional[str], rungs: Any, gate: Any, engine: Any,
                 numbers: Dict[str, int]) -> None:
        unknown = sorted(set(numbers) - set(_OPTIONS))
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}: there are {', '.join(_OPTIONS)}")
        sizes = {field[0]: ctypes.sizeof(field[1]) for field in _ContextOptions._fields_}
        numbers = {name: _whole(value, name, 0, 2**(8 * sizes[name]) - 1) for name, value in numbers.items()}
        device = None if device is None else _ordinal(device, -1)
        mask = _rung_mask(rungs)
        if device == -1 and mask and not mask & Rung.HOST:
            raise _invalid(f"rungs is {rungs!r}, and without a device (device=-1) only 'host' carries loans: leave one of the two out")
        flags = 0 if device is None else _CONTEXT_NO_DEVICE if device < 0 else _CONTEXT_DEVICE
        options = _ContextOptions(role=role, flags=flags, driver=_driver_name(driver), device=max(device or 0, 0), rungs=mask,
                                  gate=_number(Gate, gate, "gate"), engine=_number(Engine, engine, "engine"), **numbers)
        handle = c_void_p()
        _check(_lib.gpuloan_context_create(byref(options), byref(handle)))
        self.handle = handle
        self.alive = True
        self.abandoned = False  # a call of a thread's is in it that nobody waits for: that thread closes it
        self.driver_name = driver
        self._simulated: Optional[bool] = None
        self.device_wanted = device is None or device >= 0
        self.device = device if self.device_wanted else None
        self.events = threading.RLock()  # held while events are taken and handled, so that they keep their order
        self._init_process()
        self._busy: Deque[int] = collections.deque()  # regions whose last reference went while they were lent
        _contexts.add(self)

    def _init_process(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # events were handled, or a call ended
        self._calls = 0
        self._own = _Own()
        self._closed_inside = False

    def forked(self) -> None:
        """In a forked child: locks may be held by threads that do not exist here."""
        pid = self.pid
        self._init_process()
        self.events = threading.RLock()
        self.pid = pid

    def check_process(self) -> None:
        """Refuses a forked child, before anything that the parent was about to be told: it is the parent's."""
        if self.pid != os.getpid():
            raise _error(_FORKED, "this object belongs to the process that this one was forked from: start workers with exec")

    def _enter(self) -> None:
        self.check_process()
        with self.lock:
            self._own.calls += 1  # first: a signal handler may close() behind any of these lines
            self._calls += 1
            if self.alive:
                return
            self._leave()
        raise _error(_STATE, "the connection's context was closed: its loans and arrays cannot be used any more")

    def _leave(self) -> None:
        with self.lock:
            self._own.calls -= 1
            self._calls -= 1
            if self.alive:
                return
            self.changed.notify_all()
            last = self._closed_inside and self._calls == 0
            self._closed_inside = self._closed_inside and not last
        if last:
            self._destroy()

    def inside(self) -> bool:
        """Whether this thread is in the middle of a call, or has a lock that other threads want: in a signal handler."""
        owned = self.lock._is_owned() or self.events._is_owned()  # type: ignore[attr-defined]
        return bool(self._own.calls or owned)

    def status(self, function: Any, *arguments: Any) -> Tuple[int, str]:
        """Calls the library: its status, and its sentence where that is an error."""
        self._enter()
        try:
            status = function(*arguments)
            return status, _text(_lib.gpuloan_error_text()) if status else ""
        finally:
            self._leave()

    def call(self, function: Any, *arguments: Any) -> None:
        status, text = self.status(function, *arguments)
        if status:
            raise _error(status, text)

    def interruptible(self, function: Any, *arguments: Any) -> None:
        """call() of what waits long and cannot be cut: on a thread, so that the main one hears signals. After Ctrl-C the context is that
        thread's to close."""
        if threading.current_thread() is not threading.main_thread():
            return self.call(function, *arguments)
        over = threading.Event()
        errors: List[BaseException] = []

        def run() -> None:
            try:
                self.call(function, *arguments)
            except BaseException as error:
                errors.append(error)
            over.set()
            if self.abandoned:
                self.close()

        thread = threading.Thread(target=run, name="gpuloan-connect", daemon=True)
        thread.start()
        try:
            over.wait()
        except BaseException:
            self.abandoned = True
            _contexts.discard(self)
            raise
        thread.join()
        if errors:
            raise errors[0]

    def value(self, function: Any, *arguments: Any) -> Any:
        """Calls a function that gives a value instead of a status."""
        self._enter()
        try:
            return function(*arguments)
        finally:
            self._leave()

    def wait(self, timeout: Optional[float], function: Any, *arguments: Any, last: Tuple[Any, ...] = ()) -> None:
        """Calls a function that waits, as often as it takes, with `timeout` milliseconds between `arguments` and `last`."""
        deadline = _Deadline(timeout)
        while True:
            _dl_take()  # the main thread, which would, may sleep
            status, text = self.status(function, *arguments, deadline.slice(), *last)
            if status == _TIMEOUT and not deadline.passed():
                continue
            if status == _TIMEOUT:  # the text knows the last part of the time only
                text = re.sub(r"within \d+ ms", f"within {timeout:g} s", text)
            if status:
                raise _error(status, text)
            return

    def next_event(self, timeout_ms: int) -> Optional[_EventStruct]:
        _dl_take()
        event = _EventStruct()
        status, text = self.status(_lib.gpuloan_context_next_event, self.handle, timeout_ms, byref(event))
        if status == _TIMEOUT:
            return None
        if status:
            raise _error(status, text)
        return event

    def drop(self, function: Any, handle: Any) -> None:
        """Gives a handle up, if there still is one: from finalizers, so without an error."""
        if self.pid != os.getpid():
            return
        try:
            self._enter()
        except Error:
            return  # destroy has freed it
        try:
            if function(handle) == _BUSY:
                self._busy.append(handle)
        finally:
            self._leave()

    def has_busy(self) -> bool:
        return bool(self._busy)

    def drop_busy(self) -> None:
        """Tries again those that were lent when they were dropped."""
        for _ in range(len(self._busy)):
            try:
                handle = self._busy.popleft()
            except IndexError:  # another thread does the same
                return
            self.drop(_lib.gpuloan_region_destroy, handle)

    def close(self) -> bool:
        """Destroys the context, once no call is in it. True for the one call that does. In a signal handler, which cannot wait for the
        call that it interrupted, that call does it when it ends."""
        own = self._own.calls
        with self.lock:
            if not self.alive or (self.abandoned and self._calls):
                return False
            self.alive = False
            if self.pid != os.getpid():
                return True  # the child's copy is nothing
            if own:
                self._closed_inside = True
                return True
            while self._calls:  # none of them waits longer than a slice, or than the library needs
                self.changed.wait()
        self._destroy()
        return True

    def _destroy(self) -> None:
        _lib.gpuloan_context_destroy(self.handle)
        with self.lock:
            self.changed.notify_all()

    def array_of(self, region: c_void_p, layout: _Layout, on_host: bool) -> DeviceArray:
        """The array that owns a region of the parent's."""
        hold = _Hold(self, region.value, _lib.gpuloan_region_destroy)
        pointer = self.value(_lib.gpuloan_region_pointer, region)
        host = self.value(_lib.gpuloan_region_host, region) or 0
        return DeviceArray(self, hold, layout, pointer, host, False, on_host or bool(host))

    def driver(self) -> _Driver:
        return _Driver.of(self.driver_name)

    def simulated(self) -> bool:
        if self._simulated is None:
            self._simulated = bool(driver_info(self.driver_name).simulated)
        return self._simulated


class _Own(threading.local):
    """Of each thread."""

    calls = 0  # of the library that it is in


class _Deadline:
    """A timeout in seconds, or None for none, cut into the library's slices."""

    def __init__(self, timeout: Optional[float]) -> None:
        seconds = _seconds(timeout)
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left, at most one slice."""
        most = _SLICE_MS / 1000
        return most if self._end is None else min(max(self._end - time.monotonic(), 0), most)

    def slice(self) -> int:
        """The same in milliseconds; at least one until the time has passed."""
        return int(self.left() * 1000 + 0.999)

    def passed(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end


_INTERRUPTED = 0.1  # seconds for workers to end after Ctrl-C


def _is_interrupt(kind: Any) -> bool:
    """Whether this exception is Ctrl-C, or what asyncio makes of it."""
    return isinstance(kind, type) and (issubclass(kind, KeyboardInterrupt) or kind.__name__ == "CancelledError")


def _milliseconds(timeout: Optional[float]) -> int:
    seconds = _seconds(timeout)
    return 0xFFFFFFFF if seconds is None else min(int(max(seconds, 0) * 1000 + 0.999), 0xFFFFFFFF)


def _after_fork() -> None:
    global _releasing
    _releasing = threading.RLock()
    for context in list(_contexts):
        context.forked()


_closers: weakref.WeakSet[Any] = weakref.WeakSet()  # exporters and workers that are open


@atexit.register
def _at_exit() -> None:
    for one in list(_closers):
        if isinstance(one, Exporter) and _is_interrupt(getattr(sys, "last_type", None)):
            one.close(_INTERRUPTED)
        else:
            one.close()
    for context in list(_contexts):
        context.close()
    _lib.gpuloan_dlpack_python_set(None)


os.register_at_fork(after_in_child=_after_fork)


class _Hold:
    """One handle of a context, dropped with the last reference to this: an array's, a DLPack consumer's, a loan's."""

    def __init__(self, context: _Context, handle: Any, dropped_by: Any) -> None:
        self.context = context
        self.handle = handle
        self._dropped_by = dropped_by
        self.turn = 0  # of an importer's loan: the one whose memory may be used; 0: none

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            self.context.drop(self._dropped_by, handle)

    __del__ = close


# ---- Arrays out ---------------------------------------------------------------------------------------------------


class DeviceArray:
    """Memory of a loan or of a result, with its type and shape. Frameworks take it by DLPack or __cuda_array_interface__.

    At the parent it owns its memory: that goes back to the arena with the last reference to the array and to what frameworks made of
    it. At a worker it is lent: it may be used until the loan's done() or fail(), and dropping the last reference returns the loan.
    Nothing is copied by making one.

    shape, strides (elements), dtype ("float32", "bfloat16", "float8_e4m3fn" ...), itemsize, nbytes (of the elements), pointer (device
    address of element 0; 0 for no elements, or for host memory that no device sees), host (memoryview of the bytes of host memory, else
    None), device (ordinal in this process). A parent's result also has peer, user and report.
    """

    def __init__(self, context: _Context, hold: Any, layout: _Layout, pointer: int, host: int, read_only: bool, on_host: bool) -> None:
        self._context = context
        self._hold = hold
        self._turn = hold.turn if isinstance(hold, _Hold) else 0
        self._kind = layout.kind
        self.shape = layout.shape
        self.strides = layout.strides
        self._pointer = pointer + layout.offset if pointer else 0
        self._host = host + layout.offset if host else 0
        self._read_only = read_only
        self._on_host = on_host
        self.peer: Optional[Peer] = None
        self.user = layout.user
        self._loan: Optional[_LoanBase] = None

    @property
    def dtype(self) -> str:
        return self._kind.name

    @property
    def itemsize(self) -> int:
        return self._kind.itemsize

    @property
    def nbytes(self) -> int:
        return _count(self.shape) * self._kind.itemsize

    @property
    def report(self) -> Optional[Report]:
        """Of the worker's loan, of a parent's result; else None."""
        return None if self._loan is None else self._loan.report()

    def __repr__(self) -> str:
        return f"<gpuloan.DeviceArray {self.dtype} {self.shape} in {'host' if self._on_host else 'device'} memory>"

    def _check(self) -> None:
        """Refuses memory that was given back: another process, or another loan, may own it by now."""
        self._context.check_process()
        if not self._context.alive:
            raise _error(_STATE, "the array's context was closed, and its memory with it")
        if isinstance(self._hold, _Hold) and self._hold.turn != self._turn:
            raise _error(_STATE, "the array's loan is done: its memory was given back and must not be used any more")

    def _as_source(self) -> _Source:
        self._check()
        on_cpu = self._on_host and not self._pointer and self.nbytes > 0
        return _Source(self, self._host if on_cpu else self._pointer, self._kind, self.shape, self.strides, self._read_only, on_cpu)

    @property
    def pointer(self) -> int:
        self._check()
        return self._pointer

    @property
    def device(self) -> int:
        self._check()
        if self._pointer == 0:
            return self._context.device or 0
        return self._context.driver().ordinal(self._pointer)

    @property
    def host(self) -> Optional[memoryview]:
        """The bytes from element 0 to the end of the last one, of host memory."""
        self._check()
        if not self._on_host:
            return None
        size = self._as_source().covered
        if size == 0:
            return memoryview(b"")
        buffer = (c_ubyte * size).from_address(self._host)
        buffer._hold = self._hold  # type: ignore[attr-defined]  # the view keeps the buffer
        view = memoryview(buffer).cast("B")
        return view.toreadonly() if self._read_only else view

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        self._check()
        if self._on_host and not self._pointer and self.nbytes:
            raise AttributeError("__cuda_array_interface__: this is host memory that no device sees: use .host, or DLPack")
        contiguous = self.strides == _contiguous_strides(self.shape)
        return {"shape": self.shape, "typestr": self._kind.typestr, "data": (self._pointer, self._read_only), "version": 3,
                "strides": None if contiguous else tuple(step * self._kind.itemsize for step in self.strides), "stream": None}

    def __dlpack_device__(self) -> Tuple[int, int]:
        """(2, ordinal) for CUDA, (1, 0) for host memory."""
        return (_DL_CPU, 0) if self._on_host else (_DL_CUDA, self.device)

    def __dlpack__(self, *, stream: Any = None, max_version: Optional[Tuple[int, int]] = None, dl_device: Optional[Tuple[int, int]] = None,
                   copy: Optional[bool] = None) -> Any:
        """A DLPack capsule. Its consumer keeps the memory as this array does. No stream has to wait: what the array holds is complete."""
        if copy:
            raise BufferError("a gpuloan array is a view of lent memory: copy it in the framework that takes it")
        device = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) != device:
            raise BufferError(f"the array is on DLPack's device {device}, not on {tuple(dl_device)}")
        return self._capsule(self._kind, max_version is not None and max_version[0] >= 1, device)

    def _capsule(self, kind: _Type, versioned: bool, device: Tuple[int, int]) -> Any:
        return _dl_export(self._hold, self._host if self._on_host else self._pointer, device, kind, self.shape, self.strides,
                          self._read_only, versioned)

    # Views in a framework. None of them copies; each keeps the memory as long as it lives.

    def _refuse_simulated(self, framework: str) -> None:
        if self._context.device_wanted and self._context.simulated():
            raise _error(_UNSUPPORTED, f"this memory is of the simulated driver and has no CUDA address, so {framework} cannot use it: in "
                                       "tests copy the bytes with copy_to_host() and copy_from(), for NumPy "
                                       "numpy.frombuffer(array.copy_to_host(), dtype), or request memory=\"host\" and use .host")

    def torch(self) -> Any:
        """As a torch.Tensor of the same dtype, on the same device (host memory: on the CPU)."""
        if not self._on_host:
            self._refuse_simulated("PyTorch")
        torch: Any = __import__("torch")
        self._check()
        wanted = getattr(torch, self.dtype, None)
        if wanted is None:
            raise _error(_UNSUPPORTED, f"PyTorch {torch.__version__} has no dtype {self.dtype}")
        device = self.__dlpack_device__()
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=wanted, device="cpu" if device[0] == _DL_CPU else f"cuda:{device[1]}")
        kind = self._kind
        if kind.code in (_BOOL, _UINT) or kind.code > _BOOL:  # not all versions take these by DLPack
            kind = _TYPES["uint8"] if kind.bits == 8 else _TYPES[f"int{kind.bits}"]
        tensor = torch.utils.dlpack.from_dlpack(self._capsule(kind, False, device))
        return tensor if kind == self._kind or tensor.dtype == wanted else tensor.view(wanted)

    def cupy(self) -> Any:
        """As a cupy.ndarray; bfloat16 as uint16 and float8 as uint8, since CuPy has no such types."""
        self._refuse_simulated("CuPy")
        cupy: Any = __import__("cupy")
        self._check()
        if self.nbytes == 0:
            return cupy.empty(self.shape, dtype=self._kind.typestr)
        return cupy.asarray(self)

    def jax(self) -> Any:
        """As a jax.Array, which is immutable: to write, use copy_from. float8 may be a copy where JAX does not take it by DLPack."""
        if not self._on_host:
            self._refuse_simulated("JAX")
        jax: Any = __import__("jax")
        from_dlpack: Any = __import__("jax.dlpack", fromlist=["from_dlpack"]).from_dlpack
        self._check()
        if self.nbytes == 0:
            return jax.numpy.zeros(self.shape, dtype=self.dtype)
        if self._kind.code in (_BFLOAT,) or self._kind.code > _BOOL:
            try:
                return from_dlpack(self)
            except Exception:  # its words for "not this dtype" differ between versions
                stand_in = from_dlpack(_StandIn(self))
                return jax.lax.bitcast_convert_type(stand_in, getattr(jax.numpy, self.dtype))
        return from_dlpack(self)

    def numba(self) -> Any:
        """As a numba.cuda device array; bfloat16 as uint16 and float8 as uint8."""
        self._refuse_simulated("numba")
        cuda: Any = __import__("numba.cuda", fromlist=["as_cuda_array"])
        self._check()
        return cuda.as_cuda_array(self)

    def copy_to_host(self) -> bytes:
        """The elements in C order, copied behind the framework's current stream. Waits for the copy. A view that is not contiguous is
        gathered element by element."""
        source = self._as_source()
        raw = bytearray(source.covered)
        if raw:
            if self._on_host:
                ctypes.memmove((c_char * len(raw)).from_buffer(raw), self._host, len(raw))
            else:
                target = (c_char * len(raw)).from_buffer(raw)
                order = _stream_of(None, None, self._context.device)
                self._context.driver().copy("DtoH", ctypes.addressof(target), self._pointer, len(raw), order)
        if _is_contiguous(source):
            return bytes(raw)
        return b"".join(_gather(memoryview(raw), self.itemsize, self.shape, self.strides, 0))

    def copy_from(self, x: Any, stream: Any = None) -> int:
        """Writes the elements of x over this array's and waits for that: one copy. Gives the bytes that were copied.

        x: a tensor in device memory of this dtype and shape (contiguous, or laid out as this array), or bytes-like: the elements in C
        order. stream: the one that x is written in; None: its framework's current one. Writing what was lent for read is refused.
        """
        mine = self._as_source()
        if self._read_only:
            raise _error(_STATE, "the array was lent for read: ask for a result with peer.request() and write into that")
        buffer = _buffer_of(x)
        order = _stream_of(stream, None if buffer is not None else x, self._context.device)
        if buffer is not None:
            self._check_contiguous()
            if len(buffer) != self.nbytes:
                raise _invalid(f"x has {len(buffer)} bytes, and the array {self.nbytes} ({self.dtype}, shape {self.shape})")
            kept = bytes(buffer)  # for its address
            address = ctypes.cast(c_char_p(kept), c_void_p).value or 0
            self._copy("HtoD", mine.pointer, address, len(kept), order)
            return len(kept)
        source = _source(x, order)
        if source.kind != self._kind or source.shape != self.shape:
            raise _invalid(f"x is {source.kind.name} of shape {source.shape}, and the array {self.dtype} of shape {self.shape}")
        if source.strides != self.strides:
            self._check_contiguous()
            if not _is_contiguous(source):
                raise _invalid(f"x is not contiguous (shape {source.shape}, strides {source.strides}): give a contiguous copy of it")
        size = self.nbytes
        if source.covered != size and not _is_contiguous(source):
            raise _invalid("x and the array have holes between their elements: write through .torch() or .cupy() instead")
        self._copy("HtoD" if source.host else "DtoD", mine.pointer, source.pointer, size, order)
        return size

    def _check_contiguous(self) -> None:
        if not _is_contiguous(self._as_source()):
            raise _invalid(f"the array is not contiguous (shape {self.shape}, strides {self.strides}): write through .torch() or .cupy() "
                           "instead")

    def _copy(self, way: str, target: int, source: int, size: int, stream: int) -> None:
        if self._on_host and way == "HtoD":
            ctypes.memmove(self._host, source, size)
        elif self._on_host:
            self._context.driver().copy("DtoH", self._host, source, size, stream)
        else:
            self._context.driver().copy(way, target, source, size, stream)


class _StandIn:
    """The same array as unsigned integers, for consumers that do not know its type."""

    def __init__(self, array: DeviceArray) -> None:
        self._array = array

    def __dlpack_device__(self) -> Tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, **_: Any) -> Any:
        versioned = max_version is not None and max_version[0] >= 1
        return self._array._capsule(_STAND_IN[self._array._kind.bits], versioned, self.__dlpack_device__())


def _is_contiguous(source: _Source) -> bool:
    normal = _contiguous_strides(source.shape)
    return all(step == want for extent, step, want in zip(source.shape, source.strides, normal) if extent > 1) or source.nbytes == 0


def _gather(raw: memoryview, itemsize: int, shape: Sequence[int], strides: Sequence[int], start: int) -> Iterator[memoryview]:
    if not shape:
        yield raw[start:start + itemsize]
        return
    for index in range(shape[0]):
        yield from _gather(raw, itemsize, shape[1:], strides[1:], start + index * strides[0] * itemsize)


def _buffer_of(x: Any) -> Optional[memoryview]:
    """The bytes of a bytes-like object in C order; None for what is none."""
    if isinstance(x, DeviceArray) or hasattr(x, "data_ptr") or hasattr(x, "__cuda_array_interface__"):
        return None
    try:
        view = memoryview(x)
    except (TypeError, BufferError):
        return None
    return view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())


# ---- Parent -------------------------------------------------------------------------------------------------------


class Deny:
    """What a grant function returns to deny a request; the worker gets the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Request(NamedTuple):
    """A worker's wish for a result buffer, as the grant function sees it."""

    peer: Peer
    shape: Tuple[int, ...]
    dtype: str
    nbytes: int
    user: bytes
    onward: bool


_kept: Dict[int, Tuple[Any, Any]] = {}  # (semaphore, tensor) by the semaphore's address, until the library is done with the memory
_lingering: Set[int] = set()  # those of them whose loan has ended
_PROOF_WAIT = 1.0  # seconds: what close() gives the library to prove that workers are gone
_releasing = threading.RLock()  # an address is freed and used again in a moment: who finds it released lets go of it before others look
_libc = ctypes.CDLL(None)
_sem_post = ctypes.cast(_libc.sem_post, c_void_p).value


def _keep(tensor: Any) -> int:
    """Keeps a tensor until the library calls its release function: sem_post, which needs neither Python nor its lock, as the call
    comes from a thread of the library's. Gives the function's argument."""
    semaphore = ctypes.create_string_buffer(64)  # sem_t has 32
    address = ctypes.addressof(semaphore)
    _libc.sem_init(c_void_p(address), 0, c_uint32(0))
    _kept[address] = (semaphore, tensor)
    return address


def _drop_released() -> None:
    """Lets go of the tensors whose memory nobody else can touch any more. Those of a lost worker may take as long as it takes to
    prove that it is gone, also beyond close()."""
    value = c_int()
    over = []  # goes without the lock: tensors may run anything when they do
    with _releasing:
        for address in list(_lingering):
            _libc.sem_getvalue(c_void_p(address), byref(value))
            if value.value:
                _lingering.discard(address)
                over.append(_kept.pop(address, None))


class _LoanBase:
    """What loans of both sides have."""

    def __init__(self, context: _Context, handle: c_void_p) -> None:
        self._context = context
        self._hold = _Hold(context, handle, _lib.gpuloan_loan_unref)

    def report(self) -> Report:
        """What the library knows about the loan: rung, gate, outcome, times of the eight steps, reasons."""
        report = _LoanReport()
        self._context.call(_lib.gpuloan_loan_report_get, self._hold.handle, byref(report))
        return Report(report)


def _told(error: Any, peer: Optional[Peer], what: str, patience: float = 0.2) -> Any:
    """The error with what this side knows better than the library: what the worker forgot, how its process ended."""
    if isinstance(error, LoanError) and error.status == _RETURNED:
        error.args = (f"the worker let go of the {what} without done(): it has to say done() or fail() before, or to use `with` "
                      f"({error})",)
    elif isinstance(error, PeerError) and peer is not None:
        ending = peer._ending(patience)
        if ending and ending not in str(error):
            error.args = (f"{error}; {ending}",)
    return error


class Loan(_LoanBase):
    """A tensor that was lent to a worker, at the parent. `await loan` is as wait(), without blocking the loop.

    The tensor is referenced until the worker has let go of it; do not write it before (a read loan), nor touch it (a write loan).
    """

    def __init__(self, exporter: Exporter, peer: Peer, handle: c_void_p, kept: int) -> None:
        super().__init__(exporter._context, handle)
        self._exporter = exporter
        self._kept = kept
        self.peer = peer
        self._outcome: Optional[Tuple[int, str]] = None  # once it has ended

    @property
    def ended(self) -> bool:
        """True once the worker has let go (RELEASE) or was lost; the outcome is final then."""
        self._context.check_process()
        return self._outcome is not None or bool(self.report().ended)

    def wait(self, timeout: Optional[float] = None) -> None:
        """Waits until the loan has ended: RELEASE. Raises its outcome where that is not good, and Timeout."""
        self._wait(timeout, _lib.gpuloan_loan_wait_end)

    def _wait(self, timeout: Optional[float], function: Any) -> None:
        try:
            self._context.wait(timeout, function, self._hold.handle)
        except (LoanError, PeerError) as error:
            if function is not _lib.gpuloan_loan_wait_done:  # the others return when it has ended
                self._exporter._catch_up(self)
            raise _told(error, self.peer, "loan")

    def wait_done(self, timeout: Optional[float] = None) -> None:
        """Waits for DONE of the current turn: the worker's work is complete, and this process may read what it wrote."""
        self._wait(timeout, _lib.gpuloan_loan_wait_done)

    def ready(self, stream: Any = None) -> None:
        """The next turn of a loan that was lent with keep_open, behind the work now in stream."""
        self._context.call(_lib.gpuloan_loan_ready, self._hold.handle, _stream_of(stream, None, self._context.device))

    def reclaim(self, timeout: Optional[float] = None) -> None:
        """Asks for a keep_open loan back and waits until it is: no further turn comes."""
        self._wait(timeout, _lib.gpuloan_reclaim)

    def cancel(self, reason: str = "") -> None:
        """Ends a loan to a worker that is stuck. Its memory stays referenced until the worker lets go or is proven gone."""
        self._context.call(_lib.gpuloan_loan_cancel, self._hold.handle, _wire(reason, "reason"))

    def __await__(self) -> Any:
        return self._ended().__await__()

    async def _ended(self) -> None:
        await self._exporter._until(lambda: self._outcome is not None or not self._context.alive)
        if self._outcome is not None and isinstance(_error(*self._outcome), PeerError):
            await self.peer._ended()
        self.wait(0)  # raises what the outcome is


class _Grant(_LoanBase):
    """A request that was granted: the worker's loan of `result`, which is handed out when it is complete."""

    def __init__(self, context: _Context, handle: c_void_p, result: DeviceArray, kept: int) -> None:
        super().__init__(context, handle)
        self.result: Optional[DeviceArray] = result
        self._kept = kept
        self.peer, self.user = result.peer, result.user


def _how_it_ended(process: subprocess.Popen[Any]) -> str:
    code = process.poll()
    if code is None:
        return ""
    if code >= 0:
        return f"the worker, process {process.pid}, ended with exit code {code}"
    name = str(-code)
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
    return f"the worker, process {process.pid}, was killed by {name}"


class Peer:
    """A worker, at the parent. process: its Popen where spawn() started it, else None."""

    def __init__(self, exporter: Exporter, handle: int) -> None:
        self._exporter = exporter
        self._context = exporter._context
        self._hold = _Hold(self._context, handle, _lib.gpuloan_peer_close)
        self.process: Optional[subprocess.Popen[Any]] = None
        self._lost: Optional[str] = None
        self._waited = False  # for the process' end
        self._wait_until = 0.0

    @property
    def lost(self) -> Optional[str]:
        """The reason, once the connection is over; else None."""
        self._context.check_process()
        ending = self._ending(0) if self._lost else ""
        return f"{self._lost}; {ending}" if ending else self._lost

    def _ending(self, patience: float) -> str:
        """How the process ended that spawn() started; "" where it goes on, is not known, or its connection was closed by us. It may be
        seen a little later than the end of its socket, so it is waited for once."""
        process = self.process
        if process is None or self._hold.handle is None:
            return ""
        end = time.monotonic() + (0 if self._waited else patience)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        self._waited = self._waited or patience > 0
        return _how_it_ended(process)

    async def _ended(self) -> None:
        """The same wait for those on an asyncio loop."""
        import asyncio

        self._wait_until = self._wait_until or time.monotonic() + 0.2  # of the first who waits: others may be cancelled and come again
        while self.process is not None and not self._waited and self.process.poll() is None and time.monotonic() < self._wait_until:
            await asyncio.sleep(0.01)
        self._waited = True

    def info(self) -> Any:
        """The attributes of gpuloan_peer_info."""
        self._check_open()
        info = _PeerInfo()
        self._context.call(_lib.gpuloan_peer_info_get, self._hold.handle, byref(info))
        names = ("vmm_canary", "ipc_canary", "pool_canary", "foreign_vmm_canary", "host_canary")
        return _Fields(info, {name: Canary for name in names})

    @property
    def pid(self) -> int:
        return int(self.info().pid)

    def _check_open(self) -> None:
        self._context.check_process()
        if self._hold.handle is None:
            raise _error(_STATE, "this worker's connection was closed by close(): spawn() another")

    def empty(self, shape: Any, dtype: Any, *, access: Any = "read", memory: Any = None, alignment: int = 0) -> DeviceArray:
        """Memory of the arena, of this worker's part, to fill and to lend() to it without a copy: for parents without a framework.

        shape: a sequence of integers, or one of them; the array is contiguous (C order) and its bytes are undefined. dtype: a name, or a
        framework's dtype. access: of the loans it is made for; what is made for "write" can be lent for read as well. memory: "host"
        for memory of the CPU (always so without a device): .host is a memoryview of its bytes. alignment: bytes, a power of two up to
        2 MiB; 0: 256. Write with copy_from(bytes), .host or a framework's view, before it is lent.

        The array owns the memory: it goes back to the arena with the last reference, once no loan of it is out, also when the worker
        is gone. Raises LIMIT and DEVICE_MEMORY as a request of the worker's would.
        """
        self._check_open()
        context = self._context
        layout = _wanted(shape, dtype)
        wanted = _number(Memory, memory, "memory") if context.device_wanted else Memory.HOST
        options = _RegionOptions(bytes=layout.nbytes, alignment=_whole(alignment, "alignment"),
                                 access=_number(Access, access, "access"), memory=wanted)
        region = c_void_p()
        context.call(_lib.gpuloan_region_create, self._hold.handle, byref(options), byref(region))
        return context.array_of(region, layout, wanted == Memory.HOST)

    def lend(self, tensor: Any, access: Any = "read", *, stream: Any = None, policy: Any = "best", rungs: Any = None, gate: Any = None,
             keep_open: bool = False, memory: Any = None, user: bytes = b"", exclusive: bool = False) -> Loan:
        """Lends a tensor in device memory; the worker gets it with its dtype, shape and strides.

        tensor: anything with data_ptr, __cuda_array_interface__ or __dlpack__, also a DeviceArray. It is referenced until the loan is
            released. A view lends the smallest range of bytes that covers it; for write it has to fill that, without overlaps.
        access: "read", or "write" (in place). stream: what it is written in; None: its framework's current stream. The worker is let in
            behind the work that is in it now.
        policy: "best", or "zero_copy": an error instead of a copy. rungs, gate: restrict what carries and orders the loan.
        keep_open: more turns follow by ready(), until reclaim(). memory: "host" where the worker wants host memory.
        user: bytes for the worker, with shape and strides at most 4096. exclusive: for a result of another worker's: that one unmaps it.

        The first loan of a kind to a worker waits for a proof that it arrives intact, about 2 s at most.
        """
        self._check_open()
        wanted = _number(Access, access, "access")
        order = _stream_of(stream, tensor, self._context.device)
        source = _source(tensor, order)
        if source.host and tensor._context is not self._context:
            raise _invalid("the array is in host memory of another parent's, and only device memory and this parent's own is lent: copy it "
                           "into an array of empty()")
        if source.host and stream is None:
            order = STREAM_CPU
        _check_layout(source, wanted)
        metadata = _pack(_Layout(source.kind, source.shape, source.strides, 0, _user_bytes(user)))
        exporter = self._exporter
        exporter._tidy()
        options = _LendOptions(access=wanted, policy=_policy(policy), rungs=_rung_mask(rungs), gate=_number(Gate, gate, "gate"),
                               memory=_number(Memory, memory, "memory"), keep_open=keep_open, stream=order, metadata=metadata,
                               metadata_bytes=len(metadata), release=_sem_post, exclusive=exclusive)
        address = _keep(source.keep)
        options.release_user = address
        handle = c_void_p()
        covered = source.covered
        call = (_lib.gpuloan_lend, self._hold.handle, source.pointer if covered else 0, covered, byref(options), byref(handle))
        try:
            try:
                self._context.call(*call)
            except CallError as error:
                if error.status != _BUSY:
                    raise
                exporter._await_ends()  # it may be a result, which its worker is letting go of just now
                self._context.call(*call)
        except BaseException as error:
            _kept.pop(address, None)
            raise _told(error, self, "loan")
        loan = Loan(exporter, self, handle, address)
        exporter._register(handle, loan)
        return loan

    def close(self) -> None:
        """Ends the connection; open loans end as for a lost worker. Results that came and were not taken wait for next_result(peer)."""
        self._exporter._lose(self, "the connection was closed by this process")
        self._hold.close()


class _Attach:
    """An end of a socketpair whose worker has not shaken hands yet."""

    def __init__(self, number: int, account: str, process: Optional[subprocess.Popen[Any]]) -> None:
        self.account, self.process = account, process
        self.answer: Union[Peer, Error, None] = None
        try:
            self._end = os.dup(number)  # the library closes the other one
        except OSError as error:
            raise _invalid(f"descriptor {number} cannot be taken: {error.strerror}") from None

    def over(self) -> bool:
        """Whether the connection has ended. Of one that was refused it has before its event comes, which does not say whose it is."""
        poll = select.poll()
        poll.register(self._end, 0)
        return bool(poll.poll(0))

    def hang_up(self) -> None:
        """Ends the connection, whoever else has the worker's end, and so makes its event come."""
        with contextlib.suppress(OSError), socket.fromfd(self._end, socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._end >= 0:
            os.close(self._end)
        self._end = -1


def _descends(pid: int, ancestor: int) -> bool:
    """Whether the process is the other one or was started by it, as by a shell or a launcher."""
    while pid > 1 and pid != ancestor:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return pid == ancestor


class Exporter:
    """The parent: lends tensors to workers and lets them write results into memory of its own. A context manager.

    device: ordinal in this process; None: the thread's current CUDA context, else device 0; -1: no device, host memory only.
    driver: "real", "sim", a path, or None: GPULOAN_DRIVER, else the real one. rungs ("vmm", "ipc", "host", "pool"; several as a list), gate
    ("memop", "event", "host"), engine: restrict what is used. slots: loans out at once per worker. idle_bytes, account_bytes,
    pool_import_limit, and gpu_wait_limit, canary_timeout_ms in `options`: as in gpuloan_context_options.
    grant: None, or a function that answers a worker's Request: None (memory of the arena), a tensor of this process' own with that dtype
    and shape, or Deny(reason). It runs on the thread that takes events, a Python thread of this object's, or on the asyncio loop that
    awaits something; it must not wait for a worker, and earlier work on a tensor that it grants has to be complete.
    """

    def __init__(self, device: Optional[int] = None, driver: Optional[str] = None, rungs: Any = None, gate: Any = None, engine: Any = None,
                 slots: int = 0, idle_bytes: int = 0, account_bytes: int = 0, pool_import_limit: int = 0, **options: int) -> None:
        numbers = dict(options, slots=slots, idle_bytes=idle_bytes, account_bytes=account_bytes, pool_import_limit=pool_import_limit)
        self._context = _Context(Role.EXPORTER, device, driver, rungs, gate, engine, numbers)
        self.grant: Optional[Callable[[Request], Any]] = None
        self._peers: Dict[int, Peer] = {}
        self._loans: Dict[int, Union[Loan, _Grant]] = {}  # until they have ended
        self._ended: Set[int] = set()  # of _lingering, what was lent here
        self._early: Dict[int, List[Tuple[int, int, str]]] = {}  # events of loans that lend() has not registered yet
        self._last_lost: Optional[Peer] = None
        self._attaches: List[_Attach] = []
        self._listens = False
        self._new_peers: Deque[Union[Peer, Error]] = collections.deque()
        self._results: Deque[Tuple[Optional[Peer], Union[DeviceArray, BaseException]]] = collections.deque()
        self._processes: List[subprocess.Popen[Any]] = []
        self._futures: List[Tuple[Any, Any]] = []  # (loop, future) of what is awaited
        self._loops: Dict[Any, int] = {}  # how many awaits run on each loop
        self._reader: Any = None  # the loop that takes events; the thread does when it is None
        self._stopping = False
        self._fd = self.fileno()
        self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="gpuloan", daemon=True)
        _closers.add(self)
        self._thread_over = self._wake_left = False  # whether it has ended, and is to close its descriptors itself
        self._thread.start()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(_INTERRUPTED if _is_interrupt(kind) else 5.0)

    def close(self, timeout: float = 5.0) -> None:
        """Ends all connections and frees the arena: arrays of results cannot be used any more. Workers that spawn() started have
        `timeout` seconds to end by themselves, then they are killed; a `with` block that Ctrl-C ends gives them a tenth of a second.
        Tensors that are still lent stay referenced until their workers are proven gone: close() waits a second at most for that, and
        what is left then goes with a later use of this module. Closing twice is fine, and so is closing in a signal handler: what it
        interrupted raises."""
        if threading.current_thread() is self._thread:
            raise _error(_STATE, "the parent cannot be closed by its grant function")
        context = self._context
        inside = context.inside()
        if context.pid == os.getpid() and context.alive:
            with context.changed:
                self._stopping = True
                context.changed.notify_all()
                self._wake_left = inside and not self._thread_over
            os.write(self._wake[1], b"x")
            if not inside:  # else it may want what this thread has
                self._thread.join()
            for peer in list(self._peers.values()):
                peer.close()  # which tells the worker that this is in order
        if not context.close():
            return
        if not self._wake_left:
            self._close_wake()
        if context.pid != os.getpid():
            return
        with context.lock:
            lent = self._ended | {one._kept for one in self._loans.values() if one._kept}
            _lingering.update(lent)
            self._loans.clear()
            self._early.clear()
            self._peers.clear()
            self._results.clear()
            while self._attaches:
                self._attaches.pop().close()
        self._notify()
        end = time.monotonic() + timeout
        try:
            while any(process.poll() is None for process in self._processes) and time.monotonic() < end:
                time.sleep(0.005)
        finally:
            for process in self._processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            end = time.monotonic() + _PROOF_WAIT
            _drop_released()
            while not lent.isdisjoint(_lingering) and time.monotonic() < end:
                time.sleep(0.005)
                _drop_released()

    def _close_wake(self) -> None:
        for descriptor in self._wake:
            os.close(descriptor)

    def fileno(self) -> int:
        """A descriptor that is readable while an event waits to be taken."""
        return int(self._context.value(_lib.gpuloan_context_fd, self._context.handle))

    def stats(self) -> Any:
        """The attributes of gpuloan_stats."""
        stats = _Stats()
        self._context.call(_lib.gpuloan_context_stats, self._context.handle, byref(stats))
        return _Fields(stats, {"engine": Engine})

    # Workers.

    def spawn(self, args: Sequence[str], env: Optional[Mapping[str, str]] = None, account: str = "",
              timeout: Optional[float] = 30.0, **popen: Any) -> Peer:
        """Starts a worker, which calls gpuloan.worker(), and waits for its handshake. GPULOAN_FD in its environment names its end of a
        socketpair. env: instead of this process' environment. account: whom its memory is charged to. popen: for subprocess.Popen.
        The process is the peer's .process; it is killed where the handshake fails."""
        self._context.check_process()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            environment = dict(os.environ if env is None else env, GPULOAN_FD=str(theirs.fileno()))
            passed = tuple(popen.pop("pass_fds", ())) + (theirs.fileno(),)
            process = subprocess.Popen(args, env=environment, pass_fds=passed, **popen)
            theirs.close()
            try:
                peer = self._attach(ours, account, timeout, process)
            except BaseException:
                process.kill()
                with process:  # closes its pipes, and waits
                    raise
        self._processes = [one for one in self._processes if one.poll() is None] + [process]
        return peer

    def attach(self, end: Any, account: str = "", timeout: Optional[float] = 30.0) -> Optional[Peer]:
        """Takes its end of a SOCK_SEQPACKET socketpair (a descriptor or a socket, which are the parent's from then on), whose other end a
        worker inherits, and waits for the handshake. With a timeout of 0 it does not wait: next_peer() gives the peer."""
        number = self._number_of(end)
        if timeout == 0:
            self._take_end(end, number, account)
            return None
        return self._attach(end, account, timeout, None)

    @staticmethod
    def _number_of(end: Any) -> int:
        if not isinstance(end, int) and not hasattr(end, "fileno"):
            raise _invalid(f"end is {end!r}, and has to be a socket or its descriptor")
        return int(end if isinstance(end, int) else end.fileno())

    def _take_end(self, end: Any, number: int, account: str) -> None:
        self._context.call(_lib.gpuloan_context_attach, self._context.handle, number, _wire(account, "account"))
        if not isinstance(end, int):
            end.detach()

    def _attach(self, end: Any, account: str, timeout: Optional[float], process: Optional[subprocess.Popen[Any]]) -> Peer:
        number = self._number_of(end)
        attach = _Attach(number, account, process)

        def answer() -> Union[Peer, Error, None]:
            if attach.answer is None and process is not None and process.poll() is not None:
                attach.hang_up()
            return attach.answer

        try:
            with self._context.lock:  # its event may come at once
                self._take_end(end, number, account)
                self._attaches.append(attach)
            found = self._wait(answer, timeout, "the worker's handshake: it has to call gpuloan.worker()")
        except BaseException:
            with self._context.lock:
                if process is not None and attach in self._attaches:
                    attach.hang_up()  # it waits for its event, which would be taken for another's else
                else:
                    self._settle(attach, None)
            raise
        if isinstance(found, Error):
            if process is not None:  # its end may be seen a little later than that of its socket
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
                if process.returncode is not None:
                    found = _error(found.status, f"{_how_it_ended(process)} before its handshake was over: {found}. "
                                   "What it wrote to stderr says why; it has to import gpuloan (PYTHONPATH, GPULOAN_LIBRARY, also where "
                                   "env= is given) and to call gpuloan.worker()")
            raise found
        assert isinstance(found, Peer)
        return found

    def _settle(self, attach: _Attach, answer: Union[Peer, Error, None]) -> None:
        """With the lock held."""
        if attach in self._attaches:
            self._attaches.remove(attach)
        attach.close()
        attach.answer = answer

    def listen(self, path: str) -> None:
        """Listens at a socket path (mode 0600) for workers that come with a key of invite(): gpuloan.connect(path, key)."""
        with self._context.lock:  # whoever connects at once is welcomed after it is set
            self._context.call(_lib.gpuloan_context_listen, self._context.handle, os.fsencode(path))
            self._listens = True

    def invite(self, account: str = "") -> str:
        """A key for one start of a worker, 64 hexadecimal digits. Pass it by a descriptor or a private file, never in argv."""
        key, text = _Key(), (c_char * 65)()
        self._context.call(_lib.gpuloan_context_invite, self._context.handle, _wire(account, "account"), byref(key))
        _lib.gpuloan_key_format(byref(key), text)
        return text.value.decode()

    def next_peer(self, timeout: Optional[float] = None) -> Peer:
        """The next worker that connected; raises the reason where a connection was refused."""
        found = self._wait(lambda: self._new_peers.popleft() if self._new_peers else None, timeout, "a worker")
        if isinstance(found, Error):
            raise found
        assert isinstance(found, Peer)
        return found

    # Results.

    def next_result(self, timeout: Optional[float] = None, peer: Optional[Peer] = None) -> DeviceArray:
        """The next result that is complete, of `peer` or of any worker: memory of this process', as long as it is referenced.

        It has .peer, .user and .report. Results come as they are seen to be complete, which is not always the order in which a worker
        finished them. Raises LoanError when a worker failed or returned what it asked for, PeerError when it was lost
        or no worker is left (both with .peer and .user), what the grant function raised or granted in vain, and Timeout. A request that
        was denied is the worker's to hear of, and is not raised here.
        """
        return self._give(self._wait(lambda: self._find_result(peer), timeout, "a result"))

    async def result(self, peer: Optional[Peer] = None) -> DeviceArray:
        """As next_result(), on the running asyncio loop."""
        while True:
            found = await self._until(lambda: self._find_result(peer, take=False))
            if isinstance(found, PeerError) and found.peer is not None:
                await found.peer._ended()  # so long it is not taken: who is cancelled here leaves it to the next one
            with self._context.lock:
                found = self._find_result(peer)
            if found is not None:
                return self._give(found)

    def _find_result(self, peer: Optional[Peer], take: bool = True) -> Any:
        for index, (owner, value) in enumerate(self._results):
            if peer is None or owner is peer:
                if take:
                    del self._results[index]
                return value
        pending = any(isinstance(one, _Grant) and peer in (None, one.peer) for one in self._loans.values())
        if pending or not self._context.alive:
            return None
        if peer is not None and peer._lost is not None:
            return _about(_error(_PEER_LOST, f"no result will come: {peer._lost}"), peer, b"")
        if peer is None and not self._peers and not self._attaches and not self._listens:
            if self._last_lost is None:
                return _error(_PEER_LOST, "no result will come: there is no worker (spawn() or attach() one)")
            return _about(_error(_PEER_LOST, f"no result will come: no worker is left ({self._last_lost._lost})"), self._last_lost, b"")
        return None

    @staticmethod
    def _give(found: Union[DeviceArray, BaseException]) -> DeviceArray:
        try:
            if isinstance(found, BaseException):
                raise _told(found, found.peer if isinstance(found, Error) else None, "result")
            return found
        finally:
            del found  # else the error's traceback would keep the error

    # Events: taken by the thread, or by an asyncio loop while something is awaited there.

    def _run(self) -> None:
        try:
            self._take_events()
        finally:
            with self._context.lock:
                self._thread_over = True
                if self._wake_left:
                    self._close_wake()

    def _take_events(self) -> None:
        context = self._context
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._wake[0], select.POLLIN)
        while True:
            with context.changed:
                while self._reads() and not self._stopping:
                    context.changed.wait(_SLICE_MS / 1000)
                if self._stopping:
                    return
                sleeps = None if self._reader is None else _SLICE_MS
            poll.poll(50 if _lingering or context.has_busy() else sleeps)
            if self._reads():
                continue
            try:
                self._drain()
                self._tidy()
            except Error:
                return  # closed, or the descriptors of a process that runs out of them: calls say so

    def _tidy(self) -> None:
        if _lingering or self._ended:
            _drop_released()
            with self._context.lock:
                self._ended &= _lingering
        self._context.drop_busy()

    def _drain(self) -> None:
        """Takes and handles every event that is there."""
        handled = False
        try:
            with self._context.events:
                event = self._context.next_event(0)
                while event is not None:
                    handled = True
                    self._handle(event)
                    event = self._context.next_event(0)
        finally:
            if handled:
                self._notify()

    def _reads(self) -> bool:
        """Whether an asyncio loop takes the events. One that was stopped or closed with something awaited there does not, and says so to
        nobody: the thread looks now and then."""
        loop = self._reader
        return loop is not None and bool(loop.is_running())

    def _notify(self) -> None:
        with self._context.changed:
            self._context.changed.notify_all()
            futures, self._futures = self._futures, []
        for loop, future in futures:
            with contextlib.suppress(RuntimeError):  # a loop that was closed meanwhile
                loop.call_soon_threadsafe(_resolve, future)

    def _wait(self, ready: Callable[[], Any], timeout: Optional[float], what: str) -> Any:
        """Waits until ready() gives something. Where the thread does not take events, this does."""
        deadline = _Deadline(timeout)
        context = self._context
        context.check_process()
        while True:
            with context.changed:
                found = ready()
                if found is not None:
                    return found
                if not context.alive:
                    raise _error(_STATE, "the parent was closed")
                if deadline.passed():
                    raise _error(_TIMEOUT, f"{timeout} s passed without {what}")
                if self._reader is None and threading.current_thread() is not self._thread:
                    context.changed.wait(deadline.left())
                    continue
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            poll.poll(deadline.left() * 1000)
            self._drain()

    def _await_ends(self) -> None:
        """Until the loans have ended of which the results were handed out, or for a second."""
        def over() -> Optional[bool]:
            return not any(isinstance(one, _Grant) and one.result is None for one in self._loans.values()) or None

        with contextlib.suppress(Timeout):
            self._wait(over, 1.0, "the ends of results")

    def _catch_up(self, loan: Loan) -> None:
        """Until the end of the loan was handled here too, and with it what ended before: requests of a job that failed, say."""
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(Error):
                self._wait(lambda: loan._outcome, 1.0, "its event")

    async def _until(self, ready: Callable[[], Any]) -> Any:
        import asyncio

        loop = asyncio.get_running_loop()
        context = self._context
        context.check_process()
        with context.lock:
            self._loops[loop] = self._loops.get(loop, 0) + 1
            if self._reader is None and context.alive:
                self._reader = loop
                loop.add_reader(self._fd, self._drain)
        future = None
        try:
            while True:
                with context.lock:
                    found = ready()
                    if found is not None and found is not False:
                        return found
                    if not context.alive:
                        raise _error(_STATE, "the parent was closed")
                    future = loop.create_future()
                    self._futures.append((loop, future))
                await future
        finally:
            with context.changed:
                self._futures = [one for one in self._futures if one[1] is not future]
                self._loops[loop] -= 1
                if not self._loops[loop]:
                    del self._loops[loop]
                    if self._reader is loop:
                        self._reader = None  # the thread goes on
                        context.changed.notify_all()
                        with contextlib.suppress(RuntimeError):  # closed, with this awaited
                            loop.remove_reader(self._fd)

    def _handle(self, event: _EventStruct) -> None:
        text = _text(event.text)
        if event.type == _Event.PEER_READY:
            self._welcome(Peer(self, event.peer))
        elif event.type == _Event.PEER_LOST:
            peer = self._peers.get(event.peer)
            if peer is not None:
                self._lose(peer, text or "the worker is gone")
        elif event.type == _Event.PEER_REFUSED:
            error = _error(event.status, text)
            with self._context.lock:
                attach = next((one for one in self._attaches if one.over()), None)
                if attach is None:
                    self._new_peers.append(error)
                else:
                    self._settle(attach, error)
        elif event.type == _Event.REQUEST:
            self._answer(event.peer, event.request)
        elif event.type in (_Event.LOAN_DONE, _Event.LOAN_ENDED):
            with self._context.lock:
                loan = self._loans.get(event.loan)
                if loan is None:
                    self._early.setdefault(event.loan, []).append((event.type, event.status, text))
                    return
            self._loan_event(event.loan, loan, event.type, event.status, text)

    def _welcome(self, peer: Peer) -> None:
        info = peer.info()
        with self._context.lock:
            self._peers[peer._hold.handle] = peer
            mine = sorted((one for one in self._attaches if one.account == info.account), key=_Attach.over)
            exact = [one for one in mine if one.process is not None and _descends(info.pid, one.process.pid)]
            others = [one for one in mine if one.process is None or info.pid == 0 or not self._listens]
            if exact or others:
                attach = (exact or others)[0]
                peer.process = attach.process
                self._settle(attach, peer)
            else:
                self._new_peers.append(peer)

    def _lose(self, peer: Peer, reason: str) -> None:
        with self._context.lock:
            peer._lost = peer._lost or reason
            self._last_lost = peer
            self._peers.pop(peer._hold.handle, None)
            if peer in self._new_peers:
                self._new_peers.remove(peer)

    def _register(self, handle: c_void_p, loan: Union[Loan, _Grant]) -> None:
        number = int(handle.value or 0)
        with self._context.lock:
            self._loans[number] = loan
            early = self._early.pop(number, [])
        for one in early:
            self._loan_event(number, loan, *one)

    def _loan_event(self, handle: int, loan: Union[Loan, _Grant], kind: int, status: int, text: str) -> None:
        context = self._context
        with context.lock:
            if isinstance(loan, _Grant) and loan.result is not None and loan.peer is not None:
                value: Any = loan.result
                if status:
                    value = _about(_error(status, text), loan.peer, loan.user)
                self._results.append((loan.peer, value))
                loan.result = None
            if kind == _Event.LOAN_DONE:
                return
            self._loans.pop(handle, None)
            if loan._kept:
                _lingering.add(loan._kept)
                self._ended.add(loan._kept)
        if isinstance(loan, Loan):
            loan._outcome = (status, text)
        self._tidy()

    def _answer(self, peer_handle: int, request: int) -> None:
        """Grants or denies a request."""
        context = self._context
        peer = self._peers.get(peer_handle)
        info = _RequestInfo()
        user = b""
        decided = False
        try:
            context.call(_lib.gpuloan_request_info_get, request, byref(info))
            if peer is None:
                raise _error(_PEER_LOST, "the worker is gone")
            layout = _unpack(ctypes.string_at(info.metadata, info.metadata_bytes) if info.metadata_bytes else b"", info.bytes)
            user = layout.user
            decision = None
            if self.grant is not None:
                decided = True
                decision = self.grant(Request(peer, layout.shape, layout.kind.name, info.bytes, user, bool(info.onward)))
            if isinstance(decision, Deny):
                context.call(_lib.gpuloan_request_deny, request, _wire(decision.reason, "the reason of Deny"))
            elif decision is None:
                decided = False
                self._grant_region(peer, request, layout)
            else:
                self._grant_tensor(peer, request, layout, decision)
        except BaseException as error:  # told to the worker, which asked; next_result raises what the grant function did wrong
            context.status(_lib.gpuloan_request_deny, request, _wire(_words(error) or type(error).__name__, "the reason"))
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is not self._thread:
                raise  # Ctrl-C, on an asyncio loop
            if decided:
                with context.lock:
                    self._results.append((peer, _about(error, peer, user)))

    def _grant_region(self, peer: Peer, request: int, layout: _Layout) -> None:
        context = self._context
        region, handle = c_void_p(), c_void_p()
        context.call(_lib.gpuloan_request_grant, request, None, byref(region), byref(handle))
        self._granted(peer, handle, context.array_of(region, layout, not context.device_wanted), 0)

    def _grant_tensor(self, peer: Peer, request: int, layout: _Layout, tensor: Any) -> None:
        context = self._context
        order = _stream_of(None, tensor, context.device)
        source = _source(tensor, order)
        if source.kind != layout.kind or source.shape != layout.shape or source.host:
            raise _invalid(f"the tensor that was granted is {source.kind.name} of shape {source.shape}, and the request was for "
                           f"{layout.kind.name} of shape {layout.shape}, in device memory")
        _check_layout(source, Access.WRITE)
        layout = layout._replace(strides=source.strides, offset=0)
        metadata = _pack(layout)
        address = _keep(source.keep)
        options = _LendOptions(access=Access.WRITE, stream=order, metadata=metadata, metadata_bytes=len(metadata), release=_sem_post,
                               release_user=address)
        handle = c_void_p()
        try:
            context.call(_lib.gpuloan_request_grant_with, request, source.pointer, byref(options), byref(handle))
        except BaseException:
            _kept.pop(address, None)
            raise
        self._granted(peer, handle, DeviceArray(context, source.keep, layout, source.pointer, 0, False, False), address)

    def _granted(self, peer: Peer, handle: c_void_p, result: DeviceArray, kept: int) -> None:
        result.peer = peer
        grant = _Grant(self._context, handle, result, kept)
        result._loan = grant
        self._register(handle, grant)


def _about(error: Any, peer: Optional[Peer], user: bytes) -> Any:
    if isinstance(error, Error):
        error.peer, error.user = peer, user
    return error


def _resolve(future: Any) -> None:
    if not future.done():
        future.set_result(None)


# ---- Worker -------------------------------------------------------------------------------------------------------


_IN_ORDER = "the exporter closed the connection"  # the library's text when the parent did not die, but said so


class Borrowed(_LoanBase):
    """A tensor that the parent lent, at the worker. `with loan as tensor:` says done at the end, and fail on an exception.

    It is returned with its last reference, those of arrays and DLPack consumers included, where neither was said.
    """

    def __init__(self, worker: Worker, handle: c_void_p) -> None:
        super().__init__(worker._context, handle)
        self._worker = worker
        self._array: Optional[DeviceArray] = None
        self._user: Optional[bytes] = None
        self._over_by = ""  # what ended the last turn

    def _acquire(self, timeout: Optional[float]) -> DeviceArray:
        view = _View()
        self._context.wait(timeout, _lib.gpuloan_loan_acquire, self._hold.handle, last=(byref(view),))
        metadata = ctypes.string_at(view.metadata, view.metadata_bytes) if view.metadata_bytes else b""
        layout = _unpack(metadata, view.bytes)
        self._hold.turn = view.turn
        self._worker._hold_open(self._hold)
        self._user = layout.user
        self._array = DeviceArray(self._context, self._hold, layout, view.pointer, view.host or 0, view.access == Access.READ,
                                  bool(view.host))
        return self._array

    @property
    def tensor(self) -> DeviceArray:
        """The array, until done(). The first use waits for the parent's work and maps the memory; after done() of a keep_open loan it
        waits for the next turn. Raises the loan's outcome if it ended, and PeerError when the parent is gone."""
        self._context.check_process()
        return self._array or self._acquire(None)

    def next_turn(self, timeout: Optional[float] = None) -> Optional[DeviceArray]:
        """The next turn of a keep_open loan, after done(); None when the parent has asked for it back. Raises Timeout."""
        try:
            return self._acquire(timeout)
        except CallError as error:
            if error.status == _STATE:
                return None
            raise

    @property
    def user(self) -> bytes:
        """The bytes that came with it (acquires)."""
        self._context.check_process()
        if self._user is None:
            self._acquire(None)
        return self._user or b""

    def done(self, stream: Any = None) -> None:
        """Gives it back behind the work now in `stream` (None: the framework's current one, else the legacy default stream); the
        memory must not be used any more. Does not wait. An error when it was not acquired, or is done already."""
        self._check_not_over()
        order = _stream_of(stream, None, self._context.device)
        if stream is None and order == STREAM_LEGACY and self._array is not None and self._array._on_host and not self._array._pointer:
            order = STREAM_CPU or 0
        self._context.call(_lib.gpuloan_loan_done, self._hold.handle, order)
        self._over_by = "done"
        self._over()

    def _check_not_over(self) -> None:
        self._context.check_process()
        if self._over_by and self._hold.turn == 0:
            raise _error(_STATE, f"{self._over_by}() was said of this loan already")

    def fail(self, reason: str = "") -> None:
        """Gives it back and tells the parent that the work failed, and why. An error when done() or fail() was said already."""
        self._check_not_over()
        self._context.call(_lib.gpuloan_loan_fail, self._hold.handle, _wire(reason, "reason"))
        self._over_by = self._over_by or "fail"
        self._over()

    def _over(self) -> None:
        self._array = None
        self._hold.turn = 0
        self._worker._drain()

    def __enter__(self) -> DeviceArray:
        return self.tensor

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if self._array is None:
            return  # the block has said done or fail by itself
        if kind is None:
            self.done()
        else:
            with contextlib.suppress(Error):  # the block's own exception matters more
                self.fail(f"{kind.__name__}: {_words(error)}"[:_TEXT_MAX - 1])


class Result(Borrowed):
    """Memory of the parent's that the worker writes a result into. `.tensor` is the array, done() hands it over."""

    def copy_from(self, x: Any, stream: Any = None) -> int:
        """One copy of a tensor or of bytes into the result (DeviceArray.copy_from); gives the bytes that were copied."""
        return self.tensor.copy_from(x, stream)


class Worker:
    """A worker's connection to its parent. A context manager; iterating gives the loans until the parent is gone."""

    def __init__(self, timeout: Optional[float], device: Optional[int], driver: Optional[str], options: Dict[str, Any]) -> None:
        rungs, gate, engine = (options.pop(name, None) for name in ("rungs", "gate", "engine"))
        self._context = _Context(Role.IMPORTER, device, driver, rungs, gate, engine, options)
        self._offered: Deque[Borrowed] = collections.deque()
        self._lost: Optional[Tuple[int, str]] = None
        self._timeout = timeout
        self._hold: Optional[_Hold] = None
        self._sweep_at = 0.0
        self._open: weakref.WeakSet[_Hold] = weakref.WeakSet()  # what was acquired, and whose turn may not be over
        _closers.add(self)

    def _connect(self, function: Any, *arguments: Any) -> Worker:
        handle = c_void_p()
        try:
            self._context.interruptible(function, self._context.handle, *arguments, _milliseconds(self._timeout), byref(handle))
        except BaseException:
            self._context.close()
            raise
        self._hold = _Hold(self._context, handle, _lib.gpuloan_peer_close)
        return self

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection: open loans go back to the parent, which is told so, and arrays cannot be used any more. Waits a second
        at most until the GPU work on what was done, failed or goes back now has ended. Closing twice is fine."""
        if self._context.pid == os.getpid():
            for hold in self._unfinished():
                with contextlib.suppress(Error):
                    self._context.call(_lib.gpuloan_loan_return, hold.handle)
        self._context.close()

    def _hold_open(self, hold: _Hold) -> None:
        with self._context.lock:
            self._open.add(hold)

    def _unfinished(self) -> List[_Hold]:
        """Those of the loans that were acquired of which neither done nor fail was said."""
        with self._context.lock:
            found = [hold for hold in self._open if hold.turn]
            self._open = weakref.WeakSet(found)
        return found

    def __iter__(self) -> Iterator[Borrowed]:
        yield from iter(self.next_loan, None)  # a loop with a variable would keep each loan until the next one comes

    def _drain(self) -> None:
        """What there is, unless another thread takes the events just now."""
        while self._take(0):
            pass

    def _take(self, timeout_ms: int) -> bool:
        """One event, of this thread or of another that takes them meanwhile; False: none came."""
        if not self._context.events.acquire(timeout=timeout_ms / 1000):
            return False
        try:
            event = self._context.next_event(timeout_ms)
            if event is None:
                return False
            if event.type == _Event.LOAN_OFFERED:
                self._offered.append(Borrowed(self, c_void_p(event.loan)))
            elif event.type == _Event.PEER_LOST:
                text = _text(event.text)
                self._lost = (0 if text.startswith(_IN_ORDER) else event.status, text)
            return True
        finally:
            self._context.events.release()

    def next_loan(self, timeout: Optional[float] = None) -> Optional[Borrowed]:
        """The next loan; None when the parent closed the connection in order. Raises PeerError when it was lost, and Timeout."""
        deadline = _Deadline(timeout)
        swept = False
        while True:
            self._drain()
            with contextlib.suppress(IndexError):
                return self._offered.popleft()
            if self._lost is not None:
                if self._lost[0] == 0:
                    return None
                raise _error(*self._lost)
            if deadline.passed():
                raise _error(_TIMEOUT, f"{timeout} s passed without a loan of the parent's")
            if not self._take(deadline.slice()) and not swept:
                swept = self._sweep()

    def _sweep(self) -> bool:
        """Collects garbage, while we wait anyway: the parent may wait for a loan that was forgotten in a reference cycle (an exception's
        traceback makes one). A twentieth of the time at most."""
        start = time.monotonic()
        if start < self._sweep_at or not gc.isenabled() or not self._unfinished():
            return False
        gc.collect()
        end = time.monotonic()
        self._sweep_at = end + max(1.0, 20 * (end - start))
        return True

    def request(self, shape: Any, dtype: Any, *, timeout: Optional[float] = 30.0, user: bytes = b"", onward: bool = False,
                alignment: int = 0, memory: Any = None) -> Result:
        """Asks the parent for memory to write a result into, and waits for it.

        shape: of the result, which is contiguous (an integer: one dimension). dtype: a name, or a framework's dtype. user: bytes for the
        parent, with the shape at most 4096. onward: the parent will lend it on to others, without a copy. alignment: bytes, a power of
        two up to 2 MiB; 0: 256. memory: "host" to see it as memory of the CPU; the parent's result is device memory where it has a
        device. Raises LoanError when it was denied, with the parent's reason.
        """
        layout = _wanted(shape, dtype, _user_bytes(user))
        metadata = _pack(layout)
        options = _RequestOptions(bytes=layout.nbytes, alignment=_whole(alignment, "alignment"), onward=onward,
                                  memory=_number(Memory, memory, "memory"), metadata=metadata, metadata_bytes=len(metadata))
        if self._hold is None:
            raise _error(_STATE, "the worker is not connected")
        handle = c_void_p()
        self._context.call(_lib.gpuloan_request_send, self._hold.handle, byref(options), byref(handle))
        result = Result(self, handle)
        result._acquire(timeout)
        self._drain()
        return result


def worker(timeout: Optional[float] = 30.0, device: Optional[int] = None, driver: Optional[str] = None, **options: Any) -> Worker:
    """Connects to the parent that started this process with spawn(), over the descriptor that GPULOAN_FD names.

    timeout: of the handshake. device: ordinal in this process; None: the thread's current CUDA context, else device 0; -1: no device,
    host memory only. driver: as for Exporter. options: rungs, gate, gpu_wait_limit, canary_timeout_ms ... as in gpuloan_context_options.
    """
    text = os.environ.pop("GPULOAN_FD", None)  # so that this process' own children do not take it for theirs
    if text is None or not (text.isascii() and text.isdigit()):
        raise _error(_CONNECT, f"GPULOAN_FD is {'not set' if text is None else repr(text)}: this process was not started by spawn() of "
                               "a gpuloan parent; use gpuloan.connect(path, key)")
    number = int(text)
    try:
        os.set_inheritable(number, False)
    except OSError as error:
        raise _error(_CONNECT, f"GPULOAN_FD names descriptor {number}, which is not open ({error.strerror}): was it closed by a "
                               "launcher?") from None
    return Worker(timeout, device, driver, options)._connect(_lib.gpuloan_context_adopt, number)


def connect(path: str, key: str, timeout: Optional[float] = 30.0, device: Optional[int] = None, driver: Optional[str] = None,
            **options: Any) -> Worker:
    """Connects to a parent that listens at `path`, with a key of its invite(). The other arguments are those of worker()."""
    parsed = _Key()
    _check(_lib.gpuloan_key_parse(_wire(key, "key"), byref(parsed)))
    return Worker(timeout, device, driver, options)._connect(_lib.gpuloan_context_connect, os.fsencode(path), byref(parsed))
