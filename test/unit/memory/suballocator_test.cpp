// SPDX-License-Identifier: MIT
//
// The suballocator against a bitmap of its units: the model allocates first fit by looking at every unit, so each answer,
// also "no room", has to be the same. Seeds are fixed; a failure names its seed.
#include <doctest/doctest.h>

#include <memory/suballocator.hpp>

#include <algorithm>
#include <random>
#include <vector>

using gpuloan::memory::Suballocator;

namespace {

constexpr std::uint64_t kUnit = Suballocator::kUnit;

class Model {
 public:
  explicit Model(std::uint64_t bytes) : used_(bytes / kUnit) {}

  std::optional<std::uint64_t> allocate(std::uint64_t bytes, std::uint64_t alignment) {
    const std::uint64_t units = (bytes + kUnit - 1) / kUnit;
    const std::uint64_t step = std::max(alignment, kUnit) / kUnit;
    for (std::uint64_t at = 0; at + units <= used_.size(); at += step) {
      if (run(at, units) != units) continue;
      fill(at, units, true);
      return at * kUnit;
    }
    return std::nullopt;
  }
  void free(std::uint64_t offset, std::uint64_t bytes) { fill(offset / kUnit, (bytes + kUnit - 1) / kUnit, false); }
  [[nodiscard]] std::uint64_t largest() const {
    std::uint64_t best = 0, length = 0;
    for (const bool used : used_) best = std::max(best, length = used ? 0 : length + 1);
    return best * kUnit;
  }
  [[nodiscard]] std::uint64_t free_bytes() const {
    return static_cast<std::uint64_t>(std::count(used_.begin(), used_.end(), false)) * kUnit;
  }

 private:
  [[nodiscard]] std::uint64_t run(std::uint64_t at, std::uint64_t most) const {
    std::uint64_t length = 0;
    while (length < most && !used_[at + length]) ++length;
    return length;
  }
  void fill(std::uint64_t at, std::uint64_t units, bool value) {
    for (std::uint64_t unit = at; unit < at + units; ++unit) used_[unit] = value;
  }
  std::vector<bool> used_;
};

struct Piece {
  std::uint64_t offset, bytes;
};

void play(std::uint64_t seed, std::uint64_t chunk_bytes, int rounds) {
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  Suballocator real(chunk_bytes);
  Model model(chunk_bytes);
  std::vector<Piece> pieces;
  for (int round = 0; round < rounds; ++round) {
    if (pieces.empty() || random() % 100 < 55) {
      const std::uint64_t bytes = 1 + random() % (random() % 4 == 0 ? chunk_bytes / 2 : chunk_bytes / 32);
      const std::uint64_t alignment = std::uint64_t{1} << (random() % 22);
      const auto offset = real.allocate(bytes, alignment);
      REQUIRE(offset == model.allocate(bytes, alignment));
      if (offset) pieces.push_back({*offset, bytes});
    } else {
      std::swap(pieces[random() % pieces.size()], pieces.back());
      real.free(pieces.back().offset, pieces.back().bytes);
      model.free(pieces.back().offset, pieces.back().bytes);
      pieces.pop_back();
    }
    REQUIRE(real.free_bytes() == model.free_bytes());
    REQUIRE(real.largest() == model.largest());
  }
  for (const Piece& piece : pieces) real.free(piece.offset, piece.bytes);
  REQUIRE(real.largest() == chunk_bytes);
}

} // namespace

TEST_CASE("an empty one has no room") {
  Suballocator none;
  CHECK_FALSE(none.allocate(1, 1));
  CHECK(none.largest() == 0);
}

TEST_CASE("the whole chunk is one allocation") {
  Suballocator space(2U << 20);
  CHECK(space.allocate(2U << 20, 2U << 20) == 0);
  CHECK(space.largest() == 0);
  CHECK_FALSE(space.allocate(1, 1));
  space.free(0, 2U << 20);
  CHECK(space.largest() == 2U << 20);
}

TEST_CASE("sizes are rounded to units and neighbours never share one") {
  Suballocator space(4096);
  CHECK(space.allocate(1, 1) == 0);
  CHECK(space.allocate(257, 1) == 256);
  CHECK(space.allocate(1, 1) == 768);
  CHECK(space.free_bytes() == 3072);
}

TEST_CASE("alignment leaves the gap before it free") {
  Suballocator space(1U << 20);
  CHECK(space.allocate(256, 256) == 0);
  CHECK(space.allocate(256, 65536) == 65536);
  CHECK(space.allocate(256, 256) == 256);
  CHECK_FALSE(space.allocate(256, 2U << 20));
}

TEST_CASE("free joins with both neighbours in any order") {
  const std::vector<std::vector<std::uint64_t>> orders = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                                          {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (const auto& order : orders) {
    Suballocator space(768);
    for (int piece = 0; piece < 3; ++piece) REQUIRE(space.allocate(256, 1));
    for (const std::uint64_t piece : order) space.free(piece * 256, 256);
    CHECK(space.largest() == 768);
  }
}

TEST_CASE("sizes that would wrap find no room") {
  Suballocator space(4096);
  CHECK_FALSE(space.allocate(UINT64_MAX, 256));
  CHECK_FALSE(space.allocate(UINT64_MAX - 255, std::uint64_t{1} << 63));
  CHECK(space.free_bytes() == 4096);
}

TEST_CASE("random allocations agree with a bitmap") {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) play(seed, 64U << 10, 400);
  for (std::uint64_t seed = 1; seed <= 4; ++seed) play(seed, 2U << 20, 600);
}
