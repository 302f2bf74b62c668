// SPDX-License-Identifier: MIT
//
// UniqueFd owns one file descriptor. A plain int in a signature is borrowed for the call.
#pragma once

#include <base/status.hpp>

namespace gpuloan {

class UniqueFd {
 public:
  UniqueFd() noexcept = default;
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  ~UniqueFd() { reset(); }

  // Takes ownership; -1 gives an empty one.
  [[nodiscard]] static UniqueFd take(int fd) noexcept { return UniqueFd(fd); }
  // A duplicate with FD_CLOEXEC, numbered 3 or above.
  [[nodiscard]] static Result<UniqueFd> dup(int fd);

  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] explicit operator bool() const noexcept { return fd_ >= 0; }
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }
  void reset(int fd = -1) noexcept;

 private:
  explicit UniqueFd(int fd) noexcept : fd_(fd) {}
  int fd_ = -1;
};

} // namespace gpuloan
