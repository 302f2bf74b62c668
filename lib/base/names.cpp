// SPDX-License-Identifier: MIT
//
// Names and sentences of the public enums, without state: the rest of the library uses them too.
#include <gpuloan/gpuloan.h>

#include <cstddef>

namespace {

struct StatusText {
  gpuloan_status status;
  const char *name;
  const char *text;
};

#define ROW(name, text) {name, #name, text}
constexpr StatusText kStatuses[] = {
    ROW(GPULOAN_OK, "success"),
    ROW(GPULOAN_ERR_INVALID, "an argument is wrong"),
    ROW(GPULOAN_ERR_TIMEOUT, "the time given passed first"),
    ROW(GPULOAN_ERR_BUSY, "the object is lent or in use"),
    ROW(GPULOAN_ERR_STATE, "not possible in the present state"),
    ROW(GPULOAN_ERR_CAPTURE, "the stream is in graph capture"),
    ROW(GPULOAN_ERR_WAIT_LIMIT, "the cap on GPU-side waits is reached"),
    ROW(GPULOAN_ERR_LIMIT, "a stated limit is reached"),
    ROW(GPULOAN_ERR_NO_RUNG, "no allowed rung can carry the loan"),
    ROW(GPULOAN_ERR_UNSUPPORTED, "this build, kernel or driver cannot do it"),
    ROW(GPULOAN_ERR_NO_MEMORY, "out of host memory"),
    ROW(GPULOAN_ERR_FD_LIMIT, "out of file descriptors"),
    ROW(GPULOAN_ERR_SYSTEM, "a system call failed"),
    ROW(GPULOAN_ERR_CANCELLED, "the exporter cancelled the loan"),
    ROW(GPULOAN_ERR_FAILED, "the importer's work failed"),
    ROW(GPULOAN_ERR_DENIED, "the exporter denied the request"),
    ROW(GPULOAN_ERR_RETURNED, "the importer returned the loan without finishing its turn"),
    ROW(GPULOAN_ERR_PEER_LOST, "the peer died or closed the connection"),
    ROW(GPULOAN_ERR_PROTOCOL, "the peer broke the protocol and was dropped"),
    ROW(GPULOAN_ERR_VERSION, "the peers have no protocol version in common"),
    ROW(GPULOAN_ERR_KEY, "the key is wrong, used or missing"),
    ROW(GPULOAN_ERR_UID, "the peer runs as another user"),
    ROW(GPULOAN_ERR_HOST, "the peer runs on another host or boot"),
    ROW(GPULOAN_ERR_CONNECT, "nobody listens at the path"),
    ROW(GPULOAN_ERR_ADDRESS_IN_USE, "somebody listens at the path already"),
    ROW(GPULOAN_ERR_DEVICE_MISMATCH, "the peer does not see the device"),
    ROW(GPULOAN_ERR_NO_DRIVER, "no CUDA driver library"),
    ROW(GPULOAN_ERR_STUB_DRIVER, "a stub library was loaded instead of the CUDA driver"),
    ROW(GPULOAN_ERR_OLD_DRIVER, "the CUDA driver is too old"),
    ROW(GPULOAN_ERR_DRIVER_MISMATCH, "the CUDA driver library and kernel module do not match"),
    ROW(GPULOAN_ERR_NO_DEVICE, "no such CUDA device"),
    ROW(GPULOAN_ERR_DEVICE_MEMORY, "out of device memory"),
    ROW(GPULOAN_ERR_DRIVER, "a CUDA driver call failed"),
    ROW(GPULOAN_ERR_DEVICE_LOST, "the CUDA context is unusable"),
    ROW(GPULOAN_ERR_FORKED, "the object belongs to the parent of this forked process"),
    ROW(GPULOAN_ERR_INTERNAL, "a bug in gpuloan"),
};
#undef ROW

const StatusText *find_status(gpuloan_status status) noexcept {
  for (const StatusText &row : kStatuses) {
    if (row.status == status) return &row;
  }
  return nullptr;
}

template <std::size_t N>
const char *pick(const char *const (&names)[N], std::size_t index) noexcept { return index < N ? names[index] : "unknown"; }

} // namespace

extern "C" {

const char *gpuloan_status_name(gpuloan_status status) {
  const StatusText *row = find_status(status);
  return row != nullptr ? row->name : "GPULOAN_ERR_UNKNOWN";
}

const char *gpuloan_status_text(gpuloan_status status) {
  const StatusText *row = find_status(status);
  return row != nullptr ? row->text : "a status that this version does not know";
}

const char *gpuloan_step_name(gpuloan_step step) {
  static constexpr const char *kNames[] = {"EXPORT", "READY", "IMPORT", "WRITE", "DONE", "UNIMPORT", "ACK", "RELEASE"};
  return pick(kNames, static_cast<std::size_t>(step));
}

const char *gpuloan_rung_name(uint32_t rung) {
  switch (rung) {
    case GPULOAN_RUNG_NONE:
      return "none";
    case GPULOAN_RUNG_VMM:
      return "vmm";
    case GPULOAN_RUNG_POOL:
      return "pool";
    case GPULOAN_RUNG_IPC:
      return "ipc";
    case GPULOAN_RUNG_HOST:
      return "host";
    default:
      return "unknown";
  }
}

const char *gpuloan_gate_name(uint32_t gate) {
  static constexpr const char *kNames[] = {"auto", "memop", "event", "host"};
  return pick(kNames, gate);
}

const char *gpuloan_engine_name(uint32_t engine) {
  static constexpr const char *kNames[] = {"auto", "epoll", "io_uring"};
  return pick(kNames, engine);
}

const char *gpuloan_memory_state_name(uint32_t state) {
  static constexpr const char *kNames[] = {"held", "released", "quarantined", "retired", "surrendered"};
  return pick(kNames, state);
}

} // extern "C"
