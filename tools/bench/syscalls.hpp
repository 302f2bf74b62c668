// SPDX-License-Identifier: MIT
//
// How many system calls this process makes, counted by the kernel: its tracepoint raw_syscalls:sys_enter. It sees what no
// wrapper of the C library sees, futexes and io_uring's among them, and costs nothing that shows.
#pragma once

#include "../files.hpp"

#include <string>

namespace gpuloan::tool::bench {

class SyscallCount {
 public:
  // Counts the threads that the caller makes from here on, and the caller.
  SyscallCount();
  [[nodiscard]] const std::string& refusal() const noexcept { return refusal_; } // why there is no count; empty: there is
  [[nodiscard]] std::uint64_t now() const;

 private:
  Fd fd_;
  std::string refusal_;
};

} // namespace gpuloan::tool::bench
