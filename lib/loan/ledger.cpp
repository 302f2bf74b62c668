// SPDX-License-Identifier: MIT
#include <loan/ledger.hpp>

#include <algorithm>
#include <cassert>
#include <cinttypes>
#include <cstdio>

namespace gpuloan::loan {
namespace {

std::string range_text(std::uint64_t begin, std::uint64_t end) {
  char text[64];
  std::snprintf(text, sizeof text, "[0x%" PRIx64 ", 0x%" PRIx64 ")", begin, end);
  return text;
}

} // namespace

const Ledger::Range* Ledger::writer_in(std::uint64_t begin, std::uint64_t end) const noexcept {
  auto next = writers_.lower_bound(begin);
  if (next != writers_.end() && next->first < end) return &*next;
  if (next == writers_.begin()) return nullptr;
  --next;
  return next->second > begin ? &*next : nullptr;
}

const Ledger::Range* Ledger::reader_in(std::uint64_t begin, std::uint64_t end) const noexcept {
  const std::uint64_t first = begin > longest_read_ ? begin - longest_read_ : 0;
  for (auto it = readers_.lower_bound(first); it != readers_.end() && it->first < end; ++it) {
    if (it->second > begin) return &*it;
  }
  return nullptr;
}

Result<void> Ledger::enter(std::uint64_t pointer, std::uint64_t bytes, gpuloan_access access) {
  if (bytes == 0) return {};
  const std::uint64_t end = pointer + bytes;
  const bool write = access == GPULOAN_ACCESS_WRITE;
  if (const Range* range = writer_in(pointer, end)) {
    return fail(GPULOAN_ERR_BUSY, range_text(range->first, range->second) + " is lent for write; it can be lent again after its loan ended");
  }
  if (const Range* range = write ? reader_in(pointer, end) : nullptr) {
    return fail(GPULOAN_ERR_BUSY, range_text(range->first, range->second) + " is lent for read; it can be lent for write after all its loans ended");
  }
  if (write) {
    writers_.emplace(pointer, end);
  } else {
    readers_.emplace(pointer, end);
    longest_read_ = std::max(longest_read_, bytes);
  }
  return {};
}

void Ledger::leave(std::uint64_t pointer, std::uint64_t bytes, gpuloan_access access) noexcept {
  if (bytes == 0) return;
  if (access == GPULOAN_ACCESS_WRITE) {
    const auto erased = writers_.erase(pointer);
    assert(erased == 1);
    static_cast<void>(erased);
    return;
  }
  auto [it, last] = readers_.equal_range(pointer);
  while (it != last && it->second != pointer + bytes) ++it;
  assert(it != last);
  if (it != last) readers_.erase(it);
  if (readers_.empty()) longest_read_ = 0;
}

bool Ledger::out(std::uint64_t pointer, std::uint64_t bytes) const noexcept {
  if (bytes == 0) return false;
  return writer_in(pointer, pointer + bytes) != nullptr || reader_in(pointer, pointer + bytes) != nullptr;
}

} // namespace gpuloan::loan
