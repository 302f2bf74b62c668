// SPDX-License-Identifier: MIT
//
// Rule 11: bytes are reused and chunks unmapped only after the streams that used them have passed; streams in capture are
// not touched; what cannot be proven is not assumed; nothing waits but the end of an arena, and that not for ever.
#include "arena_fixture.hpp"

#include <base/clock.hpp>

#include <thread>

using namespace fake;

namespace {

// Destroys a region and says whether its chunk could be had again at once.
bool reused_after_destroy(Fixture& test, Region* region) {
  const std::uint64_t chunk = region->chunk_id();
  const std::uint64_t bytes = region->bytes();
  test.arena->destroy(region);
  Region* const next = test.make(bytes);
  const bool same = next->chunk_id() == chunk;
  test.arena->destroy(next);
  return same;
}

} // namespace

TEST_CASE("an idle stream needs no event") {
  Fixture test;
  FakeStream stream;
  Region* const region = test.make(4 * kMiB);
  test.use(region, stream);
  CHECK(reused_after_destroy(test, region));
  CHECK(calls("cuEventCreate") == 0);
}

TEST_CASE("a busy stream defers the bytes until its work has passed, and no later") {
  Fixture test;
  FakeStream stream;
  stream.queued = 1;
  Region* const region = test.make(4 * kMiB);
  const std::uint64_t chunk = region->chunk_id();
  test.use(region, stream);
  test.use(region, stream);
  test.arena->destroy(region);
  CHECK(calls("cuEventRecord") == 1);
  CHECK(test.arena->stats().live_bytes == 0);
  CHECK(test.arena->stats().idle_bytes == 0);
  CHECK(test.arena->find(region->pointer(), 1) == nullptr);
  Region* const other = test.make(4 * kMiB);
  CHECK(other->chunk_id() != chunk);
  CHECK(test.arena->sweep());
  stream.queued = 2; // work that came after the destroy does not count
  stream.done = 1;
  CHECK_FALSE(test.arena->sweep());
  CHECK(test.arena->stats().idle_bytes == 4 * kMiB);
  CHECK(test.make(4 * kMiB)->chunk_id() == chunk);
  stream.done = 2;
}

TEST_CASE("create sweeps before it makes a chunk") {
  Fixture test;
  FakeStream stream;
  stream.queued = 1;
  Region* const region = test.make(4 * kMiB);
  const std::uint64_t chunk = region->chunk_id();
  test.use(region, stream);
  test.arena->destroy(region);
  stream.done = 1;
  CHECK(test.make(4 * kMiB)->chunk_id() == chunk);
}

TEST_CASE("every stream has to pass") {
  Fixture test;
  FakeStream streams[3];
  Region* const region = test.make(100);
  for (FakeStream& stream : streams) {
    stream.queued = 1;
    test.use(region, stream);
  }
  test.arena->destroy(region);
  CHECK(calls("cuEventRecord") == 3);
  streams[0].done = streams[2].done = 1;
  CHECK(test.arena->sweep());
  streams[1].done = 1;
  CHECK_FALSE(test.arena->sweep());
}

TEST_CASE("events are used again") {
  Fixture test;
  FakeStream stream;
  for (int round = 0; round < 50; ++round) {
    ++stream.queued;
    Region* const region = test.make(100);
    test.use(region, stream);
    test.arena->destroy(region);
    ++stream.done;
    CHECK_FALSE(test.arena->sweep());
  }
  CHECK(calls("cuEventRecord") == 50);
  CHECK(calls("cuEventCreate") == 1);
}

TEST_CASE("only the bytes that are still used wait") {
  Fixture test;
  FakeStream stream;
  stream.queued = 1;
  Region* const busy = test.make(1000);
  Region* const other = test.make(1000);
  const std::uint64_t offset = other->chunk_offset();
  test.use(busy, stream);
  test.arena->destroy(busy);
  test.arena->destroy(other);
  Region* const next = test.make(1000);
  CHECK(next->chunk_offset() == offset);
  CHECK(test.arena->stats().chunks == 1);
  stream.done = 1;
}

TEST_CASE("a stream in capture is not touched") {
  Fixture test;
  FakeStream stream;
  stream.capture = CaptureActive;
  Region* const region = test.make(4 * kMiB);
  test.use(region, stream);
  CHECK_FALSE(reused_after_destroy(test, region));
  CHECK(test.arena->sweep());
  CHECK(stream.touched_in_capture == 0);
  stream.capture = CaptureNone;
  stream.queued = 1; // the graph was launched into it
  CHECK(test.arena->sweep());
  stream.done = 1;
  CHECK_FALSE(test.arena->sweep());
  CHECK(test.arena->stats().idle_bytes == 8 * kMiB);
}

TEST_CASE("the default streams are waited for by an event in the legacy stream") {
  for (const Stream stream : {Stream{nullptr}, gpuloan::cuda::legacy_stream(), gpuloan::cuda::per_thread_stream()}) {
    Fixture test;
    state().legacy.queued = 1;
    Region* const region = test.make(4 * kMiB);
    test.arena->used_on(region, stream);
    test.arena->used_on(region, nullptr); // the same one
    CHECK_FALSE(reused_after_destroy(test, region));
    CHECK(calls("cuStreamQuery") == 0);
    CHECK(calls("cuEventRecord") == 1);
    state().legacy.done = 1;
    CHECK_FALSE(test.arena->sweep());
  }
}

TEST_CASE("the legacy stream is left alone while a blocking stream is in capture") {
  Fixture test;
  state().legacy.capture = CaptureActive; // the fake then answers 906
  Region* const region = test.make(4 * kMiB);
  test.arena->used_on(region, nullptr);
  test.arena->destroy(region);
  CHECK(test.arena->sweep());
  CHECK(calls("cuEventRecord") == 0);
  state().legacy.capture = CaptureNone;
  CHECK_FALSE(test.arena->sweep());
}

TEST_CASE("a stream that takes no event of ours is asked again") {
  Fixture test;
  FakeStream stream;
  stream.queued = 1;
  Region* const region = test.make(4 * kMiB);
  test.use(region, stream);
  state().fail_at = calls() == 0 ? 1 : 4; // is_capturing, query, create, record
  state().fail_code = InvalidHandle;
  test.arena->destroy(region);
  CHECK(state().failed == "cuEventRecord");
  CHECK(test.arena->stats().idle_bytes == 0);
  stream.done = 1;
  CHECK_FALSE(test.arena->sweep());
  CHECK(test.arena->stats().idle_bytes == 4 * kMiB);
}

TEST_CASE("a sticky error ends the work with the context") {
  Fixture test;
  FakeStream stream;
  stream.queued = 1;
  Region* const region = test.make(4 * kMiB);
  test.use(region, stream);
  test.arena->destroy(region);
  state().fail_at = 1;
  state().fail_code = IllegalAddress;
  CHECK_FALSE(test.arena->sweep());
  CHECK(test.arena->stats().idle_bytes == 4 * kMiB);
}

TEST_CASE("a dead stream proves nothing: the chunk stays mapped for ever, and nobody waits for it") {
  Fixture test;
  test.leaves_behind = true;
  FakeStream stream;
  stream.valid = false;
  Region* const region = test.make(4 * kMiB);
  Region* const other = test.make(2 * kMiB);
  test.use(region, stream);
  test.arena->destroy(region);
  test.arena->destroy(other);
  CHECK_FALSE(test.arena->sweep());
  const std::uint64_t start = gpuloan::now_ns();
  test.arena.reset();
  CHECK(gpuloan::now_ns() - start < 900'000'000U);
  CHECK(state().mapped.size() == 1);
  CHECK(test.account->pinned() == 4 * kMiB); // and stays charged
}

TEST_CASE("the end of an arena waits for work that ends") {
  Fixture test;
  FakeStream stream;
  stream.queued = 1;
  Region* const region = test.make(4 * kMiB);
  test.use(region, stream);
  std::thread worker([&stream] {
    while (calls("cuEventQuery") < 3) std::this_thread::yield();
    const std::lock_guard lock(state().mutex);
    CHECK(state().mapped.size() == 1);
    stream.done = 1;
  });
  test.arena.reset(); // destroys the region that is left, too
  worker.join();
  CHECK(state().mapped.empty());
}

// R22
TEST_CASE("the end of an arena does not wait for ever, and unmaps nothing under running work") {
  Fixture test;
  test.leaves_behind = true;
  FakeStream stream;
  stream.queued = 1;
  Region* const first = test.make(100);
  Region* const second = test.make(100);
  for (Region* const region : {first, second}) {
    test.use(region, stream);
    test.arena->destroy(region);
  }
  test.arena->destroy(test.make(4 * kMiB));
  const std::uint64_t start = gpuloan::now_ns();
  test.arena.reset();
  CHECK(gpuloan::now_ns() - start >= 1'000'000'000U);
  CHECK(state().mapped.size() == 1);
  CHECK(test.account->pinned() == 2 * kMiB);
}
