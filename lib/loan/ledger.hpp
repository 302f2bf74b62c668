// SPDX-License-Identifier: MIT
//
// Ledger: which bytes of the exporter are out, and how. Many readers or one writer (contract rule 2). Pure book-keeping
// over addresses of this process; the exporter's lock guards it.
#pragma once

#include <base/status.hpp>

#include <cstdint>
#include <map>

namespace gpuloan::loan {

class Ledger {
 public:
  // Enters [pointer, pointer + bytes) as lent. BUSY when a writer has part of it, or `access` is write and a reader has;
  // the text names the range that is out. 0 bytes conflict with nothing and are not entered.
  [[nodiscard]] Result<void> enter(std::uint64_t pointer, std::uint64_t bytes, gpuloan_access access);
  // Takes out one entry that was made with exactly these arguments.
  void leave(std::uint64_t pointer, std::uint64_t bytes, gpuloan_access access) noexcept;
  // Whether any of the range is out.
  [[nodiscard]] bool out(std::uint64_t pointer, std::uint64_t bytes) const noexcept;
  [[nodiscard]] std::size_t size() const noexcept { return writers_.size() + readers_.size(); }

 private:
  using Range = std::pair<const std::uint64_t, std::uint64_t>; // begin, end
  [[nodiscard]] const Range* writer_in(std::uint64_t begin, std::uint64_t end) const noexcept;
  [[nodiscard]] const Range* reader_in(std::uint64_t begin, std::uint64_t end) const noexcept;
  std::map<std::uint64_t, std::uint64_t> writers_;      // disjoint
  std::multimap<std::uint64_t, std::uint64_t> readers_; // may overlap
  std::uint64_t longest_read_ = 0;                      // bounds the search for an overlapping reader
};

} // namespace gpuloan::loan
