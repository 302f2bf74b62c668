// SPDX-License-Identifier: MIT
#include "pair.hpp"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>

namespace gpuloan::tool::bench {
namespace {

[[noreturn]] void fail_errno(const char* call) {
  if (errno == EAGAIN) throw Failure(ExitTimeout, "the other process of the measurement did not answer in time");
  if (errno == EPIPE || errno == ECONNRESET) throw Failure(ExitPeerLost, "the other process of the measurement is gone");
  throw Failure(ExitSystem, std::string(call) + ": " + std::strerror(errno));
}

} // namespace

Channel::Channel(Fd socket, std::uint32_t timeout_ms) : socket_(std::move(socket)) {
  const timeval limit = {static_cast<time_t>(timeout_ms / 1000), static_cast<suseconds_t>(timeout_ms % 1000 * 1000)};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    if (::setsockopt(socket_.get(), SOL_SOCKET, option, &limit, sizeof limit) != 0) fail_errno("setsockopt");
  }
}

void Channel::send(const Message& message, int fd) {
  iovec part = {const_cast<Message*>(&message), sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (fd >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* first = CMSG_FIRSTHDR(&header);
    first->cmsg_level = SOL_SOCKET;
    first->cmsg_type = SCM_RIGHTS;
    first->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(first), &fd, sizeof fd);
  }
  while (::sendmsg(socket_.get(), &header, MSG_NOSIGNAL) < 0) {
    check_interrupted();
    if (errno != EINTR) fail_errno("sendmsg");
  }
}

Message Channel::receive(Fd* fd) {
  Message message;
  iovec part = {&message, sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t got;
  while ((got = ::recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC)) < 0) {
    check_interrupted();
    if (errno != EINTR) fail_errno("recvmsg");
  }
  if (got == 0) throw Failure(ExitPeerLost, "the other process of the measurement is gone");
  if (const cmsghdr* first = CMSG_FIRSTHDR(&header); first != nullptr && first->cmsg_type == SCM_RIGHTS) {
    int raw = -1;
    std::memcpy(&raw, CMSG_DATA(first), sizeof raw);
    Fd came(raw);
    if (fd != nullptr) *fd = std::move(came);
  }
  return message;
}

bool Channel::waits(Milliseconds timeout) const {
  pollfd ready = {socket_.get(), POLLIN, 0};
  return ::poll(&ready, 1, static_cast<int>(timeout.count())) > 0;
}

Message Channel::expect(Op op) {
  const Message answer = receive();
  if (answer.op == Op::Failed) throw Failure(answer.value != 0 ? static_cast<int>(answer.value) : ExitLoanFailed, std::string("the worker: ") + answer.text);
  if (answer.op != op) throw Failure(ExitInternal, "the worker answered something else");
  return answer;
}

void plain_send(const Fd& end, std::span<const std::byte> record) {
  iovec part = {const_cast<std::byte*>(record.data()), record.size()};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (::sendmsg(end.get(), &header, MSG_NOSIGNAL) < 0) fail_errno("sendmsg");
}

void plain_receive(const Fd& end, std::span<std::byte> record) {
  iovec part = {record.data(), record.size()};
  alignas(cmsghdr) char control[64] = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  const ssize_t got = ::recvmsg(end.get(), &header, MSG_CMSG_CLOEXEC);
  if (got < 0) fail_errno("recvmsg");
  if (got == 0) throw Failure(ExitPeerLost, "the other process of the measurement is gone");
}

void pin(std::optional<std::size_t> index) {
  static const cpu_set_t all = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (::sched_getaffinity(0, sizeof set, &set) != 0) fail_errno("sched_getaffinity");
    return set;
  }();
  if (CPU_COUNT(&all) < 2) return;
  cpu_set_t set = all;
  if (index) {
    CPU_ZERO(&set);
    std::size_t left = *index;
    for (std::size_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&set) == 0; ++cpu) {
      if (CPU_ISSET(cpu, &all) && left-- == 0) CPU_SET(cpu, &set);
    }
  }
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) { // one may have ended meanwhile
    static_cast<void>(::sched_setaffinity(std::stoi(task.path().filename()), sizeof set, &set));
  }
}

void raise_descriptor_limit() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) fail_errno("getrlimit");
  limit.rlim_cur = limit.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) fail_errno("setrlimit");
}

} // namespace gpuloan::tool::bench
