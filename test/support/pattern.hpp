// SPDX-License-Identifier: MIT
//
// Bytes that a seed and a place decide, so that two processes agree on them without exchanging any, and so that a shifted,
// stale or partly written range shows.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

namespace loan_test {

[[nodiscard]] constexpr std::uint64_t pattern_word(std::uint64_t seed, std::uint64_t index) noexcept {
  std::uint64_t z = (seed << 40) + index + 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

inline void write_pattern(std::span<unsigned char> bytes, std::uint64_t seed) noexcept {
  for (std::size_t at = 0; at < bytes.size(); at += 8) {
    const std::uint64_t word = pattern_word(seed, at / 8);
    std::memcpy(bytes.data() + at, &word, bytes.size() - at < 8 ? bytes.size() - at : 8);
  }
}

// The first offset at which `bytes` are not the pattern; their size when there is none.
[[nodiscard]] inline std::size_t pattern_mismatch(std::span<const unsigned char> bytes, std::uint64_t seed) noexcept {
  for (std::size_t at = 0; at < bytes.size(); at += 8) {
    const std::uint64_t word = pattern_word(seed, at / 8);
    const std::size_t length = bytes.size() - at < 8 ? bytes.size() - at : 8;
    unsigned char wanted[8];
    std::memcpy(wanted, &word, 8);
    for (std::size_t i = 0; i < length; ++i) {
      if (bytes[at + i] != wanted[i]) return at + i;
    }
  }
  return bytes.size();
}

} // namespace loan_test
