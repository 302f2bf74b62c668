// SPDX-License-Identifier: MIT
//
// Two process-wide words. `claimed` is the fork generation in which the driver was first initialised (0: never) and is
// written once; `exiting` is set by an exit handler and never cleared. Any thread reads both without a lock.
#include <driver/lifetime.hpp>

#include <base/fork.hpp>

#include <atomic>
#include <cstdlib>

namespace gpuloan::driver {
namespace {

std::atomic<std::uint32_t> claimed{0};
std::atomic<bool> exiting{false};

} // namespace

void claim_process() noexcept {
  std::uint32_t never = 0;
  claimed.compare_exchange_strong(never, fork_generation(), std::memory_order_relaxed);
}

void watch_exit() noexcept {
  // In libgpuloan.so the handler also runs when the library is closed, which is right: its code goes away.
  static const int registered = std::atexit([] { exiting.store(true, std::memory_order_relaxed); });
  static_cast<void>(registered);
}

bool forked_since_claim() noexcept {
  const std::uint32_t generation = claimed.load(std::memory_order_relaxed);
  return generation != 0 && generation != fork_generation();
}

bool calls_allowed() noexcept { return !exiting.load(std::memory_order_relaxed) && !forked_since_claim(); }

Result<void> check_calls_allowed() {
  if (forked_since_claim()) {
    return fail(GPULOAN_ERR_FORKED,
                "the CUDA driver was initialised before this process was forked and cannot be used in the child: start "
                "workers with exec");
  }
  if (!calls_allowed()) return fail(GPULOAN_ERR_STATE, "the process is exiting: the CUDA driver is not called any more");
  return {};
}

} // namespace gpuloan::driver
