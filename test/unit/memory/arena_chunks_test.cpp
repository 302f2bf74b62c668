// SPDX-License-Identifier: MIT
//
// The states of a chunk: idle, recalled, retired, surrendered; what is given up when memory or quota runs out; what the
// account and the numbers say in each.
#include "arena_fixture.hpp"

using namespace fake;

// L2
TEST_CASE("recall names the oldest idle chunks over the limit, once") {
  Fixture test(0, 8 * kMiB);
  std::vector<std::uint64_t> ids;
  std::vector<Region*> regions;
  for (int count = 0; count < 4; ++count) {
    regions.push_back(test.make_announced(4 * kMiB));
    ids.push_back(regions.back()->chunk_id());
  }
  for (Region* const region : regions) test.arena->destroy(region);
  CHECK(test.arena->recall() == std::vector{ids[0], ids[1]});
  CHECK(test.arena->recall().empty());
  CHECK(test.arena->stats().idle_bytes == 16 * kMiB); // until they are unmapped
  CHECK_FALSE(test.arena->unmapped(ids[2]));          // not recalled
  CHECK_FALSE(test.arena->unmapped(999));
  CHECK(test.arena->unmapped(ids[0]));
  CHECK_FALSE(test.arena->unmapped(ids[0]));
  CHECK(test.arena->stats().idle_bytes == 12 * kMiB);
  CHECK(test.account->pinned() == 12 * kMiB);
  CHECK(test.arena->stats().surrendered_bytes == 0);
  CHECK(test.arena->recall(true) == std::vector{ids[2], ids[3]});
}

TEST_CASE("a recalled chunk is not used again") {
  Fixture test(0, 0);
  Region* const region = test.make_announced(4 * kMiB);
  const std::uint64_t chunk = region->chunk_id();
  test.arena->destroy(region);
  CHECK(test.arena->recall().size() == 1);
  CHECK(test.make(4 * kMiB)->chunk_id() != chunk);
}

TEST_CASE("recall drops what the peer never saw, and leaves what is in use") {
  Fixture test(0, 0);
  Region* const live = test.make(4 * kMiB);
  test.arena->destroy(test.make(8 * kMiB));
  CHECK(test.arena->recall().empty());
  CHECK(test.arena->stats().chunks == 1);
  CHECK(test.account->pinned() == 4 * kMiB);
  CHECK(test.arena->find(live->pointer(), 1) == live);
}

TEST_CASE("a retired arena drops idle chunks and keeps those with regions") {
  Fixture test;
  Region* const live = test.make_announced(4 * kMiB);
  Region* const unseen = test.make(16 * kMiB);
  test.arena->destroy(test.make_announced(8 * kMiB)); // idle, the peer maps it
  test.arena->retire();
  test.arena->retire();
  CHECK(test.try_make(1).error().status == GPULOAN_ERR_PEER_LOST);
  CHECK(test.try_make(0).error().status == GPULOAN_ERR_PEER_LOST);
  CHECK(test.arena->announcement(unseen).error().status == GPULOAN_ERR_PEER_LOST);
  auto now = test.arena->stats();
  CHECK(now.chunks == 2);
  CHECK(now.idle_bytes == 0);
  CHECK(now.retired_bytes == 20 * kMiB);
  CHECK(now.surrendered_bytes == 8 * kMiB);
  CHECK(test.account->pinned() == 28 * kMiB);
  test.arena->destroy(live);
  test.arena->destroy(unseen); // the peer never had it: released, not surrendered
  now = test.arena->stats();
  CHECK(now.chunks == 0);
  CHECK(now.retired_bytes == 0);
  CHECK(now.surrendered_bytes == 12 * kMiB);
  CHECK(test.account->pinned() == 12 * kMiB);
  CHECK(state().empty());
  test.arena->holders_gone();
  CHECK(test.arena->stats().surrendered_bytes == 0);
  CHECK(test.account->pinned() == 0);
}

TEST_CASE("a recalled chunk of a lost peer is surrendered") {
  Fixture test(0, 0);
  Region* const region = test.make_announced(4 * kMiB);
  const std::uint64_t chunk = region->chunk_id();
  test.arena->destroy(region);
  REQUIRE(test.arena->recall().size() == 1);
  test.arena->retire();
  CHECK(test.arena->stats().surrendered_bytes == 4 * kMiB);
  CHECK_FALSE(test.arena->unmapped(chunk));
}

TEST_CASE("what outlives the holders is not surrendered any more") {
  Fixture test;
  Region* const live = test.make_announced(4 * kMiB);
  test.arena->retire();
  test.arena->holders_gone();
  CHECK(test.account->pinned() == 4 * kMiB);
  test.arena->destroy(live);
  CHECK(test.account->pinned() == 0);
}

TEST_CASE("retired chunks wait for streams, too") {
  Fixture test;
  FakeStream stream;
  stream.queued = 1;
  Region* const region = test.make_announced(4 * kMiB);
  test.use(region, stream);
  test.arena->destroy(region);
  test.arena->retire();
  CHECK(test.arena->stats().retired_bytes == 4 * kMiB);
  CHECK(test.arena->sweep());
  CHECK(state().mapped.size() == 1);
  stream.done = 1;
  CHECK_FALSE(test.arena->sweep());
  CHECK(test.arena->stats().surrendered_bytes == 4 * kMiB);
  CHECK(state().mapped.empty());
}

TEST_CASE("the end of an arena credits everything") {
  Fixture test;
  Region* const region = test.make_announced(4 * kMiB);
  static_cast<void>(test.make_announced(100));
  test.arena->retire();
  test.arena->destroy(region);
  CHECK(test.account->pinned() == 6 * kMiB);
  test.arena.reset();
  CHECK(test.account->pinned() == 0);
}

// L4
TEST_CASE("out of device memory: unseen idle chunks go, then one retry") {
  Fixture test;
  state().total = 16 * kMiB;
  test.arena.reset();
  test.gpu = open_gpu();
  test.arena.emplace(test.gpu, test.account, 64 * kMiB);
  test.arena->destroy(test.make(12 * kMiB));
  Region* const region = test.make(6 * kMiB);
  CHECK(calls("cuMemCreate") == 3);
  CHECK(test.arena->stats().chunks == 1);
  CHECK(test.account->pinned() == 6 * kMiB);
  test.arena->destroy(region);
}

// L4
TEST_CASE("out of device memory names what was asked for, what is free and what the peer still maps") {
  Fixture test;
  state().total = 16 * kMiB;
  test.arena.reset();
  test.gpu = open_gpu();
  test.arena.emplace(test.gpu, test.account, 64 * kMiB);
  Region* const idle = test.make_announced(4 * kMiB);
  static_cast<void>(test.make(2 * kMiB));
  test.arena->destroy(idle);
  const auto made = test.try_make(13 * kMiB);
  REQUIRE_FALSE(made);
  CHECK(made.error().status == GPULOAN_ERR_DEVICE_MEMORY);
  for (const std::uint64_t number : {13 * kMiB, 14 * kMiB, 10 * kMiB, 4 * kMiB}) {
    CAPTURE(number);
    CHECK(made.error().text.find(std::to_string(number) + " ") != std::string::npos);
  }
  CHECK(test.account->pinned() == 6 * kMiB);
  CHECK(test.arena->stats().idle_bytes == 4 * kMiB); // the peer's word is needed first
}

TEST_CASE("over the account's limit: unseen idle chunks go, then LIMIT with the reasons") {
  Fixture test(16 * kMiB);
  test.arena->destroy(test.make(12 * kMiB));
  Region* const mapped = test.make_announced(6 * kMiB);
  CHECK(test.arena->stats().chunks == 1);
  test.arena->destroy(mapped);
  const auto made = test.try_make(12 * kMiB);
  REQUIRE_FALSE(made);
  CHECK(made.error().status == GPULOAN_ERR_LIMIT);
  CHECK(made.error().text.find("worker-1") != std::string::npos);
  CHECK(made.error().text.find(std::to_string(6 * kMiB) + " are in idle chunks") != std::string::npos);
  CHECK(calls("cuMemCreate") == 2);
}

// D8
TEST_CASE("a host chunk that the device does not take is there without an address for it") {
  Fixture test;
  state().fail_at = 2; // retain, register
  state().fail_code = OutOfMemory;
  const auto made = test.try_make(100, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_HOST);
  REQUIRE(made);
  CHECK(state().failed == "cuMemHostRegister");
  CHECK((*made)->pointer() == 0);
  CHECK((*made)->host() != nullptr);
  CHECK(test.gpu->pin_refusal().find("RLIMIT_MEMLOCK") != std::string::npos);
  test.arena->destroy(*made);
}
