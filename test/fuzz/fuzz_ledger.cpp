// SPDX-License-Identifier: MIT
//
// The ledger against a list that compares every pair. Loans are entered as lend() does: none wraps around the address space.
//
// Input: the place of the window in the address space, then operations of a few bytes each.
#include "fuzz.hpp"

#include <loan/ledger.hpp>

#include <algorithm>
#include <vector>

using namespace gpuloan;

namespace {

constexpr std::size_t kLoansMax = 300;

struct Range {
  std::uint64_t pointer = 0, bytes = 0;
  bool write = false;
  [[nodiscard]] std::uint64_t last() const { return pointer + (bytes - 1); }
  [[nodiscard]] bool overlaps(const Range& other) const {
    return bytes != 0 && other.bytes != 0 && pointer <= other.last() && other.pointer <= last();
  }
  [[nodiscard]] gpuloan_access access() const { return write ? GPULOAN_ACCESS_WRITE : GPULOAN_ACCESS_READ; }
};

class Run {
 public:
  explicit Run(std::uint64_t base) : base_(base) {}

  void enter(const Range& range) {
    const bool conflict = std::any_of(loans_.begin(), loans_.end(), [&](const Range& other) { return other.overlaps(range) && (other.write || range.write); });
    const std::size_t before = ledger_.size();
    const auto entered = ledger_.enter(range.pointer, range.bytes, range.access());
    FUZZ_REQUIRE(entered.has_value() == !conflict);
    if (!entered) FUZZ_REQUIRE(entered.error().status == GPULOAN_ERR_BUSY && entered.error().text.find("lent for") != std::string::npos);
    FUZZ_REQUIRE(ledger_.size() == before + (entered && range.bytes != 0 ? 1U : 0U));
    if (entered && range.bytes != 0) loans_.push_back(range);
  }
  void leave(std::size_t which) {
    if (loans_.empty()) return;
    const auto it = loans_.begin() + static_cast<std::ptrdiff_t>(which % loans_.size());
    ledger_.leave(it->pointer, it->bytes, it->access());
    loans_.erase(it);
    FUZZ_REQUIRE(ledger_.size() == loans_.size());
  }
  void ask(const Range& range) const {
    const bool out = std::any_of(loans_.begin(), loans_.end(), [&](const Range& other) { return other.overlaps(range); });
    FUZZ_REQUIRE(ledger_.out(range.pointer, range.bytes) == out);
  }
  void finish() {
    for (const Range& range : loans_) FUZZ_REQUIRE(ledger_.out(range.pointer, 1) && ledger_.out(range.last(), 1));
    while (!loans_.empty()) leave(loans_.size() - 1);
    FUZZ_REQUIRE(ledger_.size() == 0 && !ledger_.out(0, UINT64_MAX));
  }
  // Mostly near to others; at times of any size.
  [[nodiscard]] Range range(fuzz::Input& input) const {
    const std::uint8_t kind = input.byte();
    Range range;
    range.write = (kind & 1U) != 0;
    range.pointer = base_ + input.byte();
    range.bytes = input.byte();
    if ((kind & 2U) != 0) range.bytes <<= (kind >> 2U) % 56U;
    if (range.bytes > UINT64_MAX - range.pointer) range.bytes = UINT64_MAX - range.pointer;
    return range;
  }
  [[nodiscard]] bool full() const { return loans_.size() >= kLoansMax; }

 private:
  const std::uint64_t base_;
  loan::Ledger ledger_;
  std::vector<Range> loans_;
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  constexpr std::uint64_t kBases[] = {0, 0x7f0000000000, UINT64_MAX - 255, std::uint64_t{1} << 63};
  Run run(kBases[input.below(4)]);
  while (!input.empty()) {
    const std::uint8_t operation = input.byte();
    if (operation % 8 < 4 && !run.full()) run.enter(run.range(input));
    else if (operation % 8 < 6) run.leave(operation >> 3U);
    else run.ask(run.range(input));
  }
  run.finish();
  return 0;
}
