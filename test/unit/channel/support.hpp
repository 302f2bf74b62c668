// SPDX-License-Identifier: MIT
//
// What the tests of the channel share: a socket pair, one receive as an engine does it, and hand-made messages.
#pragma once

#include <doctest/doctest.h>

#include <channel/socket.hpp>
#include <loop/cmsg.hpp>

#include <array>
#include <cerrno>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <optional>
#include <poll.h>
#include <string>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

namespace gpuloan::channel {

inline std::size_t open_descriptors() {
  DIR* directory = ::opendir("/proc/self/fd");
  REQUIRE(directory != nullptr);
  std::size_t count = 0;
  while (const dirent* entry = ::readdir(directory)) count += entry->d_name[0] != '.' ? 1U : 0U;
  ::closedir(directory);
  return count;
}

// First object of a test case: checks, after all others are gone, that every descriptor is.
class DescriptorGuard {
 public:
  DescriptorGuard() : before_(open_descriptors()) {}
  ~DescriptorGuard() { CHECK(open_descriptors() == before_); }

 private:
  std::size_t before_;
};

struct Pair {
  UniqueFd ours;
  UniqueFd peer;
};

inline Pair make_pair(int type = SOCK_SEQPACKET) {
  int ends[2] = {-1, -1};
  REQUIRE(::socketpair(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  return {UniqueFd::take(ends[0]), UniqueFd::take(ends[1])};
}

inline UniqueFd make_eventfd() {
  UniqueFd fd = UniqueFd::take(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  REQUIRE(fd);
  return fd;
}

inline bool has_flags(int fd, int descriptor_flags, int status_flags) {
  return (::fcntl(fd, F_GETFD) & descriptor_flags) == descriptor_flags &&
         (::fcntl(fd, F_GETFL) & status_flags) == status_flags;
}

// A message with its own memory.
struct Letter {
  alignas(16) std::array<std::byte, loop::kDataBytes> data = {};
  alignas(16) std::array<std::byte, loop::kControlBytes> control = {};
  std::size_t data_bytes = 0;
  std::size_t control_bytes = 0;
  int flags = 0;

  [[nodiscard]] loop::Message message() const {
    return {std::span(data).first(data_bytes), std::span(control).first(control_bytes), flags};
  }
  void set(const Record& record, std::size_t tail_bytes = 0) {
    std::memcpy(data.data(), &record, sizeof(record));
    data_bytes = sizeof(record) + tail_bytes;
  }
  // Appends a control item.
  void add(int type, const void* bytes, std::size_t size) {
    cmsghdr header = {};
    header.cmsg_level = SOL_SOCKET;
    header.cmsg_type = type;
    header.cmsg_len = CMSG_LEN(size);
    REQUIRE(control_bytes + CMSG_SPACE(size) <= control.size());
    std::memcpy(control.data() + control_bytes, &header, sizeof(header));
    std::memcpy(control.data() + control_bytes + CMSG_LEN(0), bytes, size);
    control_bytes += CMSG_SPACE(size);
  }
  // Fresh descriptors, as the kernel would have put them there.
  void add_fds(std::size_t count) {
    std::vector<int> fds;
    for (std::size_t i = 0; i < count; ++i) fds.push_back(make_eventfd().release());
    add(SCM_RIGHTS, fds.data(), fds.size() * sizeof(int));
  }
};

// What is queued next on `socket`, received with the flags of an engine. Nothing there fails the test.
inline void receive(int socket, Letter& out) {
  iovec vector = {out.data.data(), out.data.size()};
  msghdr header = {};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  header.msg_control = out.control.data();
  header.msg_controllen = out.control.size();
  const ssize_t count = ::recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  REQUIRE(count > 0);
  out.data_bytes = static_cast<std::size_t>(count);
  out.control_bytes = header.msg_controllen;
  out.flags = header.msg_flags;
}

// Refused with `status` and a text that contains `part`.
template <typename T>
void check_fails(const Result<T>& result, gpuloan_status status, std::string_view part) {
  REQUIRE_FALSE(result.has_value());
  CHECK(result.error().status == status);
  INFO(result.error().text);
  CHECK(result.error().text.find(part) != std::string::npos);
}

} // namespace gpuloan::channel
