// SPDX-License-Identifier: MIT
#include "syscalls.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <linux/perf_event.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace gpuloan::tool::bench {

SyscallCount::SyscallCount() {
  constexpr const char* kId = "/sys/kernel/tracing/events/raw_syscalls/sys_enter/id";
  std::uint64_t id = 0;
  if (!(std::ifstream(kId) >> id)) {
    refusal_ = std::string("cannot read ") + kId + ": as root, 'mount -t tracefs tracefs /sys/kernel/tracing'";
    return;
  }
  perf_event_attr attributes = {};
  attributes.size = sizeof attributes;
  attributes.type = PERF_TYPE_TRACEPOINT;
  attributes.config = id;
  attributes.inherit = 1;
  fd_ = Fd(static_cast<int>(::syscall(SYS_perf_event_open, &attributes, 0, -1, -1, PERF_FLAG_FD_CLOEXEC)));
  if (fd_.get() < 0) refusal_ = std::string("perf_event_open: ") + std::strerror(errno);
}

std::uint64_t SyscallCount::now() const {
  std::uint64_t count = 0;
  if (fd_.get() >= 0 && ::read(fd_.get(), &count, sizeof count) != sizeof count) count = 0;
  return count;
}

} // namespace gpuloan::tool::bench
