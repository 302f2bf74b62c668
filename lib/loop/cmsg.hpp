// SPDX-License-Identifier: MIT
//
// The walk over a control buffer, the only code that reads one. It copies each header out, checks its length against
// what is left, and trusts nothing else, so it may be given any bytes (a fuzzer does).
//
// Descriptors in a control buffer are already open in this process: whoever drops a message closes them.
#pragma once

#include <base/unique_fd.hpp>

#include <cstddef>
#include <cstring>
#include <span>
#include <sys/socket.h>

namespace gpuloan::loop {

inline constexpr int kScmPidfd = 4; // SCM_PIDFD (Linux 6.5), newer than the headers of Debian 12

struct ControlItem {
  int level = 0;
  int type = 0;
  std::span<const std::byte> data;
};

// Calls visit(ControlItem) for each header. False when a length does not fit; what came before it was visited.
template <typename Visit>
bool walk_control(std::span<const std::byte> control, Visit&& visit) {
  constexpr std::size_t kHead = CMSG_LEN(0);
  while (control.size() >= sizeof(cmsghdr)) {
    cmsghdr header = {};
    std::memcpy(&header, control.data(), sizeof(header));
    const std::size_t length = header.cmsg_len;
    if (length < kHead || length > control.size()) return false;
    visit(ControlItem{header.cmsg_level, header.cmsg_type, control.subspan(kHead, length - kHead)});
    const std::size_t step = CMSG_ALIGN(length);
    if (step >= control.size()) return true; // the last header may lack its padding
    control = control.subspan(step);
  }
  return control.empty();
}

// Calls visit(int) for each number in an SCM_RIGHTS or SCM_PIDFD item. A pidfd that the kernel could not make arrives
// as a negative errno and is left out.
template <typename Visit>
void for_each_descriptor(const ControlItem& item, Visit&& visit) {
  if (item.level != SOL_SOCKET || (item.type != SCM_RIGHTS && item.type != kScmPidfd)) return;
  for (std::size_t at = 0; at + sizeof(int) <= item.data.size(); at += sizeof(int)) {
    int fd = -1;
    std::memcpy(&fd, item.data.data() + at, sizeof(fd));
    if (fd >= 0) visit(fd);
  }
}

// For a message that nobody will look at.
inline void close_descriptors(std::span<const std::byte> control) noexcept {
  walk_control(control, [](const ControlItem& item) {
    for_each_descriptor(item, [](int fd) { UniqueFd::take(fd).reset(); });
  });
}

} // namespace gpuloan::loop
