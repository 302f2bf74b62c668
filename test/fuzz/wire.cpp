// SPDX-License-Identifier: MIT
#include "wire.hpp"

#include <channel/rules.hpp>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

namespace gpuloan::fuzz {
namespace {

constexpr std::size_t kFdsMax = 70; // more than the library lets through

void read_boot_id(unsigned char (&out)[16]) {
  static const std::string text = [] {
    char buffer[64] = {};
    const UniqueFd fd = UniqueFd::take(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
    FUZZ_REQUIRE(fd && ::read(fd.get(), buffer, sizeof buffer - 1) > 0);
    std::string digits;
    for (const char* c = buffer; *c != '\0'; ++c) {
      if (*c != '-' && *c != '\n') digits += *c;
    }
    return digits;
  }();
  for (std::size_t i = 0; i < sizeof out; ++i) out[i] = static_cast<unsigned char>(std::stoul(text.substr(2 * i, 2), nullptr, 16));
}

} // namespace

Wire Wire::open(UniqueFd& theirs) {
  int ends[2] = {-1, -1};
  FUZZ_REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  theirs = UniqueFd::take(ends[0]);
  Wire wire;
  wire.socket_ = UniqueFd::take(ends[1]);
  return wire;
}

bool Wire::send_bytes(std::span<const std::uint8_t> bytes, std::span<const int> fds) {
  if (!socket_) return false;
  iovec part = {const_cast<std::uint8_t*>(bytes.data()), bytes.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) unsigned char control[CMSG_SPACE(sizeof(int) * kFdsMax) + CMSG_SPACE(sizeof(ucred))] = {};
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(sizeof(ucred)) + (fds.empty() ? 0 : CMSG_SPACE(fds.size_bytes()));
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_CREDENTIALS;
  header->cmsg_len = CMSG_LEN(sizeof(ucred));
  const ucred self = {::getpid(), ::getuid(), ::getgid()};
  std::memcpy(CMSG_DATA(header), &self, sizeof self);
  if (!fds.empty()) {
    header = CMSG_NXTHDR(&message, header);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

bool Wire::send(const channel::Record& record, std::span<const std::uint8_t> tail, std::span<const int> fds) {
  std::vector<std::uint8_t> bytes(sizeof record + tail.size());
  std::memcpy(bytes.data(), &record, sizeof record);
  if (!tail.empty()) std::memcpy(bytes.data() + sizeof record, tail.data(), tail.size());
  return send_bytes(bytes, fds);
}

std::optional<Arrived> Wire::receive() {
  if (!socket_ || hung_up_) return std::nullopt;
  unsigned char bytes[sizeof(channel::Record) + channel::kTailMax];
  alignas(cmsghdr) unsigned char control[512];
  iovec part = {bytes, sizeof bytes};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t length = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (length <= 0) {
    hung_up_ = length == 0 || (errno != EAGAIN && errno != EINTR);
    return std::nullopt;
  }
  Arrived out;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; at + sizeof(int) <= header->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + at, sizeof fd);
      out.fds.push_back(UniqueFd::take(fd));
    }
  }
  FUZZ_REQUIRE((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0);
  FUZZ_REQUIRE(length >= static_cast<ssize_t>(sizeof out.record));
  std::memcpy(&out.record, bytes, sizeof out.record);
  const std::size_t tail = static_cast<std::size_t>(length) - sizeof out.record;
  out.tail.resize(tail);
  if (tail != 0) std::memcpy(out.tail.data(), bytes + sizeof out.record, tail);
  const channel::TypeRule* rule = channel::rule_of(out.record.header.type);
  FUZZ_REQUIRE(rule != nullptr && out.record.header.magic == channel::kMagic && out.record.header.reserved == 0);
  FUZZ_REQUIRE(out.fds.size() == rule->fd_count && out.record.header.fd_count == rule->fd_count);
  FUZZ_REQUIRE(tail == out.record.header.tail_bytes && tail <= rule->tail_max);
  return out;
}

channel::Record make(channel::Type type) {
  channel::Record record;
  std::memset(&record, 0, sizeof record);
  record.header.magic = 0x4E4F4C47;
  record.header.version = 1;
  record.header.type = static_cast<std::uint16_t>(type);
  return record;
}

channel::Record make_hello() {
  channel::Record record = make(channel::Type::Hello);
  record.hello.version_min = record.hello.version_max = 1;
  read_boot_id(record.hello.boot_id);
  return record;
}

UniqueFd make_pages(std::size_t bytes, bool sealed) {
  UniqueFd fd = UniqueFd::take(::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  FUZZ_REQUIRE(fd && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
  if (sealed) FUZZ_REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
  return fd;
}

channel::Record send_any(Wire& wire, Input& input) {
  channel::Record record = make(static_cast<channel::Type>(input.byte() % (channel::kTypeMax + 3U)));
  const auto body = input.bytes(input.byte() % 113U);
  if (!body.empty()) std::memcpy(reinterpret_cast<std::uint8_t*>(&record) + sizeof record.header, body.data(), body.size());
  const auto tail = input.bytes(input.byte());
  const channel::TypeRule* rule = channel::rule_of(record.header.type);
  std::vector<UniqueFd> owned;
  std::vector<int> fds;
  for (unsigned i = 0; rule != nullptr && i < rule->fd_count; ++i) {
    owned.push_back(make_pages(4096, input.flag()));
    fds.push_back(owned.back().get());
  }
  record.header.fd_count = static_cast<std::uint16_t>(fds.size());
  record.header.tail_bytes = static_cast<std::uint16_t>(tail.size());
  wire.send(record, tail, fds);
  return record;
}

void send_rubbish(Wire& wire, Input& input) {
  const std::size_t count = input.byte() % 8U == 0 ? kFdsMax - input.byte() % 8U : input.byte() % 3U;
  const std::vector<int> fds(count, STDERR_FILENO);
  wire.send_bytes(input.bytes(input.byte()), fds);
}

} // namespace gpuloan::fuzz
