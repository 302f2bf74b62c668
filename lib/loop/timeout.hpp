// SPDX-License-Identifier: MIT
//
// The end of one wait(): computed once, so that rounds that deliver nothing (a signal, a stale completion) do not
// stretch it. A wait that only looks reads no clock.
#pragma once

#include <base/clock.hpp>

#include <algorithm>
#include <ctime>

namespace gpuloan::loop {

class WaitLimit {
 public:
  explicit WaitLimit(std::uint64_t timeout_ns) noexcept : timeout_ns_(std::min(timeout_ns, kForever)) {
    if (timeout_ns_ != 0) end_ns_ = now_ns() + timeout_ns_;
  }
  // What is left for the next round; 0 once it is over.
  [[nodiscard]] std::uint64_t left_ns() noexcept {
    if (first_ || timeout_ns_ == 0) {
      first_ = false;
      return timeout_ns_;
    }
    const std::uint64_t now = now_ns();
    return now >= end_ns_ ? 0 : end_ns_ - now;
  }

 private:
  static constexpr std::uint64_t kForever = std::uint64_t{1} << 61; // 73 years, and no sum with it overflows
  std::uint64_t timeout_ns_;
  std::uint64_t end_ns_ = 0;
  bool first_ = true;
};

} // namespace gpuloan::loop
