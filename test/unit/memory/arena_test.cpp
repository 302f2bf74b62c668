// SPDX-License-Identifier: MIT
//
// Regions: sizes, places, addresses, errors; what a warm arena costs in driver calls (nothing).
#include "arena_fixture.hpp"

#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>

using namespace fake;

TEST_CASE("a region of no bytes has no chunk and no address") {
  Fixture test;
  Region* const region = test.make(0);
  CHECK(region->pointer() == 0);
  CHECK(region->chunk_id() == 0);
  CHECK(test.arena->find(0, 0) == nullptr);
  const auto record = test.arena->announcement(region);
  REQUIRE(record);
  CHECK_FALSE(record->needed);
  test.arena->used_on(region, nullptr);
  CHECK(calls() == 0);
  test.arena->destroy(region);
}

// L2
TEST_CASE("large regions get chunks of their own, rounded to 2 MiB") {
  Fixture test;
  Region* const region = test.make(3 * kMiB + 1);
  CHECK(region->alone());
  CHECK(region->chunk_bytes() == 4 * kMiB);
  CHECK(region->chunk_offset() == 0);
  CHECK(region->pointer() % (2 * kMiB) == 0);
  CHECK(region->host() == nullptr);
  CHECK(test.arena->stats().live_bytes == 3 * kMiB + 1);
  CHECK(test.account->pinned() == 4 * kMiB);
  Region* const other = test.make(kMiB);
  CHECK(other->alone());
  CHECK(other->chunk_id() != region->chunk_id());
  test.arena->destroy(region);
  test.arena->destroy(other);
  CHECK(test.arena->stats().live_bytes == 0);
  CHECK(test.arena->stats().idle_bytes == 6 * kMiB);
}

TEST_CASE("a device with a larger granularity decides") {
  Fixture test;
  state().granularity = 8 * kMiB;
  test.arena.reset();
  test.gpu = open_gpu();
  test.arena.emplace(test.gpu, test.account, 0);
  CHECK(test.make(1)->chunk_bytes() == 8 * kMiB);
  CHECK(test.make(9 * kMiB)->chunk_bytes() == 16 * kMiB);
  CHECK(test.make(1, GPULOAN_ACCESS_READ, GPULOAN_MEMORY_HOST)->chunk_bytes() == 2 * kMiB);
}

TEST_CASE("sizes beyond everything are refused and give nothing up") {
  Fixture test;
  test.arena->destroy(test.make(4 * kMiB));
  const std::uint64_t sizes[] = {UINT64_MAX, UINT64_MAX - kMiB, std::uint64_t{1} << 63, state().total + 1};
  for (const std::uint64_t bytes : sizes) {
    CAPTURE(bytes);
    const auto device = test.try_make(bytes);
    REQUIRE_FALSE(device);
    CHECK(device.error().status == GPULOAN_ERR_DEVICE_MEMORY);
  }
  for (const std::uint64_t bytes : {UINT64_MAX, UINT64_MAX - kMiB, std::uint64_t{1} << 63, std::uint64_t{1} << 62}) {
    CAPTURE(bytes);
    const auto host = test.try_make(bytes, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_HOST);
    REQUIRE_FALSE(host);
    CHECK(host.error().status == GPULOAN_ERR_NO_MEMORY);
  }
  CHECK(test.arena->stats().idle_bytes == 4 * kMiB);
  CHECK(test.account->pinned() == 4 * kMiB);
  CHECK(calls("cuMemCreate") == 1);
}

TEST_CASE("bad specifications are named") {
  Fixture test;
  for (const std::uint64_t alignment : {std::uint64_t{3}, std::uint64_t{768}, 4 * kMiB, UINT64_MAX}) {
    const auto made = test.try_make(1, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_DEVICE, false, alignment);
    REQUIRE_FALSE(made);
    CHECK(made.error().status == GPULOAN_ERR_INVALID);
    CHECK(made.error().text.find(std::to_string(alignment)) != std::string::npos);
  }
  CHECK(test.try_make(1, static_cast<gpuloan_access>(3)).error().status == GPULOAN_ERR_INVALID);
}

TEST_CASE("small regions of one class share a chunk, others do not") {
  Fixture test;
  Region* const first = test.make(100);
  Region* const second = test.make(kMiB - 1);
  CHECK_FALSE(first->alone());
  CHECK(second->chunk_id() == first->chunk_id());
  CHECK(second->chunk_offset() == 256);
  CHECK(second->pointer() == first->pointer() + 256);
  CHECK(test.make(100, GPULOAN_ACCESS_READ)->chunk_id() != first->chunk_id());
  CHECK(test.make(100, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_HOST)->chunk_id() != first->chunk_id());
  Region* const own = test.make(100, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_DEVICE, true);
  CHECK(own->alone());
  CHECK(own->chunk_bytes() == 2 * kMiB);
  CHECK(own->chunk_id() != first->chunk_id());
  CHECK(test.make(kMiB - 1)->chunk_id() != first->chunk_id()); // no room left
}

TEST_CASE("alignments hold for device and host addresses") {
  Fixture test;
  for (const gpuloan_memory memory : {GPULOAN_MEMORY_DEVICE, GPULOAN_MEMORY_HOST}) {
    for (std::uint64_t alignment = 1; alignment <= 2 * kMiB; alignment *= 2) {
      CAPTURE(alignment);
      Region* const region = test.make(300, GPULOAN_ACCESS_WRITE, memory, false, alignment);
      CHECK(region->pointer() % std::max<std::uint64_t>(alignment, 256) == 0);
      CHECK(reinterpret_cast<std::uintptr_t>(region->host()) % alignment == 0);
    }
  }
  CHECK(test.arena->stats().chunks == 6); // per kind two more, once the only multiples of 1 and 2 MiB are taken
}

TEST_CASE("a warm arena makes no driver call") {
  Fixture test;
  test.arena->destroy(test.make(8 * kMiB));
  test.arena->destroy(test.make(1000));
  const std::uint64_t before = calls();
  for (int round = 0; round < 1000; ++round) {
    Region* const large = test.make(8 * kMiB);
    Region* const small = test.make(1000);
    test.arena->destroy(large);
    test.arena->destroy(small);
  }
  CHECK(calls() == before);
  CHECK(test.arena->stats().chunks == 2);
}

TEST_CASE("an idle chunk is taken for sizes up to an eighth below its own") {
  Fixture test;
  const auto chunk_of = [&](std::uint64_t bytes) {
    Region* const region = test.make(bytes);
    const std::uint64_t id = region->chunk_id();
    test.arena->destroy(region);
    return id;
  };
  const std::uint64_t large = chunk_of(36 * kMiB);
  CHECK(chunk_of(36 * kMiB) == large);
  CHECK(chunk_of(32 * kMiB) == large);
  CHECK(chunk_of(31 * kMiB) == large);
  CHECK(chunk_of(30 * kMiB) != large);
  CHECK(chunk_of(38 * kMiB) != large);
  CHECK(chunk_of(34 * kMiB) == large); // best fit before the 38 MiB one
}

TEST_CASE("an idle chunk serves small and large regions alike") {
  Fixture test;
  Region* const small = test.make(100);
  const std::uint64_t chunk = small->chunk_id();
  test.arena->destroy(small);
  Region* const own = test.make(2 * kMiB);
  CHECK(own->chunk_id() == chunk);
  test.arena->destroy(own);
  Region* const again = test.make(5000);
  CHECK(again->chunk_id() == chunk);
  CHECK(again->chunk_offset() == 0);
}

TEST_CASE("the fullest chunk is filled first, so that others become idle") {
  Fixture test;
  std::vector<Region*> regions;
  for (int count = 0; count < 8; ++count) regions.push_back(test.make(kMiB / 2)); // two full chunks
  CHECK(test.arena->stats().chunks == 2);
  test.arena->destroy(regions[0]);
  test.arena->destroy(regions[4]);
  test.arena->destroy(regions[5]);
  CHECK(test.make(100)->chunk_id() == regions[1]->chunk_id());
}

TEST_CASE("find names the live region that holds a range") {
  Fixture test;
  Region* const first = test.make(1000);
  Region* const second = test.make(1000);
  Region* const large = test.make(4 * kMiB);
  CHECK(test.arena->find(first->pointer(), 1000) == first);
  CHECK(test.arena->find(first->pointer() + 999, 1) == first);
  CHECK(test.arena->find(first->pointer() + 1, 1000) == nullptr);
  CHECK(test.arena->find(first->pointer() + 1000, 1) == nullptr); // the gap up to the next unit
  CHECK(test.arena->find(first->pointer() - 1, 1) == nullptr);
  CHECK(test.arena->find(second->pointer(), 0) == second);
  CHECK(test.arena->find(first->pointer(), second->pointer() - first->pointer() + 1) == nullptr);
  CHECK(test.arena->find(large->pointer() + 5, UINT64_MAX) == nullptr);
  CHECK(test.arena->find(UINT64_MAX, 1) == nullptr);
  CHECK(test.arena->find(0, 0) == nullptr);
  const std::uint64_t gone = second->pointer();
  test.arena->destroy(second);
  CHECK(test.arena->find(gone, 1) == nullptr);
}

TEST_CASE("host regions have two addresses and can be written") {
  Fixture test;
  Region* const region = test.make(5000, GPULOAN_ACCESS_READ, GPULOAN_MEMORY_HOST);
  REQUIRE(region->host() != nullptr);
  std::memset(region->host(), 7, 5000);
  CHECK(region->pointer() != 0);
  CHECK(test.arena->find(region->pointer() + 5, 10) == region);
  CHECK(test.arena->find(reinterpret_cast<std::uintptr_t>(region->host()) + 5, 10) == region);
}

TEST_CASE("a host chunk's descriptor is sealed, and shows the same bytes") {
  Fixture test;
  Region* const region = test.make(3 * kMiB, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_HOST);
  region->host()[kMiB] = std::byte{42};
  const auto record = test.arena->announcement(region);
  REQUIRE(record);
  CHECK(record->memory == GPULOAN_MEMORY_HOST);
  CHECK(record->bytes == 4 * kMiB);
  const int seals = ::fcntl(record->fd.get(), F_GET_SEALS);
  CHECK((seals & (F_SEAL_SHRINK | F_SEAL_GROW)) == (F_SEAL_SHRINK | F_SEAL_GROW));
  CHECK(::ftruncate(record->fd.get(), 0) != 0);
  unsigned char byte = 0;
  CHECK(::pread(record->fd.get(), &byte, 1, kMiB) == 1);
  CHECK(byte == 42);
}

TEST_CASE("a chunk is announced once, then its descriptor is closed") {
  Fixture test;
  Region* const region = test.make(100, GPULOAN_ACCESS_READ);
  {
    const auto record = test.arena->announcement(region);
    REQUIRE(record);
    CHECK(record->needed);
    CHECK(record->chunk == region->chunk_id());
    CHECK(record->bytes == 2 * kMiB);
    CHECK(record->access == GPULOAN_ACCESS_READ);
    CHECK((::fcntl(record->fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
    CHECK(test.arena->announcement(region)->needed); // the record was not sent yet
  }
  CHECK(open_fds() == test.fds + 1);
  test.arena->announced(region->chunk_id());
  test.arena->announced(12345);
  CHECK(open_fds() == test.fds);
  CHECK_FALSE(test.arena->announcement(region)->needed);
  CHECK_FALSE(test.arena->announcement(test.make(100, GPULOAN_ACCESS_READ))->needed);
}

TEST_CASE("without a device there is host memory only") {
  Fixture test(0, 0, false);
  CHECK(test.try_make(1).error().status == GPULOAN_ERR_NO_DEVICE);
  Region* const region = test.make(3 * kMiB, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_HOST);
  CHECK(region->pointer() == 0);
  std::memset(region->host(), 1, region->bytes());
  CHECK(test.arena->find(reinterpret_cast<std::uintptr_t>(region->host()), region->bytes()) == region);
  test.arena->used_on(region, nullptr);
  test.arena->destroy(region);
  CHECK_FALSE(test.arena->sweep());
  CHECK(test.arena->stats().idle_bytes == 4 * kMiB);
}

TEST_CASE("host memory needs no registration") {
  Fixture test;
  state().host_register = false;
  test.arena.reset();
  test.gpu = open_gpu();
  test.arena.emplace(test.gpu, test.account, 0);
  Region* const host = test.make(1, GPULOAN_ACCESS_READ, GPULOAN_MEMORY_HOST);
  CHECK(host->pointer() == 0);
  CHECK(host->host() != nullptr);
}
