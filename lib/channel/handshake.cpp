// SPDX-License-Identifier: MIT
//
// The two questions of a handshake: may this HELLO come in, and what did the exporter answer. Pure functions of a record
// and of what the kernel said about its sender; they change nothing and send nothing.
//
// The order of the checks is fixed, so that the answer to a stranger says as little as possible: first who it is, then
// where it runs, then what it speaks, then what it lists. Only after that does its key come up.
#include <channel/handshake.hpp>

#include <channel/rules.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace gpuloan::channel {
namespace {

constexpr std::int32_t kStatusEnd = -100; // all statuses lie above, also those of later versions
constexpr const char* kBootIdPath = "/proc/sys/kernel/random/boot_id";

// Value of a hexadecimal digit, or -1.
int digit(char c) noexcept {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// 32 digits, dashes anywhere between bytes.
bool parse_uuid(std::string_view text, BootId& out) noexcept {
  std::size_t bytes = 0;
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] == '-') {
      ++at;
      continue;
    }
    const int high = digit(text[at]);
    const int low = at + 1 < text.size() ? digit(text[at + 1]) : -1;
    if (high < 0 || low < 0 || bytes == out.size()) return false;
    out[bytes++] = static_cast<unsigned char>(high * 16 + low);
    at += 2;
  }
  return bytes == out.size();
}

Result<std::vector<DeviceEntry>> read_devices(const Received& received, std::uint32_t count) {
  if (count > kMaxDevices) {
    return fail(GPULOAN_ERR_PROTOCOL, std::string(type_name(received.type())) + " lists " + std::to_string(count) +
                                          " devices, at most " + std::to_string(kMaxDevices));
  }
  if (received.tail.size() != count * sizeof(DeviceEntry)) {
    return fail(GPULOAN_ERR_PROTOCOL, std::string(type_name(received.type())) + " lists " + std::to_string(count) +
                                          " devices in a tail of " + std::to_string(received.tail.size()) + " bytes");
  }
  std::vector<DeviceEntry> devices(count);
  if (count != 0) std::memcpy(devices.data(), received.tail.data(), received.tail.size());
  return devices;
}

std::string range_text(unsigned low, unsigned high) { return std::to_string(low) + " to " + std::to_string(high); }

Result<void> check_sender(const Sender& sender, uid_t own_uid) {
  if (!sender.known) return fail(GPULOAN_ERR_UID, "the kernel named no sender of the HELLO (SCM_CREDENTIALS)");
  if (sender.uid == own_uid) return {};
  return fail(GPULOAN_ERR_UID, "the peer runs as user " + std::to_string(sender.uid) + ", this process as user " +
                                   std::to_string(own_uid));
}

Result<std::uint16_t> common_version(const Hello& hello) {
  const std::uint16_t highest = std::min(hello.version_max, kVersionMax);
  if (hello.version_min <= hello.version_max && highest >= std::max(hello.version_min, kVersionMin)) return highest;
  return fail(GPULOAN_ERR_VERSION, "the peer speaks protocol versions " +
                                       range_text(hello.version_min, hello.version_max) + ", this library " +
                                       range_text(kVersionMin, kVersionMax) + ": use one release of gpuloan on both sides");
}

} // namespace

Result<BootId> read_boot_id() {
  const UniqueFd fd = UniqueFd::take(::open(kBootIdPath, O_RDONLY | O_CLOEXEC));
  if (!fd) return fail_errno("open(/proc/sys/kernel/random/boot_id)", errno);
  char text[64] = {};
  const ssize_t length = ::read(fd.get(), text, sizeof(text));
  if (length < 0) return fail_errno("read(/proc/sys/kernel/random/boot_id)", errno);
  const std::string_view line(text, static_cast<std::size_t>(length));
  BootId boot = {};
  if (parse_uuid(line.substr(0, line.find('\n')), boot)) return boot;
  return fail(GPULOAN_ERR_SYSTEM, std::string(kBootIdPath) + " holds no UUID");
}

Result<HelloInfo> check_hello(const Received& received, uid_t own_uid, const BootId& own_boot) {
  if (received.type() != Type::Hello) {
    return fail(GPULOAN_ERR_PROTOCOL, std::string(type_name(received.type())) + " came where HELLO was due");
  }
  const Hello& hello = received.record->hello;
  GPULOAN_TRY(check_sender(received.sender, own_uid));
  if (std::memcmp(hello.boot_id, own_boot.data(), own_boot.size()) != 0) {
    return fail(GPULOAN_ERR_HOST, "the peer runs on another host, or on this one before it was booted");
  }
  const auto version = common_version(hello);
  if (!version) return forward(Error(version.error()));
  auto devices = read_devices(received, hello.device_count);
  if (!devices) return forward(std::move(devices.error()));
  if (hello.wants_device != 0 && devices->empty()) {
    return fail(GPULOAN_ERR_PROTOCOL, "HELLO wants a device and lists none");
  }
  return HelloInfo{*version, std::move(*devices), hello.has_key != 0, hello.wants_device != 0};
}

Error refusal(const Received& received) {
  const std::int32_t status = received.record->notice.status;
  // Of those a call on this side alone may end with: they say whose a descriptor is (gpuloan_context_adopt).
  const bool own = status == GPULOAN_ERR_INVALID || status == GPULOAN_ERR_STATE || status == GPULOAN_ERR_FORKED;
  if (status < 0 && status > kStatusEnd && !own) return {static_cast<gpuloan_status>(status), "refused by the exporter: " + readable_text(received)};
  return {GPULOAN_ERR_PROTOCOL, "REFUSED carries the status " + std::to_string(status)};
}

Result<WelcomeInfo> check_welcome(const Received& received) {
  if (received.type() == Type::Refused) return forward(refusal(received));
  if (received.type() != Type::Welcome) {
    return fail(GPULOAN_ERR_PROTOCOL, std::string(type_name(received.type())) + " came where WELCOME was due");
  }
  const Welcome& welcome = received.record->welcome;
  if (welcome.version < kVersionMin || welcome.version > kVersionMax) {
    return fail(GPULOAN_ERR_VERSION, "the exporter chose protocol version " + std::to_string(welcome.version) +
                                         ", this library speaks " + range_text(kVersionMin, kVersionMax));
  }
  if (welcome.slots == 0) return fail(GPULOAN_ERR_PROTOCOL, "WELCOME offers no slots");
  auto devices = read_devices(received, welcome.device_count);
  if (!devices) return forward(std::move(devices.error()));
  return WelcomeInfo{welcome.version, welcome.slots, std::move(*devices)};
}

std::string readable_text(const Received& received) {
  const std::string_view text = received.tail_text();
  std::string out(text.substr(0, GPULOAN_TEXT_MAX - 1));
  for (char& c : out) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) c = '?';
  }
  return out;
}

UniqueFd peer_pidfd(Sender& sender) noexcept {
  if (sender.pidfd) return std::move(sender.pidfd);
  if (!sender.known || sender.pid <= 0) return {};
  // By number: the header of glibc 2.36 declares pidfd_open() without C linkage. The descriptor is close-on-exec.
  return UniqueFd::take(static_cast<int>(::syscall(SYS_pidfd_open, sender.pid, 0)));
}

} // namespace gpuloan::channel
