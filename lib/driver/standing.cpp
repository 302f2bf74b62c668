// SPDX-License-Identifier: MIT
#include <driver/standing.hpp>

#include <base/process_wide.hpp>

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace gpuloan::driver {
namespace {

// Waits that follow each other without a gap would hold up the calls for ever. So new ones are held up in turn, but not for long:
// what a peer waits for before it lets the present ones pass may come behind one.
constexpr std::chrono::milliseconds kPatience(100);
constexpr std::chrono::milliseconds kBarred(10);

struct State {
  std::mutex mutex;
  std::condition_variable passed; // no stream waits any more
  unsigned waits = 0, calls = 0, barring = 0;
};

State& state() noexcept { return process_wide<State>(); }

} // namespace

std::optional<StreamWait> StreamWait::begin() noexcept {
  const std::lock_guard lock(state().mutex);
  if (state().calls + state().barring > 0) return {};
  ++state().waits;
  return StreamWait();
}

StreamWait::~StreamWait() {
  if (!begun_) return;
  const std::lock_guard lock(state().mutex);
  if (--state().waits == 0) state().passed.notify_all();
}

StandingCall::StandingCall() noexcept {
  std::unique_lock lock(state().mutex);
  const auto none = [] { return state().waits == 0; };
  while (!state().passed.wait_for(lock, kPatience, none)) {
    ++state().barring;
    const bool over = state().passed.wait_for(lock, kBarred, none);
    --state().barring;
    if (over) break;
  }
  ++state().calls;
}

StandingCall::~StandingCall() {
  const std::lock_guard lock(state().mutex);
  --state().calls;
}

} // namespace gpuloan::driver
