// SPDX-License-Identifier: MIT
//
// An arena on the fake driver, with shorthands. At its end everything has to be as it was: nothing left in the driver,
// nothing charged, no descriptor open, unless the test says that it leaves something behind on purpose.
#pragma once

#include "fake_driver.hpp"

#include <base/reaper.hpp>
#include <doctest/doctest.h>

#include <memory/arena.hpp>

#include <optional>

namespace fake {

using gpuloan::memory::Account;
using gpuloan::memory::Arena;
using gpuloan::memory::Region;
using gpuloan::memory::RegionSpec;

constexpr std::uint64_t kMiB = 1U << 20;

struct Fixture {
  explicit Fixture(std::uint64_t account_limit = 0, std::uint64_t idle_limit = 64 * kMiB, bool with_gpu = true)
      : fds((reset(), open_fds())),
        gpu(with_gpu ? open_gpu() : nullptr),
        account(std::make_shared<Account>("worker-1", account_limit)) {
    arena.emplace(gpu, account, idle_limit);
  }
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;
  ~Fixture() {
    arena.reset();
    gpuloan::wait_disposed(5000); // registered pages are given back by the reaper
    if (leaves_behind) return;
    CHECK(state().empty());
    CHECK(account->pinned() == 0);
    CHECK(open_fds() == fds);
  }

  [[nodiscard]] gpuloan::Result<Region*> try_make(std::uint64_t bytes, gpuloan_access access = GPULOAN_ACCESS_WRITE,
                                                  gpuloan_memory memory = GPULOAN_MEMORY_DEVICE, bool own = false,
                                                  std::uint64_t alignment = 0) {
    return arena->create({bytes, alignment, access, memory, own});
  }
  [[nodiscard]] Region* make(std::uint64_t bytes, gpuloan_access access = GPULOAN_ACCESS_WRITE,
                             gpuloan_memory memory = GPULOAN_MEMORY_DEVICE, bool own = false,
                             std::uint64_t alignment = 0) {
    auto made = try_make(bytes, access, memory, own, alignment);
    if (!made) FAIL(made.error().text);
    return *made;
  }
  [[nodiscard]] Region* make_announced(std::uint64_t bytes) {
    Region* const region = make(bytes);
    REQUIRE(arena->announcement(region));
    arena->announced(region->chunk_id());
    return region;
  }
  void use(Region* region, FakeStream& stream) { arena->used_on(region, handle_of(stream)); }

  std::size_t fds;
  std::shared_ptr<gpuloan::driver::Gpu> gpu;
  std::shared_ptr<Account> account;
  std::optional<Arena> arena;
  bool leaves_behind = false;
};

} // namespace fake
