// SPDX-License-Identifier: MIT
//
// How long a caller spins for a turn before it sleeps: while turns are short, twice as long as the last one took, since the
// way into sleep and back costs more than such a turn; where they are long, hardly at all.
#pragma once

#include <algorithm>
#include <cstdint>

namespace gpuloan::loan {

inline constexpr std::uint64_t kSpinNs = 20'000;
inline constexpr std::uint64_t kSpinMaxNs = 1'000'000;
[[nodiscard]] bool may_spin() noexcept; // more than one CPU

class Patience {
 public:
  [[nodiscard]] std::uint64_t spin_ns() const noexcept {
    return last_ns_ > kSpinMaxNs / 2 ? kSpinNs : std::max(kSpinNs, last_ns_ * 2);
  }
  void waited(std::uint64_t ns) noexcept { last_ns_ = ns; }

 private:
  std::uint64_t last_ns_ = 0;
};

} // namespace gpuloan::loan
