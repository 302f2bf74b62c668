// SPDX-License-Identifier: MIT
//
// The canary's battery: its shapes, its bytes, and the rule that turns four ends into one verdict.
#include <doctest/doctest.h>

#include <loan/trial.hpp>

#include <set>

using namespace gpuloan::loan;

namespace {

constexpr ShapeEnd kEnds[] = {ShapeEnd::Open, ShapeEnd::Good, ShapeEnd::Failed, ShapeEnd::Unproven};

} // namespace

TEST_CASE("trial: every set of four ends") {
  for (const ShapeEnd one : kEnds)
    for (const ShapeEnd two : kEnds)
      for (const ShapeEnd three : kEnds)
        for (const ShapeEnd four : kEnds) {
          const std::array ends = {one, two, three, four};
          int failed = 0, good = 0;
          for (const ShapeEnd end : ends) failed += end == ShapeEnd::Failed, good += end == ShapeEnd::Good;
          const gpuloan_canary wanted = failed > 0 ? GPULOAN_CANARY_DEMOTED : good == 4 ? GPULOAN_CANARY_VERIFIED : GPULOAN_CANARY_NOT_ATTEMPTED;
          CHECK(verdict(ends) == wanted);
        }
  CHECK(verdict({}) == GPULOAN_CANARY_NOT_ATTEMPTED); // nothing proves nothing
}

TEST_CASE("trial: how a shape ended") {
  CHECK(shape_end(false, GPULOAN_OK) == ShapeEnd::Open);
  CHECK(shape_end(true, GPULOAN_OK) == ShapeEnd::Good);
  for (const bool ended : {false, true}) {
    for (const gpuloan_status status : {GPULOAN_ERR_FAILED, GPULOAN_ERR_DRIVER, GPULOAN_ERR_RETURNED, GPULOAN_ERR_DEVICE_LOST, GPULOAN_ERR_PROTOCOL}) {
      CHECK(shape_end(ended, status) == ShapeEnd::Failed);
    }
    // Want of memory, and a peer that is gone, say nothing about the way.
    for (const gpuloan_status status : {GPULOAN_ERR_DEVICE_MEMORY, GPULOAN_ERR_NO_MEMORY, GPULOAN_ERR_FD_LIMIT, GPULOAN_ERR_PEER_LOST}) {
      CHECK(shape_end(ended, status) == ShapeEnd::Unproven);
    }
  }
}

TEST_CASE("trial: the shapes are what they are called, and lie apart in one block") {
  const auto& [contiguous, view, odd, large] = kCanaryShapes;
  CHECK(contiguous.offset == 0);
  CHECK(view.offset % 4096 != 0);
  CHECK(odd.bytes % 2 == 1);
  CHECK(large.bytes > (std::uint64_t{2} << 20));
  CHECK(large.offset < kCanarySeam);
  CHECK(large.offset + large.bytes > kCanarySeam);
  std::uint64_t end = 0;
  std::set<std::uint64_t> offsets;
  for (const CanaryShape& shape : kCanaryShapes) {
    CHECK(shape.offset >= end);
    end = shape.offset + shape.bytes;
    offsets.insert(shape.offset);
    CHECK(shape.bytes <= kCanaryMaxBytes);
  }
  CHECK(offsets.size() == kCanaryShapes.size());
  CHECK(end < kCanaryBytes); // no shape ends with the block
}

TEST_CASE("trial: each wrong byte is found, and named") {
  const auto wanted = canary_block(true);
  CHECK(wanted != canary_block(false));
  CHECK(compare_blocks(wanted, wanted).empty());
  const auto spoilt = [&](std::uint64_t at) {
    auto got = wanted;
    got[at] ^= std::byte{1};
    return compare_blocks(got, wanted);
  };
  for (const CanaryShape& shape : kCanaryShapes) {
    for (const std::uint64_t at : {std::uint64_t{0}, shape.bytes / 2, shape.bytes - 1}) {
      CHECK(spoilt(shape.offset + at) == std::string("shape ") + shape.name + ": byte " + std::to_string(at) + " that came back is not the importer's");
    }
  }
  CHECK(spoilt(kCanaryBytes - 1).find("which was not lent") != std::string::npos);
  CHECK(spoilt(kCanaryShapes[1].offset - 1).find("which was not lent") != std::string::npos);
}

TEST_CASE("trial: an answer is the pattern inverted, at any size") {
  for (const std::uint64_t bytes : {0U, 1U, 7U, 8U, 9U, 4097U}) {
    const auto asked = canary_pattern(bytes, false), answered = canary_pattern(bytes, true);
    REQUIRE(asked.size() == bytes);
    REQUIRE(answered.size() == bytes);
    for (std::size_t at = 0; at < bytes; ++at) CHECK(asked[at] == ~answered[at]);
  }
  // As docs/protocol.md gives it.
  const auto known = canary_pattern(8, false);
  const std::uint64_t word = 8 * 6364136223846793005U + 1442695040888963407U;
  for (std::size_t at = 0; at < 8; ++at) CHECK(known[at] == static_cast<std::byte>(word >> (8 * at)));
}

TEST_CASE("trial: each way has its own proof, and its rung") {
  constexpr auto kRead = GPULOAN_ACCESS_READ, kWrite = GPULOAN_ACCESS_WRITE;
  CHECK(trial_of(GPULOAN_RUNG_VMM, Carrier::Direct, false, kRead) == Trial::Vmm);
  CHECK(trial_of(GPULOAN_RUNG_VMM, Carrier::Stage, false, kWrite) == Trial::Vmm);
  CHECK(trial_of(GPULOAN_RUNG_VMM, Carrier::Direct, true, kWrite) == Trial::ForeignVmm);
  CHECK(trial_of(GPULOAN_RUNG_POOL, Carrier::Direct, true, kRead) == Trial::Pool);
  CHECK(trial_of(GPULOAN_RUNG_IPC, Carrier::Direct, true, kRead) == Trial::Ipc);
  std::set<Trial> host;
  for (const Carrier carrier : {Carrier::Direct, Carrier::Segment, Carrier::Ring})
    for (const gpuloan_access access : {kRead, kWrite}) host.insert(trial_of(GPULOAN_RUNG_HOST, carrier, false, access));
  CHECK(host.size() == 6);
  for (const Trial trial : host) CHECK(rung_of(trial) == GPULOAN_RUNG_HOST);
  std::set<std::string> names;
  for (std::size_t index = 0; index < kTrials; ++index) names.insert(name_of(static_cast<Trial>(index)));
  CHECK(names.size() == kTrials);
}
