// SPDX-License-Identifier: MIT
//
// The arena on a driver that really has memory: the simulated one that GPULOAN_SIM_LIBRARY names. Regions are written and
// read on streams, a second mapping of a chunk shows the same bytes, memory comes back, warm loops make no driver call.
// Exit code 77 (skip) without the library.
#include <base/reaper.hpp>
#include <doctest/doctest.h>

#include <driver/handles.hpp>
#include <memory/arena.hpp>
#include <sim/sim.h>

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <unistd.h>
#include <vector>

using namespace gpuloan;
using memory::Account;
using memory::Arena;
using memory::Region;

namespace {

constexpr std::uint64_t kMiB = 1U << 20;

template <typename Function>
Function* hook(const char* name) {
  static void* const library = ::dlopen(std::getenv("GPULOAN_SIM_LIBRARY"), RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<Function*>(::dlsym(library, name));
}

std::size_t open_fds() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

std::int64_t live(const char* what) { return hook<decltype(gpuloan_sim_live)>("gpuloan_sim_live")(what); }

std::shared_ptr<driver::Gpu> gpu() {
  static const std::shared_ptr<driver::Gpu> opened = [] {
    auto driver = driver::Driver::open("sim");
    if (!driver) FAIL(driver.error().text);
    auto made = driver::Gpu::open(*driver, 0);
    if (!made) FAIL(made.error().text);
    return *made;
  }();
  return opened;
}

std::size_t free_bytes() {
  const driver::Gpu::Scope scope(*gpu());
  std::size_t free = 0;
  std::size_t total = 0;
  REQUIRE(gpu()->driver().call.cuMemGetInfo(&free, &total) == driver::Success);
  return free;
}

void fill(driver::DevicePtr pointer, unsigned char value, std::size_t bytes, driver::Stream stream) {
  const driver::Gpu::Scope scope(*gpu());
  REQUIRE(gpu()->driver().call.cuMemsetD8Async(pointer, value, bytes, stream) == driver::Success);
}

std::vector<unsigned char> read(driver::DevicePtr pointer, std::size_t bytes, driver::Stream stream) {
  std::vector<unsigned char> result(bytes);
  const driver::Gpu::Scope scope(*gpu());
  REQUIRE(gpu()->driver().call.cuMemcpyDtoHAsync(result.data(), pointer, bytes, stream) == driver::Success);
  REQUIRE(gpu()->driver().call.cuStreamSynchronize(stream) == driver::Success);
  return result;
}

void hold(driver::Stream stream) {
  const driver::Gpu::Scope scope(*gpu());
  REQUIRE(hook<decltype(gpuloan_sim_stream_hold)>("gpuloan_sim_stream_hold")(stream) == driver::Success);
}
void release(driver::Stream stream) {
  const driver::Gpu::Scope scope(*gpu());
  REQUIRE(hook<decltype(gpuloan_sim_stream_release)>("gpuloan_sim_stream_release")(stream) == driver::Success);
}

// An arena and a stream; at the end descriptors, driver objects and device memory have to be what they were.
struct Fixture {
  Fixture() : account(std::make_shared<Account>("worker-1", 0)) {
    // The first use makes the context and whatever the driver keeps for itself.
    static const bool warmed = [] { return Arena(gpu(), std::make_shared<Account>("", 0), 0).create({1}).has_value(); }();
    REQUIRE(warmed);
    free_before = free_bytes();
    stream = std::move(*driver::OwnedStream::create(gpu()));
    fds = open_fds();
    arena.emplace(gpu(), account, 64 * kMiB);
  }
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;
  ~Fixture() {
    arena.reset();
    gpuloan::wait_disposed(5000); // registered pages are given back by the reaper
    CHECK(open_fds() == fds);
    for (const char* what : {"handles", "mappings", "reservations", "host", "events"}) {
      CAPTURE(what);
      CHECK(live(what) == 0);
    }
    CHECK(free_bytes() == free_before);
    CHECK(account->pinned() == 0);
  }
  [[nodiscard]] Region* make(std::uint64_t bytes, gpuloan_memory memory = GPULOAN_MEMORY_DEVICE) {
    auto made = arena->create({bytes, 0, GPULOAN_ACCESS_WRITE, memory, false});
    if (!made) FAIL(made.error().text);
    return *made;
  }

  std::shared_ptr<Account> account;
  std::size_t free_before = 0, fds = 0;
  driver::OwnedStream stream;
  std::optional<Arena> arena;
};

} // namespace

TEST_CASE("regions hold what is written and do not overlap") {
  Fixture test;
  std::vector<Region*> regions;
  for (const std::uint64_t bytes : {1U, 300U, 4096U, 999999U, 3000000U}) {
    regions.push_back(test.make(bytes));
    regions.push_back(test.make(bytes, GPULOAN_MEMORY_HOST));
  }
  unsigned char value = 0;
  for (Region* const region : regions) fill(region->pointer(), ++value, region->bytes(), test.stream.get());
  value = 0;
  for (Region* const region : regions) {
    const auto bytes = read(region->pointer(), region->bytes(), test.stream.get());
    CHECK(bytes == std::vector<unsigned char>(region->bytes(), ++value));
    if (region->host() != nullptr) CHECK(region->host()[region->bytes() - 1] == std::byte{value});
  }
}

TEST_CASE("a second mapping of the chunk shows the same bytes, and outlives ours") {
  Fixture test;
  Region* const first = test.make(5000);
  Region* const second = test.make(5000);
  auto record = test.arena->announcement(second);
  REQUIRE(record);
  auto handle = driver::VmmHandle::import_fd(gpu(), record->fd.get(), record->bytes);
  REQUIRE(handle);
  auto mapping = driver::VmmMapping::map(gpu(), *handle, driver::AccessReadWrite);
  REQUIRE(mapping);
  record = {};
  test.arena->announced(second->chunk_id());
  fill(mapping->pointer() + second->chunk_offset(), 9, 5000, test.stream.get());
  CHECK(read(second->pointer(), 5000, test.stream.get()) == std::vector<unsigned char>(5000, 9));
  CHECK(read(first->pointer(), 5000, test.stream.get()) != std::vector<unsigned char>(5000, 9));
  const std::uint64_t offset = second->chunk_offset();
  test.arena->destroy(first);
  test.arena->destroy(second);
  test.arena->retire();
  CHECK(test.arena->stats().surrendered_bytes == 2 * kMiB);
  CHECK(free_bytes() == test.free_before - 2 * kMiB); // the peer's mapping keeps it (V3)
  CHECK(read(mapping->pointer() + offset, 5000, test.stream.get()) == std::vector<unsigned char>(5000, 9));
}

TEST_CASE("memory comes back to the device") {
  Fixture test;
  std::vector<Region*> regions;
  for (int count = 0; count < 5; ++count) regions.push_back(test.make(7 * kMiB));
  CHECK(free_bytes() == test.free_before - 40 * kMiB);
  for (Region* const region : regions) test.arena->destroy(region);
  CHECK(free_bytes() == test.free_before - 40 * kMiB); // idle, kept
  CHECK(test.arena->recall(true).empty());             // the peer never had them
  CHECK(free_bytes() == test.free_before);
}

TEST_CASE("a held stream keeps the bytes until it is released") {
  Fixture test;
  Region* const region = test.make(4 * kMiB);
  const std::uint64_t chunk = region->chunk_id();
  hold(test.stream.get());
  fill(region->pointer(), 1, region->bytes(), test.stream.get());
  test.arena->used_on(region, test.stream.get());
  test.arena->destroy(region);
  Region* const other = test.make(4 * kMiB);
  CHECK(other->chunk_id() != chunk);
  CHECK(test.arena->recall(true).empty());
  CHECK(test.arena->sweep());
  release(test.stream.get());
  const driver::Gpu::Scope scope(*gpu());
  REQUIRE(gpu()->driver().call.cuStreamSynchronize(test.stream.get()) == driver::Success);
  CHECK_FALSE(test.arena->sweep());
  CHECK(test.make(4 * kMiB)->chunk_id() == chunk);
}

TEST_CASE("the default streams, busy and idle") {
  Fixture test;
  for (const driver::Stream stream : {driver::Stream{nullptr}, driver::legacy_stream(), driver::per_thread_stream()}) {
    const driver::Gpu::Scope scope(*gpu());
    Region* const region = test.make(100);
    hold(stream);
    fill(region->pointer(), 1, region->bytes(), stream);
    test.arena->used_on(region, stream);
    test.arena->destroy(region);
    CHECK(test.arena->sweep());
    release(stream);
    REQUIRE(gpu()->driver().call.cuCtxSynchronize() == driver::Success);
    CHECK_FALSE(test.arena->sweep());
  }
}

// L3
TEST_CASE("a thousand warm rounds cost no driver call") {
  Fixture test;
  const auto calls = hook<decltype(gpuloan_sim_calls)>("gpuloan_sim_calls");
  const char* const functions[] = {"cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease", "cuMemExportToShareableHandle",
                                   "cuCtxGetCurrent", "cuEventCreate", "cuEventQuery", "cuMemHostRegister"};
  std::int64_t before = 0;
  std::int64_t after = 0;
  for (int round = 0; round < 1001; ++round) {
    Region* const regions[] = {test.make(8 * kMiB), test.make(1000), test.make(kMiB, GPULOAN_MEMORY_HOST)};
    for (Region* const region : regions) test.arena->destroy(region);
    if (round == 0) {
      for (const char* name : functions) before += calls(name);
    }
  }
  for (const char* name : functions) after += calls(name);
  CHECK(after == before);
}

TEST_CASE("more than the device has is refused with numbers, and everything still works") {
  Fixture test;
  std::vector<Region*> regions;
  std::string text;
  while (text.empty()) {
    const auto made = test.arena->create({std::max<std::uint64_t>(free_bytes() / 2, 64 * kMiB)});
    if (made) {
      regions.push_back(*made);
    } else {
      CHECK(made.error().status == GPULOAN_ERR_DEVICE_MEMORY);
      text = made.error().text;
    }
  }
  CHECK(text.find(std::to_string(free_bytes()) + " of ") != std::string::npos);
  for (Region* const region : regions) test.arena->destroy(region);
  CHECK(test.make(32 * kMiB) != nullptr); // out of what was idle
}

// A16
TEST_CASE("random regions never overlap and keep their bytes") {
  Fixture test;
  std::mt19937_64 random(7);
  struct Filled {
    Region* region;
    unsigned char value;
  };
  std::vector<Filled> regions;
  for (int round = 0; round < 300; ++round) {
    if (regions.empty() || random() % 100 < 60) {
      Region* const region = test.make(1 + random() % (random() % 8 == 0 ? 3 * kMiB : 40000));
      regions.push_back({region, static_cast<unsigned char>(random())});
      fill(region->pointer(), regions.back().value, region->bytes(), test.stream.get());
      test.arena->used_on(region, test.stream.get());
      continue;
    }
    std::swap(regions[random() % regions.size()], regions.back());
    const Filled& last = regions.back();
    CHECK(read(last.region->pointer(), last.region->bytes(), test.stream.get()) ==
          std::vector<unsigned char>(last.region->bytes(), last.value));
    test.arena->destroy(last.region);
    regions.pop_back();
  }
}

int main(int argc, char** argv) {
  if (std::getenv("GPULOAN_SIM_LIBRARY") == nullptr) {
    std::puts("skipped: GPULOAN_SIM_LIBRARY names no simulated driver");
    return 77;
  }
  // A device of this test's own: others count its memory too.
  const std::string state = "/dev/shm/gpuloan-arena-test-" + std::to_string(::getpid());
  ::setenv("GPULOAN_SIM_STATE", state.c_str(), 1);
  ::setenv("GPULOAN_SIM_MEMORY_MIB", "1024", 1);
  const int result = doctest::Context(argc, argv).run();
  ::unlink(state.c_str());
  return result;
}
