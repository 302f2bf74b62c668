// SPDX-License-Identifier: MIT
//
// Names and sentences of the public enums, versions, the log, keys as text.
#include <abi/abi.hpp>

#include <base/log.hpp>

#include <cctype>

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

#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)
const char *gpuloan_version_text(void) {
  return TEXT(GPULOAN_VERSION_MAJOR) "." TEXT(GPULOAN_VERSION_MINOR) "." TEXT(GPULOAN_VERSION_PATCH);
}

void gpuloan_log_set(gpuloan_log_function function, void *user, gpuloan_log_level level) { gpuloan::log_set(function, user, level); }

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

void gpuloan_key_format(const gpuloan_key *key, char out_text[GPULOAN_KEY_TEXT_BYTES]) {
  static constexpr char kDigits[] = "0123456789abcdef";
  if (key == nullptr || out_text == nullptr) return;
  for (std::size_t index = 0; index < GPULOAN_KEY_BYTES; ++index) {
    out_text[2 * index] = kDigits[key->bytes[index] >> 4];
    out_text[2 * index + 1] = kDigits[key->bytes[index] & 15];
  }
  out_text[2 * GPULOAN_KEY_BYTES] = '\0';
}

gpuloan_status gpuloan_key_parse(const char *text, gpuloan_key *out_key) {
  return gpuloan::abi::guard([&]() -> gpuloan::Result<void> {
    if (text == nullptr || out_key == nullptr) return gpuloan::fail(GPULOAN_ERR_INVALID, "an argument is NULL");
    std::string_view digits(text);
    const auto space = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
    while (!digits.empty() && space(digits.front())) digits.remove_prefix(1);
    while (!digits.empty() && space(digits.back())) digits.remove_suffix(1);
    gpuloan_key key = {};
    if (digits.size() != 2 * sizeof key.bytes) return gpuloan::fail(GPULOAN_ERR_INVALID, "a key has 64 hexadecimal digits, this has " + std::to_string(digits.size()) + " characters");
    for (std::size_t index = 0; index < digits.size(); ++index) {
      const char c = digits[index];
      const bool decimal = c >= '0' && c <= '9';
      const bool letter = (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
      if (!decimal && !letter) return gpuloan::fail(GPULOAN_ERR_INVALID, "a key has only hexadecimal digits");
      const int value = decimal ? c - '0' : (c | 0x20) - 'a' + 10;
      key.bytes[index / 2] = static_cast<unsigned char>(key.bytes[index / 2] << 4 | value);
    }
    *out_key = key;
    return {};
  });
}

} // extern "C"
