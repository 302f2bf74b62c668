// SPDX-License-Identifier: MIT
//
// What `demo --fill` writes: memory is cut into about a thousand blocks, each filled with one 32-bit word that follows
// from the seed and the block's number, so that any byte can be checked without the others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace gpuloan::tool {

class Pattern {
 public:
  Pattern(std::uint64_t bytes, std::uint64_t seed) : bytes_(bytes), seed_(seed) {
    constexpr std::uint64_t kPage = 4096;
    block_bytes_ = std::max(kPage, (bytes / 1024 + kPage - 1) / kPage * kPage);
  }
  [[nodiscard]] std::uint64_t block_bytes() const { return block_bytes_; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  [[nodiscard]] std::uint32_t word(std::uint64_t block) const {
    std::uint64_t value = seed_ ^ ((block + 1) * 0x9E3779B97F4A7C15U);
    value = (value ^ (value >> 32U)) * 0xD6E8FEB86659FD93U;
    return static_cast<std::uint32_t>(value >> 32U);
  }
  [[nodiscard]] std::byte at(std::uint64_t offset) const {
    const std::uint32_t content = word(offset / block_bytes_);
    return static_cast<std::byte>(content >> (offset % 4 * 8)); // little-endian, as every host with a CUDA driver
  }
  // True when `bytes` at `offset` are what they have to be.
  [[nodiscard]] bool matches(std::uint64_t offset, std::span<const std::byte> bytes) const {
    std::size_t done = 0;
    while (done < bytes.size()) {
      const std::uint64_t place = offset + done;
      const std::uint64_t left = block_bytes_ - place % block_bytes_;
      const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(left, bytes.size() - done));
      const std::uint32_t content = word(place / block_bytes_);
      std::byte raw[4];
      std::memcpy(raw, &content, sizeof raw);
      for (std::size_t index = 0; index < count; ++index) {
        if (bytes[done + index] != raw[(place + index) % 4]) return false;
      }
      done += count;
    }
    return true;
  }

 private:
  std::uint64_t bytes_, seed_, block_bytes_;
};

} // namespace gpuloan::tool
