// SPDX-License-Identifier: MIT
//
// A fixed story of an arena with its k-th driver call failing, for every k and several results: whatever fails, the caller
// gets an error or a working region, and at the end nothing is left in the driver, in the account or open. And the same
// arena under many threads.
#include "arena_fixture.hpp"

#include <random>
#include <thread>

using namespace fake;

namespace {

constexpr gpuloan_memory kMemories[] = {GPULOAN_MEMORY_DEVICE, GPULOAN_MEMORY_HOST};

void unmap_all(Fixture& test) {
  for (const std::uint64_t chunk : test.arena->recall(true)) CHECK(test.arena->unmapped(chunk));
}

void tell(Fixture& test, FakeStream& busy, FakeStream& idle) {
  std::vector<Region*> regions;
  for (const gpuloan_memory memory : kMemories) {
    for (const std::uint64_t bytes : {std::uint64_t{100}, std::uint64_t{5000}, 3 * kMiB}) {
      const std::uint64_t pinned = test.account->pinned();
      const auto chunks = test.arena->stats().chunks;
      const auto made = test.try_make(bytes, GPULOAN_ACCESS_WRITE, memory);
      if (made) {
        regions.push_back(*made);
      } else {
        CHECK_FALSE(made.error().text.empty());
        CHECK(test.account->pinned() == pinned);
        CHECK(test.arena->stats().chunks == chunks);
      }
    }
  }
  for (Region* const region : regions) {
    CHECK(test.arena->find(region->pointer() != 0 ? region->pointer() : reinterpret_cast<std::uint64_t>(region->host()), region->bytes()) == region);
    test.use(region, busy);
    test.use(region, idle);
    if (region->bytes() == 100) test.arena->announced(region->chunk_id());
    test.arena->destroy(region);
  }
  static_cast<void>(test.arena->sweep());
  busy.done = busy.queued;
  static_cast<void>(test.arena->sweep());
  unmap_all(test);
}

// How many calls the story makes when nothing fails.
std::uint64_t length_of_story() {
  Fixture test;
  FakeStream busy, idle;
  busy.queued = 1;
  tell(test, busy, idle);
  CHECK(test.arena->stats().chunks == 0);
  return calls();
}

} // namespace

TEST_CASE("any driver call may fail") {
  const std::uint64_t length = length_of_story();
  REQUIRE(length > 30);
  for (const CuResult code : {OutOfMemory, Unknown, NotSupported}) {
    for (std::uint64_t nth = 1; nth <= length; ++nth) {
      Fixture test;
      FakeStream busy, idle;
      busy.queued = 1;
      state().fail_at = nth;
      state().fail_code = code;
      tell(test, busy, idle);
      CAPTURE(nth);
      CAPTURE(code);
      CAPTURE(state().failed);
      state().fail_at = 0;
      static_cast<void>(test.arena->sweep());
      unmap_all(test);
      CHECK(test.arena->stats().chunks == 0);
      CHECK(test.account->pinned() == 0);
      CHECK(state().empty() == (calls("cuEventCreate") == calls("cuEventDestroy")));
    }
  }
}

TEST_CASE("threads create, find, sweep and destroy") {
  Fixture test(0, 4 * kMiB);
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&test, thread] {
      std::mt19937 random(thread);
      FakeStream stream;
      for (int round = 0; round < 300; ++round) {
        const auto access = random() % 2 == 0 ? GPULOAN_ACCESS_READ : GPULOAN_ACCESS_WRITE;
        const auto made = test.try_make(1 + random() % (3 * kMiB), access);
        if (!made) continue;
        if (test.arena->find((*made)->pointer(), (*made)->bytes()) != *made) std::abort();
        test.use(*made, stream);
        test.arena->destroy(*made);
        if (round % 16 == 0) static_cast<void>(test.arena->sweep());
        if (round % 32 == 0) static_cast<void>(test.arena->recall());
        static_cast<void>(test.arena->stats());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(test.arena->stats().live_bytes == 0);
}
