// SPDX-License-Identifier: MIT
//
// Suballocator: which bytes of one chunk are free. Offsets only: it touches no memory and knows no driver.
//
// First fit over the free ranges in address order; neighbours that become free are joined at once. Everything is counted
// in units of 256 bytes, so that no two regions ever share one, and alignments are relative to the chunk's start.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace gpuloan::memory {

class Suballocator {
 public:
  static constexpr std::uint64_t kUnit = 256;

  Suballocator() noexcept = default; // manages nothing
  // `bytes` is a multiple of kUnit.
  explicit Suballocator(std::uint64_t bytes) { reset(bytes); }
  // Forgets all allocations.
  void reset(std::uint64_t bytes);

  // `bytes` is not 0 and `alignment` is a power of two. nullopt when no free range holds it.
  [[nodiscard]] std::optional<std::uint64_t> allocate(std::uint64_t bytes, std::uint64_t alignment);
  // Exactly what allocate() was given and returned. Never allocates host memory.
  void free(std::uint64_t offset, std::uint64_t bytes) noexcept;

  [[nodiscard]] std::uint64_t largest() const noexcept { return largest_; } // bytes of the largest free range
  [[nodiscard]] std::uint64_t free_bytes() const noexcept { return free_bytes_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  struct Range {
    std::uint64_t offset, bytes;
    [[nodiscard]] std::uint64_t end() const noexcept { return offset + bytes; }
  };
  void take(std::vector<Range>::iterator range, std::uint64_t offset, std::uint64_t bytes) noexcept;
  void find_largest() noexcept;

  std::vector<Range> free_; // by offset, never adjacent; capacity covers every free() that may still come
  std::uint64_t bytes_ = 0, free_bytes_ = 0, largest_ = 0;
  std::size_t live_ = 0; // allocations
};

} // namespace gpuloan::memory
