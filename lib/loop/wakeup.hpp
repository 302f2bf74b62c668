// SPDX-License-Identifier: MIT
//
// Wakeup: an eventfd that any thread may raise and the engine's thread clears. The count persists, so a raise that comes
// before the wait is not lost (KERNEL-FACTS 1: flags in shared memory are where wakes get lost).
#pragma once

#include <base/unique_fd.hpp>

#include <cerrno>
#include <sys/eventfd.h>

namespace gpuloan::loop {

class Wakeup {
 public:
  [[nodiscard]] static Result<Wakeup> create() {
    UniqueFd fd = UniqueFd::take(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!fd) return fail_errno("eventfd", errno);
    return Wakeup(std::move(fd));
  }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  // EAGAIN means that the count is at its maximum, so it is readable all the same.
  void raise() const noexcept { static_cast<void>(::eventfd_write(fd_.get(), 1)); }
  void clear() const noexcept {
    eventfd_t count = 0;
    static_cast<void>(::eventfd_read(fd_.get(), &count));
  }

 private:
  explicit Wakeup(UniqueFd fd) noexcept : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

} // namespace gpuloan::loop
