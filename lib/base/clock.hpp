// SPDX-License-Identifier: MIT
//
// One clock for everything: CLOCK_MONOTONIC, which all processes of a host share, so that the steps of a loan taken in
// two processes can be put in one row.
#pragma once

#include <cstdint>
#include <ctime>

namespace gpuloan {

[[nodiscard]] inline std::uint64_t now_ns() noexcept {
  timespec time = {};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000U + static_cast<std::uint64_t>(time.tv_nsec);
}

// A point in time that a blocking call may not pass.
class Deadline {
 public:
  [[nodiscard]] static Deadline after_ms(std::uint32_t milliseconds) noexcept {
    return Deadline(now_ns() + std::uint64_t{milliseconds} * 1'000'000U);
  }
  [[nodiscard]] static Deadline at(std::uint64_t ns) noexcept { return Deadline(ns); } // of now_ns()
  [[nodiscard]] bool passed() const noexcept { return now_ns() >= at_; }
  [[nodiscard]] std::uint64_t at_ns() const noexcept { return at_; }
  [[nodiscard]] std::uint64_t left_ns() const noexcept {
    const std::uint64_t now = now_ns();
    return now >= at_ ? 0 : at_ - now;
  }

 private:
  explicit Deadline(std::uint64_t at) noexcept : at_(at) {}
  std::uint64_t at_;
};

} // namespace gpuloan
