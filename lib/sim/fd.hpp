// SPDX-License-Identifier: MIT
//
// Fd owns a file descriptor. The library has its own small owner because it links nothing of lib/base.
#pragma once

#include <utility>

namespace gpuloan::sim {

class Fd {
 public:
  Fd() noexcept = default;
  explicit Fd(int fd) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();

  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// A duplicate above the standard streams, close-on-exec; -1 and errno where there is none to be had.
[[nodiscard]] int duplicate(int fd) noexcept;

} // namespace gpuloan::sim
