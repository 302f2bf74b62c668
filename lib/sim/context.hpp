// SPDX-License-Identifier: MIT
//
// Contexts and the per-thread stack of current ones. The stack holds handles: a primary context that was released for
// the last time and is retained again has the same handle, and is then current again where it was (as measured).
//
// A ContextState owns the streams of a context and the one lock that guards all their queues. States: alive; failed
// (`sticky` holds the result that every later call gets; queued work is dropped); dying (work is dropped, workers end).
// A stream's worker thread keeps the context alive, so the object may outlive its handle for a moment.
#pragma once

#include <sim/handles.hpp>
#include <sim/rows.hpp>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

namespace gpuloan::sim {

class StreamState;

struct ContextState {
  ContextState(Device which, std::uint64_t number);

  const Device device;
  const int physical;
  const std::uint64_t handle;

  std::atomic<CuResult> sticky{Success};
  std::atomic<bool> dying{false};

  std::mutex mutex; // everything below, and the queues of all streams
  std::condition_variable progress; // something finished, failed or was released
  std::vector<std::shared_ptr<StreamState>> streams; // open ones, and closed ones whose work is not done
  std::shared_ptr<StreamState> legacy; // null once the context is destroyed
  unsigned workers = 0;
  unsigned standing = 0; // calls that wait for everything queued (fact S10)

  [[nodiscard]] std::shared_ptr<StreamState> legacy_stream() {
    const std::lock_guard lock(mutex);
    return legacy;
  }
  // True when work of this context has to stop waiting for anything.
  [[nodiscard]] bool cancelled() const noexcept {
    return dying.load(std::memory_order_acquire) || sticky.load(std::memory_order_acquire) != Success;
  }
};

using ContextRef = std::shared_ptr<ContextState>;

// Whether the thread's stack is not empty; the context on top may have been destroyed.
[[nodiscard]] bool has_current_context();
// The current context of this thread; null without one, and when it was destroyed.
[[nodiscard]] ContextRef current_context();
[[nodiscard]] ContextRef find_context(std::uint64_t handle); // null when there is no such context (any more)
[[nodiscard]] std::vector<ContextRef> all_contexts();
// Success, or why the context is of no use.
[[nodiscard]] CuResult context_state(const ContextState& context);
// Of a valid context; the per-thread stream of this thread is made at its first use.
[[nodiscard]] std::shared_ptr<StreamState> thread_stream(const ContextRef& context);

// Makes the context fail as a device fault does: `code` for every later call.
void fail_context(ContextState& context, CuResult code);

[[nodiscard]] std::size_t live_contexts();
[[nodiscard]] std::size_t live_waits(); // streams that stand in cuStreamWaitValue64

} // namespace gpuloan::sim
