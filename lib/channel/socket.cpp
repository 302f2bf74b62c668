// SPDX-License-Identifier: MIT
//
// One non-blocking send, and what a connected socket has to be. A record is one message: it is sent whole or not at all,
// so there is no partial state; Full and Lost are all that a sender has to tell apart.
#include <channel/socket.hpp>

#include <loop/cmsg.hpp>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace gpuloan::channel {
namespace {

// Newer than the headers of Debian 12: Linux 6.5. Where the kernel lacks it, credentials name the sender.
constexpr int kSoPasspidfd = 76;

// Ancillary data under construction.
class ControlBuffer {
 public:
  void add(int type, const void* data, std::size_t bytes) noexcept {
    if (bytes == 0) return;
    cmsghdr header = {};
    header.cmsg_level = SOL_SOCKET;
    header.cmsg_type = type;
    header.cmsg_len = static_cast<decltype(header.cmsg_len)>(CMSG_LEN(bytes));
    std::memcpy(bytes_.data() + used_, &header, sizeof(header));
    std::memcpy(bytes_.data() + used_ + CMSG_LEN(0), data, bytes);
    used_ += CMSG_SPACE(bytes);
  }
  void apply(msghdr& message) noexcept {
    message.msg_control = used_ != 0 ? bytes_.data() : nullptr;
    message.msg_controllen = static_cast<decltype(message.msg_controllen)>(used_);
  }

 private:
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(kMaxFds * sizeof(int)) + CMSG_SPACE(sizeof(ucred))> bytes_ = {};
  std::size_t used_ = 0;
};

// 0, or a positive errno.
int send_once(int socket, msghdr& message) noexcept {
  for (;;) {
    if (::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return 0;
    if (errno != EINTR) return errno;
  }
}

int option(int socket, int name) noexcept {
  int value = -1;
  socklen_t size = sizeof(value);
  return ::getsockopt(socket, SOL_SOCKET, name, &value, &size) == 0 ? value : -1;
}

} // namespace

namespace {

SendResult send_parts(int socket, std::span<iovec> parts, bool hello, std::span<const int> fds) noexcept {
  msghdr message = {};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  ControlBuffer control;
  control.add(SCM_RIGHTS, fds.data(), fds.size_bytes());
  ControlBuffer with_identity = control;
  if (hello) {
    // Attached by hand: a HELLO may be sent before the other side asked the kernel to name senders.
    const ucred self = {::getpid(), ::getuid(), ::getgid()};
    with_identity.add(SCM_CREDENTIALS, &self, sizeof(self));
  }
  with_identity.apply(message);
  int error = send_once(socket, message);
  if (hello && (error == EINVAL || error == EPERM)) { // a user namespace without a mapping for this user
    control.apply(message);
    error = send_once(socket, message);
  }
  switch (error) {
    case 0:
      return SendResult::Sent;
    case EAGAIN:
    case ENOBUFS:
    case ENOMEM:
    case ETOOMANYREFS: // the user's descriptors in flight: passes when anyone receives some
      return SendResult::Full;
    default:
      return SendResult::Lost;
  }
}

void fill_counts(Record& record, std::size_t tail, std::size_t fds) noexcept {
  record.header.fd_count = static_cast<std::uint16_t>(fds);
  record.header.tail_bytes = static_cast<std::uint16_t>(tail);
}

constexpr std::uint16_t kHello = static_cast<std::uint16_t>(Type::Hello);

} // namespace

SendResult send_record(int socket, Record record, std::span<const std::byte> tail, std::span<const int> fds) noexcept {
  assert(tail.size() <= kTailMax && fds.size() <= kMaxFds);
  if (tail.size() > kTailMax || fds.size() > kMaxFds) return SendResult::Lost;
  fill_counts(record, tail.size(), fds.size());
  iovec parts[2] = {{&record, sizeof(record)}, {const_cast<std::byte*>(tail.data()), tail.size()}};
  return send_parts(socket, std::span(parts).first(tail.empty() ? 1 : 2), record.header.type == kHello, fds);
}

std::vector<std::byte> message_of(Record record, std::span<const std::byte> tail, std::size_t fds) {
  fill_counts(record, tail.size(), fds);
  std::vector<std::byte> bytes(sizeof(record) + tail.size());
  std::memcpy(bytes.data(), &record, sizeof(record));
  std::copy(tail.begin(), tail.end(), bytes.begin() + sizeof(record));
  return bytes;
}

SendResult send_message(int socket, std::span<const std::byte> message, std::span<const int> fds) noexcept {
  Header first = {};
  assert(message.size() >= kRecordBytes && fds.size() <= kMaxFds);
  std::memcpy(&first, message.data(), sizeof(first));
  iovec part = {const_cast<std::byte*>(message.data()), message.size()};
  return send_parts(socket, std::span(&part, 1), first.type == kHello, fds);
}

bool Bundle::add(Record record, std::span<const std::byte> tail) noexcept {
  const std::size_t start = bundle_step(used_);
  if (start + sizeof(record) + tail.size() > bytes_.size()) return false;
  fill_counts(record, tail.size(), 0);
  std::fill(bytes_.begin() + static_cast<std::ptrdiff_t>(used_), bytes_.begin() + static_cast<std::ptrdiff_t>(start), std::byte{0});
  std::memcpy(bytes_.data() + start, &record, sizeof(record));
  std::copy(tail.begin(), tail.end(), bytes_.begin() + static_cast<std::ptrdiff_t>(start + sizeof(record)));
  used_ = start + sizeof(record) + tail.size();
  return true;
}

Result<void> enable_identity(int socket) {
  const int on = 1;
  if (::setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) != 0) {
    return fail_errno("setsockopt(SO_PASSCRED)", errno);
  }
  static_cast<void>(::setsockopt(socket, SOL_SOCKET, kSoPasspidfd, &on, sizeof(on)));
  return {};
}

void disable_identity(int socket) noexcept {
  const int off = 0;
  static_cast<void>(::setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &off, sizeof(off)));
  static_cast<void>(::setsockopt(socket, SOL_SOCKET, kSoPasspidfd, &off, sizeof(off)));
}

Result<void> check_inherited(int fd) {
  const std::string name = "descriptor " + std::to_string(fd);
  if (::fcntl(fd, F_GETFD) < 0) return errno == EBADF ? fail(GPULOAN_ERR_INVALID, name + " is not open") : fail_errno("fcntl(F_GETFD)", errno);
  for (const auto& [which, wanted] : {std::pair{SO_DOMAIN, AF_UNIX}, {SO_TYPE, int{SOCK_SEQPACKET}}}) {
    const int found = option(fd, which);
    if (found < 0 && errno != ENOTSOCK) return fail_errno("getsockopt", errno);
    if (found != wanted) return fail(GPULOAN_ERR_INVALID, name + " is no AF_UNIX SOCK_SEQPACKET socket");
  }
  sockaddr_un peer = {};
  socklen_t size = sizeof(peer);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) {
    if (errno != ENOTCONN && errno != EINVAL) return fail_errno("getpeername", errno);
    return fail(GPULOAN_ERR_INVALID, errno_text((name + " is not connected: getpeername").c_str(), errno));
  }
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) return fail_errno("fcntl(F_SETFL)", errno);
  if (::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) return fail_errno("fcntl(F_SETFD)", errno);
  return {};
}

} // namespace gpuloan::channel
