// SPDX-License-Identifier: MIT
//
// Streams: first-in first-out queues of operations, each with a worker thread of its own that starts with the first
// operation. An operation starts no sooner than the lag after it was queued, so that whoever forgets a gate reads old
// bytes. All queues of a context are guarded by the context's lock; operations run unlocked.
//
// Tickets count the operations of a stream: `submitted` are queued or done, `completed` are done. The legacy default
// stream's rule is a list of tickets: its operations wait for what the blocking streams have queued so far, and
// theirs wait for what it has.
//
// Life: open; closed (cuStreamDestroy: no more submissions, the work ends, then the worker); cancelled with its
// context. Workers are detached, and nothing they use is ever destroyed at exit: a process may end with work pending.
#pragma once

#include <sim/context.hpp>

#include <chrono>
#include <cstdint>
#include <deque>
#include <thread>

namespace gpuloan::sim {

using Clock = std::chrono::steady_clock;

class Operation {
 public:
  Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  virtual ~Operation() = default;
  // Called once when the operation really takes its place in the queue, with the context locked. Not called for one
  // that a capture swallowed or that was refused.
  virtual void queued() {}
  // Whether it waits for a word that somebody has to write (fact S9).
  [[nodiscard]] virtual bool is_wait() const noexcept { return false; }
  // Runs on the stream's worker. Anything but Success is a device fault and fails the context. An operation that waits
  // returns Success as soon as the context is cancelled.
  [[nodiscard]] virtual CuResult run(StreamState& stream) = 0;
};

enum class StreamKind { Legacy, PerThread, Blocking, NonBlocking };

class StreamState {
 public:
  StreamState(ContextRef owner, StreamKind which) : context(std::move(owner)), kind(which) {}

  struct Dependency {
    std::shared_ptr<StreamState> stream;
    std::uint64_t ticket;
  };
  struct Item {
    std::unique_ptr<Operation> operation;
    Clock::time_point not_before;
    std::vector<Dependency> dependencies;
  };

  const ContextRef context;
  const StreamKind kind;

  // Guarded by context->mutex.
  std::condition_variable wake; // for the worker while it has nothing that it may start
  std::deque<Item> queue;
  std::uint64_t submitted = 0;
  std::uint64_t completed = 0;
  bool has_worker = false;
  bool closed = false;
  bool held = false;
  bool waiting = false; // what runs is a wait
  int capture = CaptureNone; // CaptureStatus
  int capture_mode = CaptureGlobal;
  std::thread::id capture_thread;

  [[nodiscard]] bool blocking() const noexcept { return kind == StreamKind::Blocking || kind == StreamKind::PerThread; }
  // Stands in a wait, or will as soon as its worker gets round to it.
  [[nodiscard]] bool at_wait() const noexcept {
    return waiting || (completed + queue.size() == submitted && !queue.empty() && queue.front().operation->is_wait());
  }
  [[nodiscard]] bool idle() const noexcept { return completed == submitted; }
};

using StreamRef = std::shared_ptr<StreamState>;

// With the context locked.
[[nodiscard]] StreamRef make_stream(const ContextRef& context, StreamKind kind);
// Drops what is queued; what runs notices by itself. The operations are returned for the caller to end them unlocked.
std::vector<std::unique_ptr<Operation>> cancel_streams(ContextState& context);

void close_stream(const StreamRef& stream);
// Forgets the handles of a context's streams.
void forget_streams(const ContextState& context);

// A stream handle as a caller gives it, if its context is well; the two built-in ones need the current context.
[[nodiscard]] CuResult resolve_stream(Stream handle, StreamRef& out);

[[nodiscard]] CuResult submit(const StreamRef& stream, std::unique_ptr<Operation> operation);
// The same, and returns when the operation has run.
[[nodiscard]] CuResult submit_and_wait(const StreamRef& stream, std::unique_ptr<Operation> operation);
[[nodiscard]] CuResult synchronize_context(ContextState& context);
// What a call of the current context does that gets no turn while another waits for everything queued (fact S10).
void stand_behind_others();

// A held stream starts no operation until it is released.
void hold_stream(const StreamRef& stream, bool held);

[[nodiscard]] std::size_t live_streams(); // created and not destroyed

// How everything that polls waits: briefly on the CPU, then asleep for longer and longer.
class Backoff {
 public:
  void pause();

 private:
  unsigned rounds_ = 0;
};

} // namespace gpuloan::sim
