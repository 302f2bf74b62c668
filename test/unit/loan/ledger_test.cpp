// SPDX-License-Identifier: MIT
//
// The ledger: what conflicts with what, and a random run against a list that looks at every pair.
#include <doctest/doctest.h>

#include <loan/ledger.hpp>

#include <algorithm>
#include <random>
#include <vector>

using gpuloan::loan::Ledger;

namespace {

constexpr std::uint64_t kBase = 0x7f0000000000;
constexpr auto kRead = GPULOAN_ACCESS_READ;
constexpr auto kWrite = GPULOAN_ACCESS_WRITE;

gpuloan_status enter(Ledger& ledger, std::uint64_t offset, std::uint64_t bytes, gpuloan_access access) {
  const auto result = ledger.enter(kBase + offset, bytes, access);
  return result ? GPULOAN_OK : result.error().status;
}

struct Entry {
  std::uint64_t pointer, bytes;
  gpuloan_access access;
  [[nodiscard]] bool overlaps(const Entry& other) const { return pointer < other.pointer + other.bytes && other.pointer < pointer + bytes; }
  [[nodiscard]] bool conflicts(const Entry& other) const { return overlaps(other) && (access == kWrite || other.access == kWrite); }
};

// The same rules over a plain list.
class Model {
 public:
  [[nodiscard]] bool enter(const Entry& entry) {
    if (entry.bytes == 0) return true;
    if (std::any_of(entries_.begin(), entries_.end(), [&](const Entry& other) { return entry.conflicts(other); })) return false;
    entries_.push_back(entry);
    return true;
  }
  [[nodiscard]] bool out(const Entry& entry) const {
    return entry.bytes != 0 && std::any_of(entries_.begin(), entries_.end(), [&](const Entry& other) { return entry.overlaps(other); });
  }
  [[nodiscard]] Entry take(std::size_t index) {
    const Entry entry = entries_[index];
    entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(index));
    return entry;
  }
  [[nodiscard]] std::size_t size() const { return entries_.size(); }

 private:
  std::vector<Entry> entries_;
};

} // namespace

TEST_CASE("many readers, no writer among them") {
  Ledger ledger;
  for (int reader = 0; reader < 100; ++reader) REQUIRE(enter(ledger, 0, 4096, kRead) == GPULOAN_OK);
  CHECK(enter(ledger, 100, 8, kRead) == GPULOAN_OK);
  CHECK(ledger.size() == 101);
  CHECK(enter(ledger, 0, 4096, kWrite) == GPULOAN_ERR_BUSY);
  CHECK(enter(ledger, 4095, 1, kWrite) == GPULOAN_ERR_BUSY);
  for (int reader = 0; reader < 100; ++reader) ledger.leave(kBase, 4096, kRead);
  CHECK(enter(ledger, 0, 100, kWrite) == GPULOAN_OK);
  CHECK(enter(ledger, 107, 1, kWrite) == GPULOAN_ERR_BUSY); // the reader that is left
  CHECK(enter(ledger, 108, 1, kWrite) == GPULOAN_OK);
}

TEST_CASE("one writer and nobody beside it") {
  Ledger ledger;
  REQUIRE(enter(ledger, 4096, 4096, kWrite) == GPULOAN_OK);
  for (const auto access : {kRead, kWrite}) {
    CHECK(enter(ledger, 4096, 4096, access) == GPULOAN_ERR_BUSY);
    CHECK(enter(ledger, 0, 4097, access) == GPULOAN_ERR_BUSY);    // its first byte
    CHECK(enter(ledger, 8191, 4096, access) == GPULOAN_ERR_BUSY); // its last
    CHECK(enter(ledger, 5000, 1, access) == GPULOAN_ERR_BUSY);    // inside
    CHECK(enter(ledger, 0, 65536, access) == GPULOAN_ERR_BUSY);   // around
  }
  CHECK(enter(ledger, 0, 4096, kRead) == GPULOAN_OK); // neighbours
  CHECK(enter(ledger, 8192, 4096, kWrite) == GPULOAN_OK);
  ledger.leave(kBase + 4096, 4096, kWrite);
  CHECK(enter(ledger, 4096, 4096, kRead) == GPULOAN_OK);
}

TEST_CASE("a refused entry leaves no trace and says which range is out") {
  Ledger ledger;
  REQUIRE(enter(ledger, 0, 256, kRead) == GPULOAN_OK);
  const auto refused = ledger.enter(kBase + 255, 2, kWrite);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().text.find("[0x7f0000000000, 0x7f0000000100)") != std::string::npos);
  CHECK(refused.error().text.find("for read") != std::string::npos);
  CHECK(ledger.size() == 1);
  CHECK(enter(ledger, 256, 1, kWrite) == GPULOAN_OK);
  const auto again = ledger.enter(kBase + 256, 1, kRead);
  REQUIRE_FALSE(again);
  CHECK(again.error().text.find("for write") != std::string::npos);
}

TEST_CASE("0 bytes conflict with nothing") {
  Ledger ledger;
  REQUIRE(enter(ledger, 0, 4096, kWrite) == GPULOAN_OK);
  CHECK(enter(ledger, 0, 0, kWrite) == GPULOAN_OK);
  CHECK(enter(ledger, 100, 0, kRead) == GPULOAN_OK);
  CHECK(ledger.enter(0, 0, kWrite).has_value());
  CHECK(ledger.size() == 1);
  ledger.leave(kBase, 0, kWrite);
  CHECK(ledger.size() == 1);
  CHECK_FALSE(ledger.out(kBase + 100, 0));
  CHECK(ledger.out(kBase + 100, 1));
}

TEST_CASE("out() sees readers and writers, to the byte") {
  Ledger ledger;
  REQUIRE(enter(ledger, 100, 50, kRead) == GPULOAN_OK);
  REQUIRE(enter(ledger, 300, 50, kWrite) == GPULOAN_OK);
  CHECK_FALSE(ledger.out(kBase, 100));
  CHECK(ledger.out(kBase, 101));
  CHECK(ledger.out(kBase + 149, 1));
  CHECK_FALSE(ledger.out(kBase + 150, 150));
  CHECK(ledger.out(kBase + 150, 151));
  CHECK_FALSE(ledger.out(kBase + 350, 1000));
}

// A long reader that begins far before the range is found behind many short ones.
TEST_CASE("a long reader among short ones") {
  Ledger ledger;
  REQUIRE(enter(ledger, 0, 1 << 20, kRead) == GPULOAN_OK);
  for (std::uint64_t at = 0; at < 1000; ++at) REQUIRE(enter(ledger, at * 512, 16, kRead) == GPULOAN_OK);
  CHECK(enter(ledger, (1 << 20) - 1, 1, kWrite) == GPULOAN_ERR_BUSY);
  ledger.leave(kBase, 1 << 20, kRead);
  CHECK(enter(ledger, (1 << 20) - 1, 1, kWrite) == GPULOAN_OK);
  CHECK(enter(ledger, 999 * 512 + 15, 1, kWrite) == GPULOAN_ERR_BUSY);
  CHECK(enter(ledger, 999 * 512 + 16, 1, kWrite) == GPULOAN_OK);
}

TEST_CASE("readers that begin at one address are told apart by their length") {
  Ledger ledger;
  REQUIRE(enter(ledger, 0, 10, kRead) == GPULOAN_OK);
  REQUIRE(enter(ledger, 0, 20, kRead) == GPULOAN_OK);
  ledger.leave(kBase, 20, kRead);
  CHECK(enter(ledger, 10, 1, kWrite) == GPULOAN_OK);
  CHECK(enter(ledger, 9, 1, kWrite) == GPULOAN_ERR_BUSY);
}

TEST_CASE("the last bytes of the address space") {
  Ledger ledger;
  REQUIRE(ledger.enter(UINT64_MAX - 10, 10, kWrite).has_value());
  CHECK_FALSE(ledger.enter(UINT64_MAX - 1, 1, kRead).has_value());
  CHECK(ledger.enter(UINT64_MAX - 20, 10, kRead).has_value());
  CHECK(ledger.enter(0, 10, kWrite).has_value());
}

TEST_CASE("random loans against a list") {
  for (unsigned seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    Ledger ledger;
    Model model;
    for (int round = 0; round < 4000; ++round) {
      const std::uint64_t length = random() % 16 == 0 ? random() % 5000 : random() % 40;
      const Entry entry{kBase + random() % 8000, length, random() % 3 == 0 ? kWrite : kRead};
      REQUIRE(ledger.out(entry.pointer, entry.bytes) == model.out(entry));
      if (random() % 100 < 55 || model.size() == 0) {
        REQUIRE(ledger.enter(entry.pointer, entry.bytes, entry.access).has_value() == model.enter(entry));
      } else {
        const Entry leaving = model.take(random() % model.size());
        ledger.leave(leaving.pointer, leaving.bytes, leaving.access);
      }
      REQUIRE(ledger.size() == model.size());
    }
    while (model.size() > 0) {
      const Entry leaving = model.take(model.size() - 1);
      ledger.leave(leaving.pointer, leaving.bytes, leaving.access);
    }
    CHECK(ledger.size() == 0);
    CHECK_FALSE(ledger.out(0, UINT64_MAX));
  }
}
