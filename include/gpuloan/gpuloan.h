/* SPDX-License-Identifier: MIT */
/*
 * gpuloan: lends GPU memory from one process to another on the same Linux host without copying it, and gets it back
 * safely.
 *
 * One process (the exporter, "parent") allocates memory and lends regions of it; another (the importer, "worker") maps
 * a region for a while, reads it or writes it in place, and lets go. Every loan takes eight steps:
 *
 *   EXPORT -> READY gate -> IMPORT -> WRITE (or READ) -> DONE gate -> UNIMPORT -> ACK -> RELEASE
 *
 * docs/contract.md (installed as share/doc/gpuloan/contract.md) is the normative text. In one sentence: memory is not
 * reused while anyone may still write it, and no process waits for ever on another.
 *
 * Conventions
 *   Sizes and offsets are bytes. Times are nanoseconds of CLOCK_MONOTONIC. Timeouts are milliseconds; 0 only looks.
 *   Structs that may grow start with `size`: set it to sizeof of the struct (GPULOAN_INIT does), and everything else
 *   to 0 for the default.
 *   Outputs come last, are named out_... and are written only on success, except that out_event and out_view are
 *   cleared first (all but their `size`), and that out_count says how far a call that failed has got.
 *   Functions return GPULOAN_OK (0) or a negative gpuloan_status; gpuloan_error_text() then has the whole sentence for
 *   the calling thread: the call that failed, its errno or CUresult, and what to do.
 *   A stream is a CUstream passed as void *; NULL means the legacy default stream, GPULOAN_STREAM_PER_THREAD the
 *   per-thread one, both of the CUDA context that the gpuloan_context works in, whichever is current. Streams in graph capture are refused (GPULOAN_ERR_CAPTURE) and not disturbed.
 *
 * Threads
 *   Every function may be called from any thread at any time, except that an object must not be used during or after
 *   its own destroy, unref or close. Functions that wait for the peer name a timeout. Without one of their own these wait too:
 *   gpuloan_lend, gpuloan_lend_many and the two grants, canary_timeout_ms at most for the canary of each way that is new to the
 *   peer, for the first event pair, and with `exclusive` for the other peer; gpuloan_peer_close at an importer and
 *   gpuloan_context_destroy, for about a second, as they say. All others only work on local state; those that take a stream call
 *   the driver, and with the host gate wait for the work in that stream. No function may be called from a log sink.
 *   A context with GPULOAN_LOOP_CALLER does nothing by itself: it works while some thread is in
 *   gpuloan_context_dispatch or in a function with a timeout.
 *
 * fork
 *   A forked child owns none of its parent's objects: every call on them returns GPULOAN_ERR_FORKED and changes
 *   nothing. Start workers with exec.
 */
#ifndef GPULOAN_H
#define GPULOAN_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#error "gpuloan is Linux only; on Windows use WSL2"
#endif

#ifdef __cplusplus
template <typename Struct>
inline Struct gpuloan_init_of() { /* for GPULOAN_INIT; without a warning of missing initializers in C++11 */
  Struct made = Struct();
  made.size = sizeof(Struct);
  return made;
}

extern "C" {
#endif

#define GPULOAN_API __attribute__((visibility("default")))

#define GPULOAN_VERSION_MAJOR 0
#define GPULOAN_VERSION_MINOR 1
#define GPULOAN_VERSION_PATCH 0

/* Initialises an options or output struct: gpuloan_lend_options options = GPULOAN_INIT(gpuloan_lend_options); */
#ifdef __cplusplus
#define GPULOAN_INIT(type) (gpuloan_init_of<type>())
#else
#define GPULOAN_INIT(type) ((type){.size = sizeof(type)})
#endif

/* ---- Status ------------------------------------------------------------------------------------------------- */

/* Grouped by what dies. Numbers never change meaning. */
typedef enum gpuloan_status {
  GPULOAN_OK = 0,

  /* The call: nothing changed; correct it or try again. */
  GPULOAN_ERR_INVALID = -1,       /* an argument is wrong; the text names it */
  GPULOAN_ERR_TIMEOUT = -2,       /* the time given passed first; what was waited for may still happen */
  GPULOAN_ERR_BUSY = -3,          /* the object is lent or in use; the text names by what */
  GPULOAN_ERR_STATE = -4,         /* not possible in the object's present state */
  GPULOAN_ERR_CAPTURE = -5,       /* the stream is in graph capture */
  GPULOAN_ERR_WAIT_LIMIT = -6,    /* the cap on GPU-side waits is reached: wait on the host instead */
  GPULOAN_ERR_LIMIT = -7,         /* a stated limit (slots, metadata, requests, bytes) is reached */
  GPULOAN_ERR_NO_RUNG = -8,       /* no allowed rung can carry this loan; the text has the reason of each */
  GPULOAN_ERR_UNSUPPORTED = -9,   /* this build, kernel or driver cannot do it; the text names what is missing */
  GPULOAN_ERR_NO_MEMORY = -10,    /* host memory */
  GPULOAN_ERR_FD_LIMIT = -11,     /* file descriptors (RLIMIT_NOFILE) */
  GPULOAN_ERR_SYSTEM = -12,       /* a system call failed; the text has its name and errno */

  /* The loan: it ended without success. */
  GPULOAN_ERR_CANCELLED = -20,    /* cancelled by the exporter */
  GPULOAN_ERR_FAILED = -21,       /* the importer reported that its work failed */
  GPULOAN_ERR_DENIED = -22,       /* the exporter denied the request */
  GPULOAN_ERR_RETURNED = -23,     /* the importer returned the loan without finishing the turn */

  /* The peer: it and its loans are gone; the context lives. */
  GPULOAN_ERR_PEER_LOST = -40,    /* the process died or closed its socket */
  GPULOAN_ERR_PROTOCOL = -41,     /* the peer broke the protocol and was dropped */
  GPULOAN_ERR_VERSION = -42,      /* no common protocol version */
  GPULOAN_ERR_KEY = -43,          /* the key is wrong, used or missing */
  GPULOAN_ERR_UID = -44,          /* the peer runs as another user */
  GPULOAN_ERR_HOST = -45,         /* the peer runs on another host or boot */
  GPULOAN_ERR_CONNECT = -46,      /* nobody listens at the path */
  GPULOAN_ERR_ADDRESS_IN_USE = -47, /* somebody already listens at the path */
  GPULOAN_ERR_DEVICE_MISMATCH = -48, /* the peer does not see the device, by UUID; never returned yet: NO_RUNG is */

  /* The device: GPU work of this context is not possible (any more). */
  GPULOAN_ERR_NO_DRIVER = -60,    /* no libcuda.so.1, or not loadable */
  GPULOAN_ERR_STUB_DRIVER = -61,  /* the toolkit's stub library was loaded instead of the driver */
  GPULOAN_ERR_OLD_DRIVER = -62,   /* the driver lacks a required symbol or is older than supported */
  GPULOAN_ERR_DRIVER_MISMATCH = -63, /* compat library or kernel module do not match (803, 804) */
  GPULOAN_ERR_NO_DEVICE = -64,    /* no device, or not that ordinal */
  GPULOAN_ERR_DEVICE_MEMORY = -65, /* out of device memory; the text has the numbers */
  GPULOAN_ERR_DRIVER = -66,       /* a driver call failed; the text has its name and CUresult */
  GPULOAN_ERR_DEVICE_LOST = -67,  /* a sticky error: the CUDA context is unusable */

  /* The process. */
  GPULOAN_ERR_FORKED = -80,       /* this is a forked child of the process that made the object */
  GPULOAN_ERR_INTERNAL = -81      /* a bug in gpuloan; please report the text */
} gpuloan_status;

/* "GPULOAN_ERR_PEER_LOST". Static; "GPULOAN_ERR_UNKNOWN" for numbers this version does not know. */
GPULOAN_API const char *gpuloan_status_name(gpuloan_status status);
/* One sentence that says what the status means. Static. */
GPULOAN_API const char *gpuloan_status_text(gpuloan_status status);
/* The whole sentence of the last call of this thread that failed: cause and remedy. Valid until the thread's next
 * failing call; "" when none failed yet. */
GPULOAN_API const char *gpuloan_error_text(void);
/* "0.1.0", of the library that is loaded. */
GPULOAN_API const char *gpuloan_version_text(void);

/* ---- Log ---------------------------------------------------------------------------------------------------- */

typedef enum gpuloan_log_level {
  GPULOAN_LOG_OFF = 0,
  GPULOAN_LOG_ERROR = 1,
  GPULOAN_LOG_WARNING = 2,
  GPULOAN_LOG_INFO = 3,
  GPULOAN_LOG_DEBUG = 4
} gpuloan_log_level;

typedef void (*gpuloan_log_function)(void *user, gpuloan_log_level level, const char *line);

/* Sends log lines up to `level` to `function` (NULL: stderr). It is called from any thread, one call at a time, and
 * must not call gpuloan. Without this call GPULOAN_LOG decides, and the default is silence. */
GPULOAN_API void gpuloan_log_set(gpuloan_log_function function, void *user, gpuloan_log_level level);

/* ---- Objects ------------------------------------------------------------------------------------------------ */

typedef struct gpuloan_context gpuloan_context; /* one side of any number of connections, with its loop */
typedef struct gpuloan_peer gpuloan_peer;       /* one connection to one process */
typedef struct gpuloan_region gpuloan_region;   /* memory of the exporter's arena, made for one peer */
typedef struct gpuloan_loan gpuloan_loan;       /* one region lent to one peer, seen from one side */
typedef struct gpuloan_request gpuloan_request; /* an importer's wish for a result buffer, seen by the exporter */

#ifdef __cplusplus
#define GPULOAN_STREAM_VALUE(value) (reinterpret_cast<void *>(static_cast<uintptr_t>(value)))
#else
#define GPULOAN_STREAM_VALUE(value) ((void *)(uintptr_t)(value))
#endif
#define GPULOAN_STREAM_LEGACY GPULOAN_STREAM_VALUE(1)
#define GPULOAN_STREAM_PER_THREAD GPULOAN_STREAM_VALUE(2)
#define GPULOAN_STREAM_CPU GPULOAN_STREAM_VALUE(UINTPTR_MAX) /* no stream: the work is the CPU's and done */

#define GPULOAN_METADATA_MAX 4096u /* bytes of opaque metadata of a request or a loan (dtype, shape ...) */
#define GPULOAN_TEXT_MAX 512u      /* bytes of a reason in a report, with its NUL */

enum gpuloan_role { GPULOAN_ROLE_EXPORTER = 1, GPULOAN_ROLE_IMPORTER = 2 };
enum gpuloan_loop { GPULOAN_LOOP_THREAD = 0, GPULOAN_LOOP_CALLER = 1 };
enum gpuloan_engine { GPULOAN_ENGINE_AUTO = 0, GPULOAN_ENGINE_EPOLL = 1, GPULOAN_ENGINE_IO_URING = 2 };
enum gpuloan_access { GPULOAN_ACCESS_READ = 1, GPULOAN_ACCESS_WRITE = 2 };
enum gpuloan_memory { GPULOAN_MEMORY_DEVICE = 0, GPULOAN_MEMORY_HOST = 1 };
enum gpuloan_rung { /* bits of a mask */
  GPULOAN_RUNG_NONE = 0,
  GPULOAN_RUNG_VMM = 1,
  GPULOAN_RUNG_POOL = 2, /* EXPERIMENTAL, off by default: importing a large allocation kills the importer (P3) */
  GPULOAN_RUNG_IPC = 4,
  GPULOAN_RUNG_HOST = 8
};
enum gpuloan_gate { GPULOAN_GATE_AUTO = 0, GPULOAN_GATE_MEMOP = 1, GPULOAN_GATE_EVENT = 2, GPULOAN_GATE_HOST = 3 };
enum gpuloan_policy { GPULOAN_POLICY_BEST = 0, GPULOAN_POLICY_REQUIRE_ZERO_COPY = 1 };
enum gpuloan_canary { GPULOAN_CANARY_NOT_ATTEMPTED = 0, GPULOAN_CANARY_VERIFIED = 1, GPULOAN_CANARY_DEMOTED = 2 };
typedef enum gpuloan_limit_source { /* where the import limit of the pool rung comes from */
  GPULOAN_LIMIT_DEFAULT = 0,  /* 5248 MiB, what one device and driver were seen to survive */
  GPULOAN_LIMIT_OPTION = 1,   /* gpuloan_context_options.pool_import_limit */
  GPULOAN_LIMIT_MEASURED = 2  /* 'gpuloan probe --import-limit', on this device with this driver */
} gpuloan_limit_source;
enum gpuloan_memory_state { /* of the lent memory, at the exporter; only moves forward */
  GPULOAN_MEMORY_HELD = 0,        /* the importer may touch it */
  GPULOAN_MEMORY_RELEASED = 1,    /* nobody else may touch it */
  GPULOAN_MEMORY_QUARANTINED = 2, /* kept referenced until the lost peer is proven gone */
  GPULOAN_MEMORY_RETIRED = 3,     /* its chunk takes no new regions and goes back once the last live one is destroyed */
  GPULOAN_MEMORY_SURRENDERED = 4  /* its region is destroyed: the chunk goes, or went, with its last one, and the driver
                                     frees it with the last mapping anywhere */
};

/* ---- Context ------------------------------------------------------------------------------------------------ */

enum { /* flags */
  GPULOAN_CONTEXT_NO_DEVICE = 1u, /* never load a driver; host memory only */
  GPULOAN_CONTEXT_DEVICE = 2u,    /* work on options.device whatever context the calling thread has: in that one where it is of
                                     this device, else in the device's primary context */
  GPULOAN_CONTEXT_SLEEP = 4u      /* every wait sleeps at once. Else one spins first, at most as long as what was waited for took
                                     lately (50 us for records, 1 ms for a turn), and never in a process with one CPU. For hosts
                                     with more busy processes than CPUs */
};

typedef struct gpuloan_context_options {
  size_t size;
  uint32_t role;              /* gpuloan_role; required */
  uint32_t loop;              /* gpuloan_loop: a thread of the library's (default), or the caller's dispatch */
  uint32_t engine;            /* gpuloan_engine; AUTO: io_uring for an exporter with a loop thread where its self-test
                                 passes, else epoll. Importers and caller-driven contexts always use epoll. */
  uint32_t flags;
  const char *driver;         /* "real", "sim", a path, or NULL: GPULOAN_DRIVER, else "real". Never sim by itself. */
  int32_t device;             /* ordinal in this process; without GPULOAN_CONTEXT_DEVICE ignored where the calling thread has
                                 a current context. A worker may work on another device than its parent: it is lent memory
                                 without a copy where its device has peer access to the parent's */
  uint32_t rungs;             /* mask of allowed gpuloan_rung; 0: all but POOL, which GPULOAN_POOL=1 adds */
  uint32_t gate;              /* gpuloan_gate; AUTO: memop, else event, else host */
  uint32_t gpu_wait_limit;    /* pending GPU-side waits allowed at once; 0: 4. More than 7 stop a context (S9). */
  uint32_t slots;             /* control words per peer, hence loans out at once; at least 4; 0: 16384 */
  uint32_t canary_timeout_ms; /* the budget of a canary's whole battery, in milliseconds; also how long a loan may wait to
                                 become exclusive; 0: 2000 */
  uint64_t idle_bytes;        /* idle arena bytes kept per peer before chunks are recalled; 0: 1 GiB */
  uint64_t account_bytes;     /* arena bytes one account may pin (live, idle, retired, surrendered); 0: no limit */
  uint64_t pool_import_limit; /* of one allocation on the pool rung, beyond which its importer would die; 0: the measured
                                 one (gpuloan_import_limit_remember), else 5248 MiB */
} gpuloan_context_options;

/* Makes a context. The driver is opened here (errors: the device group); a CUDA context is used only once a peer
 * borrows: the thread's current one at this call, else the device's primary context. Later calls may come from threads with any
 * current context, or none; it is put back. *out_context is the caller's and
 * ends with gpuloan_context_destroy. Errors: INVALID, NO_DRIVER ... NO_DEVICE, DRIVER, UNSUPPORTED (an engine asked for
 * by name), FD_LIMIT, NO_MEMORY, SYSTEM. */
GPULOAN_API gpuloan_status gpuloan_context_create(const gpuloan_context_options *options, gpuloan_context **out_context);
/* Closes all peers, ends all loans (outcome PEER_LOST at the other side where they were open), frees the arena and every
 * object that belongs to the context, so no handle of it may be used afterwards, not even to drop it. Bounded: an
 * importer waits a second at most until its turns that are done and its loans that were let go of are told, else nobody waits for
 * peers; and about a second at most for each kind of this side's own GPU work on lent memory; memory that is
 * still in use then is left to the end of the process. */
GPULOAN_API void gpuloan_context_destroy(gpuloan_context *context);

/* A descriptor to poll for POLLIN: with GPULOAN_LOOP_CALLER call gpuloan_context_dispatch when it is readable (and at
 * least every 10 ms while loans are out, since a GPU wakes nobody); with GPULOAN_LOOP_THREAD it is readable while an
 * event waits for gpuloan_context_next_event. Owned by the context. */
GPULOAN_API int gpuloan_context_fd(const gpuloan_context *context);
/* GPULOAN_LOOP_CALLER only: handles what is due, waiting up to timeout_ms for something. OK also when nothing came. */
GPULOAN_API gpuloan_status gpuloan_context_dispatch(gpuloan_context *context, uint32_t timeout_ms);

typedef enum gpuloan_event_type {
  GPULOAN_EVENT_NONE = 0,
  GPULOAN_EVENT_PEER_READY = 1,    /* exporter: the handshake with `peer` is complete */
  GPULOAN_EVENT_PEER_LOST = 2,     /* `peer` is gone; status and text say why. Exporter: its loans have ended.
                                      Importer: those that are acquired end with gpuloan_loan_done or _return */
  GPULOAN_EVENT_PEER_REFUSED = 3,  /* exporter: a connection was refused; peer is NULL; status and text say why */
  GPULOAN_EVENT_REQUEST = 4,       /* exporter: answer `request` with grant or deny */
  GPULOAN_EVENT_LOAN_OFFERED = 5,  /* importer: `loan` was lent; the handle carries a reference of the caller's */
  GPULOAN_EVENT_LOAN_READY = 6,    /* importer: a turn of `loan` is behind READY, acquire will not wait */
  GPULOAN_EVENT_LOAN_DONE = 7,     /* exporter: a turn of `loan` is behind DONE */
  GPULOAN_EVENT_LOAN_ENDED = 8     /* `loan` ended; status is its outcome */
} gpuloan_event_type;

typedef struct gpuloan_event {
  size_t size;
  uint32_t type;            /* gpuloan_event_type */
  gpuloan_status status;
  gpuloan_peer *peer;
  gpuloan_loan *loan;       /* the same handle that lend, grant, request or LOAN_OFFERED gave */
  gpuloan_request *request; /* the caller's until grant or deny */
  char text[GPULOAN_TEXT_MAX];
} gpuloan_event;

/* Takes the oldest event, waiting up to timeout_ms for one. TIMEOUT when none came. An event of a loan whose last
 * reference is gone is not delivered. */
GPULOAN_API gpuloan_status gpuloan_context_next_event(gpuloan_context *context, uint32_t timeout_ms,
                                                      gpuloan_event *out_event);

typedef struct gpuloan_stats {
  size_t size;
  uint32_t engine;              /* gpuloan_engine that runs */
  uint32_t peers;
  uint64_t loans_out;           /* not yet RELEASED */
  uint64_t loans_total;
  uint64_t loans_failed;
  uint64_t chunks;              /* arena chunks that exist */
  uint64_t live_bytes;          /* in regions that exist */
  uint64_t idle_bytes;          /* in chunks without a region, kept for reuse */
  uint64_t retired_bytes;       /* in retired chunks whose last region still lives */
  uint64_t surrendered_bytes;   /* dropped by us, maybe still mapped by a process that holds on */
  uint64_t quarantined_bytes;   /* lent by pool, ipc, or VMM memory of the caller's: kept until a lost peer is proven gone */
  uint64_t imported_bytes;      /* importer: mapped chunks */
  uint64_t copied_bytes;        /* moved by the host rung, or copied on the device, since the context was made */
  uint32_t gpu_waits;           /* pending GPU-side waits */
  char engine_reason[GPULOAN_TEXT_MAX]; /* why this engine, and which self-test step failed if one did */
  char driver_text[GPULOAN_TEXT_MAX];   /* "simulated driver 13.0 at /..." or "driver 13.0 at /..." */
  uint64_t pool_exported_bytes;         /* of pool allocations that were ever lent over pool: the driver keeps them from the
                                           device after they were freed and trimmed (P8) */
} gpuloan_stats;

GPULOAN_API gpuloan_status gpuloan_context_stats(gpuloan_context *context, gpuloan_stats *out_stats);

/* ---- Connecting --------------------------------------------------------------------------------------------- */

#define GPULOAN_KEY_BYTES 32u
#define GPULOAN_KEY_TEXT_BYTES 65u /* as hexadecimal digits with the NUL */

typedef struct gpuloan_key {
  unsigned char bytes[GPULOAN_KEY_BYTES];
} gpuloan_key;

/* Exporter: mints one key for one start of a worker; `account` (at most 63 bytes, NULL: "") names whom its memory is
 * charged to. A key is claimed by a HELLO, given back if that connection ends before WELCOME, spent at WELCOME. Pass it
 * by FD or by a file with mode 0600, less well by environment, never in argv. Errors: INVALID, STATE, LIMIT, SYSTEM. */
GPULOAN_API gpuloan_status gpuloan_context_invite(gpuloan_context *context, const char *account, gpuloan_key *out_key);
/* Hexadecimal form and back. parse: INVALID when it is not 64 hexadecimal digits (surrounding white space is fine). */
GPULOAN_API void gpuloan_key_format(const gpuloan_key *key, char out_text[GPULOAN_KEY_TEXT_BYTES]);
GPULOAN_API gpuloan_status gpuloan_key_parse(const char *text, gpuloan_key *out_key);

/* Exporter: listens at a socket path (mode 0600; at most 107 bytes). A stale socket file that nobody listens on is
 * replaced; a live one gives ADDRESS_IN_USE; anything else at the path gives INVALID and is left alone. The file is
 * removed with the context, unless another is there by then. Peers appear as PEER_READY or PEER_REFUSED. */
GPULOAN_API gpuloan_status gpuloan_context_listen(gpuloan_context *context, const char *path);
/* Exporter: takes its end of a SOCK_SEQPACKET socketpair whose other end a worker inherits; no key is needed. `fd` is
 * the context's on success and remains the caller's on failure. */
GPULOAN_API gpuloan_status gpuloan_context_attach(gpuloan_context *context, int fd, const char *account);
/* Importer: connects to a path with a key and completes the handshake. *out_peer is valid until gpuloan_peer_close.
 * Errors: CONNECT, KEY, UID (also: the socket file is another user's), INVALID (also: a folder of the path is closed to
 * this user), HOST, VERSION, PROTOCOL, PEER_LOST, TIMEOUT. */
GPULOAN_API gpuloan_status gpuloan_context_connect(gpuloan_context *context, const char *path, const gpuloan_key *key,
                                                   uint32_t timeout_ms, gpuloan_peer **out_peer);
/* Importer: the same over an inherited end. `fd` is the context's from this call on, and closed when the handshake fails;
 * only with INVALID, STATE (the context is an exporter's) and FORKED does it remain the caller's. */
GPULOAN_API gpuloan_status gpuloan_context_adopt(gpuloan_context *context, int fd, uint32_t timeout_ms,
                                                 gpuloan_peer **out_peer);

typedef struct gpuloan_peer_info {
  size_t size;
  int32_t pid;               /* as this process sees it; 0 when it is in another PID namespace */
  uint32_t lost;             /* 1 once it is gone */
  uint32_t protocol;         /* version agreed on */
  uint32_t has_device;       /* 1 when the peer sees this context's device, by UUID (importer: when this one sees the peer's) */
  uint32_t vmm_canary;       /* gpuloan_canary, exporter only */
  uint32_t pidfd;            /* 1 when its death can be proven by a pidfd */
  uint64_t loans_out;
  char account[64];
  uint32_t ipc_canary;       /* gpuloan_canary, exporter only */
  uint32_t pool_canary;      /* gpuloan_canary, exporter only */
  uint32_t foreign_vmm_canary; /* the same of vmm for memory that is not of this peer's part of the arena */
  uint32_t host_canary;      /* gpuloan_canary, exporter only. DEMOTED: the peer is refused, each lend says NO_RUNG */
  char canary_text[4 * GPULOAN_TEXT_MAX]; /* exporter only: "vmm: why; ipc: ...", of each way that was demoted; "" when none was */
} gpuloan_peer_info;

GPULOAN_API gpuloan_status gpuloan_peer_info_get(gpuloan_peer *peer, gpuloan_peer_info *out_info);
/* Ends the connection, as gpuloan_context_destroy does; open loans end as for a lost peer. An importer waits, a second at most, for its
 * own GPU work on turns that are done and on loans that it let go of, until the exporter was told; an exporter does not wait. The handle
 * is invalid afterwards, regions and loans are not: LOAN_ENDED events that still come name no peer. Also for a peer that is lost: until
 * then its handle is kept. */
GPULOAN_API void gpuloan_peer_close(gpuloan_peer *peer);

/* ---- Regions (exporter) ------------------------------------------------------------------------------------- */

typedef struct gpuloan_region_options {
  size_t size;
  uint64_t bytes;       /* 0 is a region without memory: its pointer is 0, and it can be lent */
  uint64_t alignment;   /* power of two, at most 2 MiB; 0: 256 */
  uint32_t access;      /* gpuloan_access of the loans it is meant for; a write region can be lent for read too */
  uint32_t memory;      /* gpuloan_memory: device memory, or host pages that both sides read and write in place */
} gpuloan_region_options;

/* Allocates memory from the peer's part of the arena. *out_region is the caller's and ends with
 * gpuloan_region_destroy. Errors: INVALID, PEER_LOST, LIMIT (account_bytes; names what pins it), DEVICE_MEMORY, DRIVER. */
GPULOAN_API gpuloan_status gpuloan_region_create(gpuloan_peer *peer, const gpuloan_region_options *options,
                                                 gpuloan_region **out_region);
/* BUSY while a loan of it is out. Otherwise the handle is invalid; the bytes are reused, or their chunk unmapped, only
 * after the work now in the streams that used it has passed: those given to lend, ready and region_used_on. */
GPULOAN_API gpuloan_status gpuloan_region_destroy(gpuloan_region *region);
/* The exporter's own address: a device pointer (usable by every kernel of the context's device), 0 for 0 bytes. For
 * host memory the address as the device sees it, 0 where it does not (no device, or it could not be registered). */
GPULOAN_API uint64_t gpuloan_region_pointer(const gpuloan_region *region);
/* Host memory only: the address for the CPU; NULL for device memory. */
GPULOAN_API void *gpuloan_region_host(const gpuloan_region *region);
GPULOAN_API uint64_t gpuloan_region_bytes(const gpuloan_region *region);
/* Says that `stream` uses the region too: after gpuloan_region_destroy, which does not wait, its memory is not reused before the work
 * that was in `stream` by then has passed. GPULOAN_STREAM_CPU changes nothing. */
GPULOAN_API gpuloan_status gpuloan_region_used_on(gpuloan_region *region, void *stream);

/* ---- Lending (exporter) ------------------------------------------------------------------------------------- */

/* Called from a thread of the library's, without any lock of it; it may lend and end loans, but not destroy the context. */
typedef void (*gpuloan_release_function)(void *user);

typedef struct gpuloan_lend_options {
  size_t size;
  uint32_t access;       /* gpuloan_access; required */
  uint32_t policy;       /* gpuloan_policy */
  uint32_t rungs;        /* mask; 0: what the context allows */
  uint32_t gate;         /* gpuloan_gate; AUTO: the context's */
  uint32_t memory;       /* gpuloan_memory the importer wants to see */
  uint32_t keep_open;    /* 1: more turns follow (gpuloan_loan_ready); 0: the loan ends with its first turn */
  void *stream;          /* READY orders what is now enqueued here before the importer's work */
  const void *metadata;  /* opaque, copied; at most GPULOAN_METADATA_MAX bytes */
  size_t metadata_bytes;
  gpuloan_release_function release; /* NULL, or called exactly once if lend succeeds: for a region of the arena when the loan
                                       has ended, for memory of the caller's when nobody else may touch it any more. After
                                       the loss of a peer, or gpuloan_context_destroy, that may be much later, and not
                                       before the end of this process if it cannot be proven */
  void *release_user;
  uint32_t exclusive;    /* 1: for a region of another peer's that is lent on as it is: that peer unmaps it first (TIMEOUT
                            after canary_timeout_ms, PEER_LOST when it is gone and may still write it) */
} gpuloan_lend_options;

/* Lends [pointer, pointer + bytes) to `peer`: EXPORT and, behind the work in options->stream, READY. `pointer` lies in a
 * region of the arena (any part of it; of host memory by the address of gpuloan_region_host, or of gpuloan_region_pointer where that
 * is not 0), or is any other device pointer, whoever allocated it: the driver is asked what it
 * is. VMM memory with POSIX FD handles goes over vmm, cuMemAlloc memory over ipc, and memory of a shareable pool over pool
 * where that is allowed, all without a copy; the rest is
 * copied, on the device where the peer works on it or reaches it (vmm, with copied_bytes), else by the host rung. A region of
 * another peer's is lent on for read as it is where it has its chunk to itself (the report's `writers` says who may still
 * write it), else as a copy. The caller keeps such memory allocated until `release` is called. A range lent for write is lent
 * to nobody else; one lent for read may be lent for read many times (BUSY otherwise). The first loan over each
 * way to a peer waits for a battery of canary loans (canary_timeout_ms), the first under the event gate for one
 * answer. A peer whose canary of the host rung failed is
 * refused: NO_RUNG, whatever is lent.
 * *out_loan carries a reference of the caller's; the library keeps its own until RELEASE.
 * Errors: INVALID (also: memory of another process, which only that process may lend, and of another device than the
 * context's, which a context for that device lends), BUSY, CAPTURE, LIMIT, NO_RUNG, PEER_LOST, TIMEOUT (`exclusive`: the other peer
 * did not unmap the region in time), UNSUPPORTED (a gate that was asked for by name cannot be had), STATE (an importer's peer),
 * NO_MEMORY, FD_LIMIT, SYSTEM, DEVICE_MEMORY, DRIVER, DEVICE_LOST. */
GPULOAN_API gpuloan_status gpuloan_lend(gpuloan_peer *peer, uint64_t pointer, uint64_t bytes,
                                        const gpuloan_lend_options *options, gpuloan_loan **out_loan);

typedef struct gpuloan_range {
  uint64_t pointer;
  uint64_t bytes;
} gpuloan_range;

/* gpuloan_lend for each of `count` ranges, in their order and with the same options (`release` is called once for each loan); their
 * records leave together, which costs both sides much less than one call for each. Ends at the first range that cannot be lent, with
 * its status: *out_count loans, those of the ranges before it, are out, and only so many of out_loans were written; none where the call
 * itself is refused. */
GPULOAN_API gpuloan_status gpuloan_lend_many(gpuloan_peer *peer, const gpuloan_range *ranges, uint32_t count,
                                             const gpuloan_lend_options *options, gpuloan_loan **out_loans, uint32_t *out_count);
/* The next turn of a loan lent with keep_open: READY behind the work in `stream`. STATE before DONE of the last turn. */
GPULOAN_API gpuloan_status gpuloan_loan_ready(gpuloan_loan *loan, void *stream);
/* Asks for a loan back and waits until it is RELEASED: no further turn will come, the importer's acquire then says
 * STATE. OK when it ended well; its outcome otherwise; TIMEOUT when it is still out. */
GPULOAN_API gpuloan_status gpuloan_reclaim(gpuloan_loan *loan, uint32_t timeout_ms);
/* Ends a loan to a peer that is stuck: its outcome is CANCELLED from now on, waiting streams are released, the memory
 * stays held until the peer's ACK, or is retired or quarantined when the peer is lost. `reason` (NULL: none) reaches the importer. */
GPULOAN_API gpuloan_status gpuloan_loan_cancel(gpuloan_loan *loan, const char *reason);

typedef struct gpuloan_request_info {
  size_t size;
  gpuloan_peer *peer;
  uint64_t bytes;
  uint64_t alignment;
  uint32_t memory;           /* gpuloan_memory the importer wants to see; the result may be other memory */
  uint32_t onward;           /* 1: the result will be lent on, so it gets a chunk of its own and needs no copy then */
  const void *metadata;      /* valid until grant or deny */
  size_t metadata_bytes;
} gpuloan_request_info;

GPULOAN_API gpuloan_status gpuloan_request_info_get(const gpuloan_request *request, gpuloan_request_info *out_info);
/* Allocates the bytes that were asked for and lends them for write (options may be NULL; access is ignored). The request is
 * consumed on success. *out_region is the result and the caller's, as from region_create; *out_loan as from lend.
 * The result is device memory where this context has a device, whatever memory the importer wants to see: one that wants host
 * memory gets pages that are copied once, at DONE. For a result that both sides have in place as host memory make a region of
 * GPULOAN_MEMORY_HOST and give its gpuloan_region_host to gpuloan_request_grant_with.
 * Errors: as of gpuloan_region_create and gpuloan_lend; the request is then still to be answered. */
GPULOAN_API gpuloan_status gpuloan_request_grant(gpuloan_request *request, const gpuloan_lend_options *options,
                                                 gpuloan_region **out_region, gpuloan_loan **out_loan);
/* The same with memory of the caller's own (at least the bytes that were asked for, at `pointer`), as gpuloan_lend would
 * lend it. Errors as of gpuloan_lend; the request is consumed on success. */
GPULOAN_API gpuloan_status gpuloan_request_grant_with(gpuloan_request *request, uint64_t pointer,
                                                      const gpuloan_lend_options *options, gpuloan_loan **out_loan);
/* Denies it; the importer's loan ends with DENIED and `reason`. Consumes the request. */
GPULOAN_API gpuloan_status gpuloan_request_deny(gpuloan_request *request, const char *reason);

/* ---- Borrowing (importer) ----------------------------------------------------------------------------------- */

typedef struct gpuloan_request_options {
  size_t size;
  uint64_t bytes;
  uint64_t alignment;        /* power of two, at most 2 MiB; 0: 256. Of host memory the importer sees 4 KiB at most */
  uint32_t memory;           /* gpuloan_memory this side wants to see; a context without a device always gets host */
  uint32_t onward;           /* 1: the result will be lent on to others */
  const void *metadata;      /* opaque, copied; at most GPULOAN_METADATA_MAX bytes */
  size_t metadata_bytes;
} gpuloan_request_options;

/* Asks the exporter for a buffer of `bytes` to write a result into. Returns at once; *out_loan carries a reference of the
 * caller's and becomes a loan when it is granted, or ends with DENIED. */
GPULOAN_API gpuloan_status gpuloan_request_send(gpuloan_peer *peer, const gpuloan_request_options *options,
                                                gpuloan_loan **out_loan);

typedef struct gpuloan_view {
  size_t size;
  uint64_t pointer;      /* device pointer in the importer; 0 for 0 bytes or host memory without a device */
  void *host;            /* host address where the loan is host memory, else NULL */
  uint64_t bytes;
  uint32_t access;       /* gpuloan_access */
  uint32_t turn;         /* 1, 2, ... */
  const void *metadata;  /* of the lend (or of the request, where grant gave none); valid as long as the loan */
  size_t metadata_bytes;
} gpuloan_view;

/* Waits for READY of the next turn and maps the memory: IMPORT. The view may be used until gpuloan_loan_done.
 * Errors: TIMEOUT, STATE (no further turn comes, or this one was already acquired), the loan's outcome if it ended. */
GPULOAN_API gpuloan_status gpuloan_loan_acquire(gpuloan_loan *loan, uint32_t timeout_ms, gpuloan_view *out_view);
/* As acquire, but instead of waiting for READY on the host makes `stream` wait for it (INVALID for GPULOAN_STREAM_CPU): at most
 * gpu_wait_limit at once (WAIT_LIMIT), memop gate only, not for memory that is unmapped with the loan (pool, ipc, others' VMM memory), only in a
 * context with a loop thread, which releases the stream if the exporter is lost or the loan cancelled. While such memory of an
 * earlier loan is unmapped it waits on the host after all. Work enqueued behind it is speculative until the loan's outcome is OK. */
GPULOAN_API gpuloan_status gpuloan_loan_acquire_on(gpuloan_loan *loan, void *stream, uint32_t timeout_ms,
                                                   gpuloan_view *out_view);
/* Says that `stream` too works on the loan: done waits for it as well. INVALID for GPULOAN_STREAM_PER_THREAD, which would be
 * another stream in another thread. */
GPULOAN_API gpuloan_status gpuloan_loan_used_on(gpuloan_loan *loan, void *stream);
/* DONE behind the work now in `stream` (and those named by used_on): ends the turn. Does not wait, except with the host
 * gate, which synchronises the stream. For work done by the CPU on host memory pass GPULOAN_STREAM_CPU.
 * A loan without keep_open is returned by this call; no gpuloan_loan_return is needed. */
GPULOAN_API gpuloan_status gpuloan_loan_done(gpuloan_loan *loan, void *stream);
/* gpuloan_loan_done for each of `count` loans of one context, in their order, all behind the same stream; what they tell the exporter leaves
 * together, for each peer (put its loans side by side). Ends at the first call that is refused, with its status: the turns
 * of the *out_count loans before it are over; none where the call itself is refused. Where none is refused *out_count is `count`, and the status is that of the first loan that
 * has failed, or OK. */
GPULOAN_API gpuloan_status gpuloan_loan_done_many(gpuloan_loan *const *loans, uint32_t count, void *stream, uint32_t *out_count);
/* Lets go of the loan: UNIMPORT and ACK follow when the importer's GPU work on it is complete. Returns at once. A turn
 * that was offered or acquired and not finished makes the outcome RETURNED; all work of the CUDA context is waited for
 * then, since nobody said which streams worked on it. After done of the last turn this does nothing. */
GPULOAN_API gpuloan_status gpuloan_loan_return(gpuloan_loan *loan);
/* Reports that the work failed: the outcome is FAILED with `reason` at the exporter. Then as return. It reaches the exporter with the
 * ACK; gpuloan_peer_close and gpuloan_context_destroy wait for that, a second at most, an exit of the process does not. */
GPULOAN_API gpuloan_status gpuloan_loan_fail(gpuloan_loan *loan, const char *reason);

/* ---- Both sides --------------------------------------------------------------------------------------------- */

typedef enum gpuloan_step {
  GPULOAN_STEP_EXPORT = 0,   /* exporter: the loan's record was sent */
  GPULOAN_STEP_READY = 1,    /* exporter: READY was posted behind the producer's work */
  GPULOAN_STEP_IMPORT = 2,   /* importer: READY has passed (acquire_on: a stream waits for it) and the memory is mapped */
  GPULOAN_STEP_WRITE = 3,    /* importer: the pointer was handed out; reading or writing begins */
  GPULOAN_STEP_DONE = 4,     /* importer: its GPU work on the turn was seen complete */
  GPULOAN_STEP_UNIMPORT = 5, /* importer: its hold was dropped */
  GPULOAN_STEP_ACK = 6,      /* importer: the acknowledgement was sent */
  GPULOAN_STEP_RELEASE = 7,  /* exporter: the acknowledgement was handled, the memory is its own again; after a loss: the
                                loan ended, see memory_state */
  GPULOAN_STEP_COUNT = 8
} gpuloan_step;

/* "EXPORT" ... "RELEASE". Static. */
GPULOAN_API const char *gpuloan_step_name(gpuloan_step step);
GPULOAN_API const char *gpuloan_rung_name(uint32_t rung);  /* "vmm", "pool", "ipc", "host", "none" */
GPULOAN_API const char *gpuloan_gate_name(uint32_t gate);  /* "memop", "event", "host", "auto" */
GPULOAN_API const char *gpuloan_engine_name(uint32_t engine);
GPULOAN_API const char *gpuloan_memory_state_name(uint32_t state);

/* Waits for DONE of the current turn (exporter; OK at once when none is out) or for its own GPU work on the turns that
 * were done (importer; STATE when none was). OK when it is good, the loan's outcome when it failed, TIMEOUT. */
GPULOAN_API gpuloan_status gpuloan_loan_wait_done(gpuloan_loan *loan, uint32_t timeout_ms);
/* Waits until the loan has ended: RELEASE at the exporter, ACK at the importer. OK or its outcome, or TIMEOUT. */
GPULOAN_API gpuloan_status gpuloan_loan_wait_end(gpuloan_loan *loan, uint32_t timeout_ms);

typedef struct gpuloan_loan_report {
  size_t size;
  uint64_t id;                 /* the same on both sides, unique per connection */
  uint64_t bytes;
  uint32_t access;             /* gpuloan_access */
  uint32_t memory;             /* gpuloan_memory at the importer */
  uint32_t rung;               /* gpuloan_rung that carries it */
  uint32_t gate;               /* gpuloan_gate that orders it */
  uint32_t turns;              /* turns that were made ready */
  uint32_t turns_done;         /* turns whose DONE was seen */
  uint32_t ended;              /* 1 once it has ended; outcome is then final */
  gpuloan_status outcome;      /* OK while open */
  uint32_t memory_state;       /* gpuloan_memory_state, exporter only */
  uint32_t canary;             /* gpuloan_canary of the way that it takes to this peer */
  uint64_t copied_bytes;       /* on this side: by the host rung, or on the device where vmm lends a copy */
  uint64_t exposed_bytes;      /* bytes beyond the region that the peer could touch: the rest of its chunk, or of the
                                  allocation. The importer knows it in whole KiB */
  uint64_t step_ns[GPULOAN_STEP_COUNT]; /* last turn's; 0: not happened, or not known on this side yet */
  /* Exporter: why each better rung was refused; "" when the best was taken. Either side: why its host memory is not pinned. */
  char rung_reason[GPULOAN_TEXT_MAX];
  char gate_reason[GPULOAN_TEXT_MAX]; /* likewise for the gate */
  char outcome_text[GPULOAN_TEXT_MAX];  /* the sentence for a failed loan */
  char writers[GPULOAN_TEXT_MAX];       /* exporter: who else may still write the lent memory; "" for nobody */
} gpuloan_loan_report;

/* The exporter's report of an ended loan has all eight steps (the importer's travel in the ACK); the importer's lacks
 * RELEASE. */
GPULOAN_API gpuloan_status gpuloan_loan_report_get(gpuloan_loan *loan, gpuloan_loan_report *out_report);
GPULOAN_API gpuloan_loan *gpuloan_loan_ref(gpuloan_loan *loan);
/* Drops a reference. An importer that drops its last one on an open loan returns it. */
GPULOAN_API void gpuloan_loan_unref(gpuloan_loan *loan);

/* ---- Devices ------------------------------------------------------------------------------------------------ */

enum gpuloan_floor { /* bits: capabilities probed on the device, never assumed from a version */
  GPULOAN_FLOOR_VMM = 1u << 0,           /* VMM memory with POSIX FD handles: the vmm rung */
  GPULOAN_FLOOR_MEMOPS = 1u << 1,        /* 64-bit stream memory operations: the memop gate */
  GPULOAN_FLOOR_IPC_EVENTS = 1u << 2,    /* interprocess events: the event gate */
  GPULOAN_FLOOR_HOST_REGISTER = 1u << 3, /* registering host memory: pinned rings and control words */
  GPULOAN_FLOOR_CAPTURE_QUERY = 1u << 4, /* asking whether a stream is in capture */
  GPULOAN_FLOOR_FOREIGN_VMM = 1u << 5,   /* exporting VMM memory that another allocator made */
  GPULOAN_FLOOR_IPC_MEMORY = 1u << 6,    /* legacy memory handles: the ipc rung */
  GPULOAN_FLOOR_POOLS = 1u << 7          /* memory pools with POSIX FD handles */
};

typedef struct gpuloan_device_info {
  size_t size;
  int32_t ordinal;
  uint32_t floors;              /* gpuloan_floor bits */
  uint32_t missing;             /* bits that are off; floor_reason says why */
  int32_t compute_mode;         /* 0 default, 2 prohibited, 3 exclusive process */
  uint32_t integrated;
  uint64_t total_bytes;
  uint64_t granularity;         /* of VMM memory; 0 without */
  unsigned char uuid[16];
  char name[128];
  char floor_reason[GPULOAN_TEXT_MAX]; /* "vmm: what is lost: why; pools: ...", of each missing floor */
  uint64_t peers;               /* bit n: this device reaches the memory of device n of this process (peer access) */
  uint64_t pool_import_limit;          /* that a context takes whose options name none. 0 where `floors` has POOLS: it was
                                          measured that nothing can be imported, and the pool rung is refused; 0 without POOLS */
  uint32_t pool_import_limit_source;   /* gpuloan_limit_source */
  uint32_t mps;                 /* 1: used through MPS. No ipc and no pool rung, and VMM memory that others made is copied:
                                   nothing tells when a dead client's work has ended */
} gpuloan_device_info;

typedef struct gpuloan_driver_info {
  size_t size;
  int32_t version;              /* 13000 for 13.0 */
  uint32_t simulated;           /* 1: libgpuloan-sim */
  uint32_t devices;
  char path[256];               /* of the library that is loaded */
  char found_by[64];            /* "caller's path", "already loaded", "libcuda.so.1", "simulated" */
} gpuloan_driver_info;

/* Opens the driver (NULL: as a context would) and describes it; no CUDA context is made. */
GPULOAN_API gpuloan_status gpuloan_driver_probe(const char *driver, gpuloan_driver_info *out_info);
GPULOAN_API gpuloan_status gpuloan_device_probe(const char *driver, int32_t ordinal, gpuloan_device_info *out_info);
/* Keeps what was measured: one allocation of a pool of `bytes` (rounded down to 2 MiB) can be imported on this device with
 * this driver, and no larger one; 0: none can, and the pool rung is refused with that reason. It is kept in a file of this user's ($XDG_CACHE_HOME, else ~/.cache, gpuloan/), for this
 * device's UUID and this driver's release, and used by contexts that are made from then on, of all processes of the user.
 * A number that is too large kills importers: 'gpuloan probe --import-limit' measures it and calls this.
 * Errors: as of gpuloan_device_probe; UNSUPPORTED without the floor POOLS, INVALID (more than 0 and less than 2 MiB, more than
 * the device has), SYSTEM (no folder, or it cannot be written). */
GPULOAN_API gpuloan_status gpuloan_import_limit_remember(const char *driver, int32_t ordinal, uint64_t bytes);

/* EXPERIMENTAL, as the pool rung is. Puts a memory pool that can be shared in the place of the device's current one
 * (cuDeviceSetMemPool), so that what cuMemAllocAsync and cudaMallocAsync hand out from now on, in this process and on this
 * device, can be lent by the pool rung where a context allows that, each allocation up to the import limit. For PyTorch:
 * before `import torch`, with PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync. `device` is the driver's ordinal, as in
 * gpuloan_device_probe; the driver is GPULOAN_DRIVER's, else the real one; the thread's current CUDA context does not matter
 * and stays current. The device's primary context is made and held until uninstall. One warning in the log says what was done.
 *
 * It cannot help memory that was allocated before: that stays in the former pool and is copied when it is lent; the warning
 * says how much it is. Nor memory of pools that a framework makes for itself (cuMemAllocFromPoolAsync), nor of cuMemAlloc.
 * Freed memory stays with the pool for its next allocations, and what was once lent from it comes back to the device with the
 * pool at the earliest (P8). Do not destroy the pool that was current, nor this one.
 * Errors: STATE (installed already), UNSUPPORTED (no floor POOLS), NO_DEVICE, FORKED, and those of opening a driver. */
GPULOAN_API gpuloan_status gpuloan_pool_install(int32_t device);
/* EXPERIMENTAL. The pool that was current before is so again, unless somebody else's has taken the place of ours. Memory that
 * is still in use stays valid, and can be lent; while there is any, the pool is kept aside: what is freed goes back to the
 * device (except P8), and the pool itself is destroyed at the next install or uninstall that finds it unused. End loans over
 * the pool rung, and their contexts, before. Errors: STATE (none installed), FORKED, DRIVER. */
GPULOAN_API gpuloan_status gpuloan_pool_uninstall(int32_t device);

/* The two functions that PyTorch's torch.cuda.memory.CUDAPluggableAllocator takes from a library by name (PyTorch 2.1 and later),
 * made for torch.cuda.MemPool. What tensors of such a pool lie in is lent by the rung vmm without a copy, at any size, and one block
 * is one descriptor. `device` is PyTorch's ordinal, which is the driver's in this process; the driver is GPULOAN_DRIVER's, else the real one.
 * Both work in the device's primary context, as PyTorch does, and leave the thread's current one as it was; any thread may call them,
 * also while a stream is in graph capture.
 *
 * malloc returns device memory of `bytes`, rounded up to the granularity of VMM memory (2 MiB), for `device` alone: other
 * devices of the process do not reach it. NULL for 0 bytes, and on failure, which PyTorch raises as out of memory;
 * gpuloan_error_text then says why, and so does one line of the log at level error (not in a forked child): DEVICE_MEMORY, UNSUPPORTED (no floor
 * VMM), NO_DEVICE, FORKED, STATE (the process is exiting), and those of opening a driver. `stream` is not used. */
GPULOAN_API void *gpuloan_torch_malloc(size_t bytes, int device, void *stream);
/* Gives memory of gpuloan_torch_malloc back; NULL is no memory. `bytes` and `device` are not used. Waits for the work that is in `stream`,
 * the one that the memory was allocated for, and for no other: PyTorch has waited for those that record_stream named, other
 * callers have to wait themselves. A stream that has not passed within a second, or is in capture, is not waited for any longer:
 * its memory stays mapped until a later call of either function finds that it has. A stream has to be valid until the memory is back.
 * End loans of it before, as with all memory of your own (their release function says when). What is lent without a copy and
 * freed nevertheless is not used again before the loan has ended: the loan keeps the memory, not its address.
 * In a forked child, and once the process is exiting, it does nothing. An address that malloc did not return, or that is freed twice,
 * is left alone, with a line of the log at level error. */
GPULOAN_API void gpuloan_torch_free(void *pointer, size_t bytes, int device, void *stream);

/* For modules written in Python that give DLPack tensors away (gpuloan.py). Who drops one calls its deleter on any thread, without the
 * interpreter's lock, or while an exception is under way, as `f(x.torch(), 1/0)` does; a deleter written in Python would then crash the process or
 * lose the exception. These two need no interpreter: they chain up what was deleted, for the module to take. From then on the tensor's
 * `manager_ctx` is theirs; its memory stays the module's. The structs are DLManagedTensor and DLManagedTensorVersioned (major 1) of dlpack.h. */
GPULOAN_API void gpuloan_dlpack_delete(void *managed);
GPULOAN_API void gpuloan_dlpack_delete_versioned(void *managed);
/* The destructor of a PyCapsule with such a tensor: the same, if nobody has consumed the capsule. */
GPULOAN_API void gpuloan_dlpack_capsule_free(void *capsule);
/* What was deleted since the last call, or NULL. The next one of the chain is in its manager_ctx. */
GPULOAN_API void *gpuloan_dlpack_take(void);

typedef int (*gpuloan_python_test)(void);
typedef void *(*gpuloan_python_object)(void);
typedef int (*gpuloan_python_task)(void *argument);
typedef int (*gpuloan_python_schedule)(gpuloan_python_task task, void *argument);
typedef int (*gpuloan_python_capsule_test)(void *capsule, const char *name);
typedef void *(*gpuloan_python_capsule_pointer)(void *capsule, const char *name);

/* The functions of the interpreter that those above call, by their names in Python's C interface, and the module's own. */
typedef struct gpuloan_dlpack_python {
  size_t size;
  gpuloan_python_test holds_lock;                 /* PyGILState_Check */
  gpuloan_python_object exception;                /* PyErr_Occurred */
  gpuloan_python_schedule call_soon;              /* Py_AddPendingCall */
  gpuloan_python_capsule_test capsule_is_valid;   /* PyCapsule_IsValid */
  gpuloan_python_capsule_pointer capsule_pointer; /* PyCapsule_GetPointer */
  gpuloan_python_task take_all; /* calls gpuloan_dlpack_take and drops what it gives; returns 0. Called with the interpreter's lock and no
                                   exception: at once where that is so, else soon, by the interpreter's main thread */
} gpuloan_dlpack_python;

/* Copies the struct. NULL: no interpreter is called any more; for its end. Of several that are set the last counts. Errors: INVALID (a
 * function is NULL), NO_MEMORY. */
GPULOAN_API gpuloan_status gpuloan_dlpack_python_set(const gpuloan_dlpack_python *functions);

#ifdef __cplusplus
}
#endif

#endif /* GPULOAN_H */
