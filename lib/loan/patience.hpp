// SPDX-License-Identifier: MIT
//
// How long a caller spins for a turn before it sleeps: while turns are short, twice as long as the last one took, since the
// way into sleep and back costs more than such a turn. Where they are longer it sleeps first, until shortly before the time that the last
// one took, since a sleeper is woken for a word of the device's only by the next look at it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace gpuloan::loan {

inline constexpr std::uint64_t kSpinNs = 20'000;
inline constexpr std::uint64_t kSpinMaxNs = 1'000'000;
inline constexpr std::uint64_t kForeseenNs = 20'000'000; // what takes longer comes when it comes
[[nodiscard]] bool may_spin() noexcept; // more than one CPU

class Patience {
 public:
  [[nodiscard]] std::uint64_t spin_ns() const noexcept {
    return last_ns_ > kSpinMaxNs / 2 ? kSpinNs : std::max(kSpinNs, last_ns_ * 2);
  }
  struct Plan {
    std::uint64_t sleep_ns, spin_ns; // first to sleep, then to spin
  };
  [[nodiscard]] Plan plan() const noexcept {
    if (last_ns_ <= kSpinMaxNs / 2 || last_ns_ > kForeseenNs) return {0, spin_ns()};
    return {last_ns_ - std::min(last_ns_ / 4 + 100'000, kSpinMaxNs / 2), std::min(last_ns_ / 2, kSpinMaxNs)};
  }
  void waited(std::uint64_t ns) noexcept { last_ns_ = ns; }

 private:
  std::uint64_t last_ns_ = 0;
};

} // namespace gpuloan::loan
