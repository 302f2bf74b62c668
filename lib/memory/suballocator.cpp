// SPDX-License-Identifier: MIT
//
// The free ranges are one sorted vector: a chunk of 2 MiB has few of them in practice (4096 at worst), and a scan of
// contiguous memory beats any tree at that size. N allocations leave at most N + 1 free ranges, so allocate() reserves
// that many and free() can be noexcept, as giving memory back has to be.
#include <memory/suballocator.hpp>

#include <algorithm>
#include <cassert>

namespace gpuloan::memory {
namespace {

// What would wrap becomes a value that no range can hold.
std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) noexcept {
  constexpr std::uint64_t kTooMuch = UINT64_MAX & ~(Suballocator::kUnit - 1);
  const std::uint64_t past = value % unit;
  if (past == 0) return value;
  return value > kTooMuch - (unit - past) ? kTooMuch : value + (unit - past);
}

} // namespace

void Suballocator::reset(std::uint64_t bytes) {
  assert(bytes % kUnit == 0);
  free_.clear();
  free_.reserve(2); // so that the first allocate() cannot fail for want of host memory
  if (bytes != 0) free_.push_back({0, bytes});
  bytes_ = free_bytes_ = largest_ = bytes;
  live_ = 0;
}

std::optional<std::uint64_t> Suballocator::allocate(std::uint64_t bytes, std::uint64_t alignment) {
  assert(bytes != 0 && alignment != 0 && (alignment & (alignment - 1)) == 0);
  bytes = round_up(bytes, kUnit);
  if (bytes > largest_) return std::nullopt;
  free_.reserve(live_ + 2);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const std::uint64_t offset = round_up(range->offset, std::max(alignment, kUnit));
    if (offset >= range->end() || range->end() - offset < bytes) continue;
    take(range, offset, bytes);
    return offset;
  }
  return std::nullopt;
}

// What is left of `range` before and after the allocation stays free.
void Suballocator::take(std::vector<Range>::iterator range, std::uint64_t offset, std::uint64_t bytes) noexcept {
  const bool was_largest = range->bytes == largest_;
  const Range before = {range->offset, offset - range->offset};
  const Range after = {offset + bytes, range->end() - offset - bytes};
  if (before.bytes != 0 && after.bytes != 0) {
    *range = before;
    free_.insert(range + 1, after);
  } else if (before.bytes != 0 || after.bytes != 0) {
    *range = before.bytes != 0 ? before : after;
  } else {
    free_.erase(range);
  }
  ++live_;
  free_bytes_ -= bytes;
  if (was_largest) find_largest();
}

void Suballocator::free(std::uint64_t offset, std::uint64_t bytes) noexcept {
  Range freed = {offset, round_up(bytes, kUnit)};
  assert(live_ != 0 && freed.bytes != 0 && freed.end() <= bytes_);
  auto next = std::lower_bound(free_.begin(), free_.end(), offset,
                               [](const Range& range, std::uint64_t at) { return range.offset < at; });
  assert(next == free_.end() || freed.end() <= next->offset);
  assert(next == free_.begin() || std::prev(next)->end() <= offset);
  --live_;
  free_bytes_ += freed.bytes;
  const bool joins_next = next != free_.end() && next->offset == freed.end();
  if (joins_next) freed.bytes += next->bytes;
  if (next != free_.begin() && std::prev(next)->end() == offset) {
    const auto previous = std::prev(next);
    previous->bytes += freed.bytes;
    freed = *previous;
    if (joins_next) free_.erase(next);
  } else if (joins_next) {
    *next = freed;
  } else {
    free_.insert(next, freed);
  }
  largest_ = std::max(largest_, freed.bytes);
}

void Suballocator::find_largest() noexcept {
  largest_ = 0;
  for (const Range& range : free_) largest_ = std::max(largest_, range.bytes);
}

} // namespace gpuloan::memory
