// SPDX-License-Identifier: MIT
//
// Times of one kind of turn. Machines are shared and noisy, so a figure is a median with its quartiles, and a comparison is
// the median of ratios of blocks that were measured one right after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

namespace gpuloan::tool::bench {

struct Spread {
  double low = 0, middle = 0, high = 0; // quartiles
};

[[nodiscard]] inline Spread spread_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto at = [&](std::size_t quarter) { return values[(values.size() - 1) * quarter / 4]; };
  return {at(1), at(2), at(3)};
}

[[nodiscard]] inline std::uint64_t clock_ns() noexcept {
  timespec now = {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U + static_cast<std::uint64_t>(now.tv_nsec);
}

// One comparison: microseconds (or bytes) of the library and of its floor, block by block.
struct Comparison {
  const char* name = ""; // of the case
  const char* floor = "";
  std::uint64_t bytes = 0;
  std::string what{};   // of a case of the control plane, instead of the bytes
  bool rate = false;    // the ratio is of rates, not of times
  bool sizes = false;   // not times but bytes were measured: more is better
  double calls = -1;    // system calls for each loan; below 0: not counted
  std::vector<double> library_us{}, floor_us{}, ratios{}; // medians of each block (bytes where `sizes`), and their quotient

  void add_block(std::vector<double> floor_block, std::vector<double> library_block) {
    floor_us.push_back(spread_of(std::move(floor_block)).middle);
    library_us.push_back(spread_of(std::move(library_block)).middle);
    ratios.push_back(floor_us.back() > 0 ? library_us.back() / floor_us.back() : 0);
  }
};

// Of gpuloan's over the floor's: times, or rates, or sizes.
[[nodiscard]] inline Spread ratio_of(const Comparison& comparison) {
  const Spread ratio = spread_of(comparison.ratios);
  if (!comparison.rate || comparison.sizes) return ratio;
  return {1 / ratio.high, 1 / ratio.middle, 1 / ratio.low};
}

} // namespace gpuloan::tool::bench
