// SPDX-License-Identifier: MIT
//
// The worker loop, submission, and waiting. Whoever waits for several streams does so one ticket after the other.
#include <sim/address_space.hpp>
#include <sim/capture.hpp>
#include <sim/config.hpp>
#include <sim/pool.hpp>
#include <sim/stream.hpp>

#include <algorithm>
#include <pthread.h>
#include <signal.h>

namespace gpuloan::sim {
namespace {

// As many streams of one context may stand in a wait while others still run (fact S9).
constexpr std::ptrdiff_t kMaxPendingWaits = 7;

HandleTable<StreamState>& table() {
  static auto* instance = new HandleTable<StreamState>(0x52);
  return *instance;
}

bool may_start(const ContextState& context, const StreamState::Item& item) {
  const auto at_wait = [](const StreamRef& stream) { return stream->at_wait(); };
  if (!item.operation->is_wait() && std::ranges::count_if(context.streams, at_wait) > kMaxPendingWaits) return false;
  return std::ranges::all_of(item.dependencies,
                             [](const auto& dependency) { return dependency.stream->completed >= dependency.ticket; });
}

// Returns when the head of the queue may start, false when the worker is to end.
bool wait_for_work(StreamState& stream, std::unique_lock<std::mutex>& lock) {
  ContextState& context = *stream.context;
  while (!context.cancelled()) {
    if (stream.queue.empty()) {
      if (stream.closed) return false;
      stream.wake.wait(lock);
    } else if (stream.held) {
      stream.wake.wait(lock);
    } else if (const auto start = stream.queue.front().not_before; Clock::now() < start) {
      stream.wake.wait_until(lock, start);
    } else if (!may_start(context, stream.queue.front())) {
      context.progress.wait(lock);
    } else {
      return true;
    }
  }
  return false;
}

void work(const StreamRef& stream) {
  ContextState& context = *stream->context;
  std::unique_lock lock(context.mutex);
  while (wait_for_work(*stream, lock)) {
    StreamState::Item item = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->waiting = item.operation->is_wait();
    lock.unlock();
    const CuResult result = item.operation->run(*stream);
    if (result != Success) fail_context(context, result);
    item = {};
    lock.lock();
    stream->waiting = false;
    ++stream->completed;
    context.progress.notify_all();
  }
  stream->has_worker = false;
  if (stream->closed) std::erase(context.streams, stream);
  --context.workers;
  context.progress.notify_all();
}

// With the context locked. The application's signals are for its own threads.
void start_worker(const StreamRef& stream) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([stream] { work(stream); }).detach();
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  stream->has_worker = true;
  ++stream->context->workers;
}

std::vector<StreamState::Dependency> dependencies(const StreamState& stream) {
  std::vector<StreamState::Dependency> found;
  const ContextState& context = *stream.context;
  const auto add = [&](const StreamRef& other) {
    if (!other->idle()) found.push_back({other, other->submitted});
  };
  if (stream.blocking()) add(context.legacy);
  if (stream.kind == StreamKind::Legacy) {
    for (const StreamRef& other : context.streams) {
      if (other->blocking()) add(other);
    }
  }
  return found;
}

// With the context locked. `out_ticket` stays 0 when a capture swallowed the operation.
CuResult enqueue(const StreamRef& stream, std::unique_ptr<Operation>& operation, std::uint64_t& out_ticket) {
  ContextState& context = *stream->context;
  if (const CuResult result = context_state(context)) return result;
  if (stream->closed) return InvalidHandle;
  bool swallowed = false;
  if (const CuResult result = capture_submit(*stream, swallowed)) return result;
  if (swallowed) return Success;
  StreamState::Item item{nullptr, Clock::now() + std::chrono::nanoseconds(config().lag_ns), dependencies(*stream)};
  if (!stream->has_worker) start_worker(stream);
  stream->queue.push_back(std::move(item));
  stream->queue.back().operation = std::move(operation);
  stream->queue.back().operation->queued();
  out_ticket = ++stream->submitted;
  stream->wake.notify_one();
  return Success;
}

CuResult wait_for(ContextState& context, std::unique_lock<std::mutex>& lock, const StreamState::Dependency& target) {
  context.progress.wait(lock, [&] { return context.cancelled() || target.stream->completed >= target.ticket; });
  return context_state(context);
}

// What a caller means by "the work of this stream": for the legacy one, that of all blocking streams too.
std::vector<StreamState::Dependency> everything_before(const StreamRef& stream) {
  std::vector<StreamState::Dependency> found;
  if (stream->kind == StreamKind::Legacy) found = dependencies(*stream);
  found.push_back({stream, stream->submitted});
  return found;
}

} // namespace

StreamRef make_stream(const ContextRef& context, StreamKind kind) {
  auto stream = std::make_shared<StreamState>(context, kind);
  context->streams.push_back(stream);
  return stream;
}

std::vector<std::unique_ptr<Operation>> cancel_streams(ContextState& context) {
  std::vector<std::unique_ptr<Operation>> dropped;
  for (const StreamRef& stream : context.streams) {
    stream->completed += stream->queue.size();
    for (StreamState::Item& item : stream->queue) dropped.push_back(std::move(item.operation));
    stream->queue.clear();
    stream->wake.notify_all();
  }
  context.progress.notify_all();
  return dropped;
}

void close_stream(const StreamRef& stream) {
  ContextState& context = *stream->context;
  const std::lock_guard lock(context.mutex);
  stream->closed = true;
  stream->held = false;
  capture_abandon(*stream);
  if (stream->has_worker) {
    stream->wake.notify_all();
  } else {
    std::erase(context.streams, stream);
  }
}

void forget_streams(const ContextState& context) {
  table().remove_if([&](const StreamState& stream) { return stream.context.get() == &context; });
}

CuResult resolve_stream(Stream handle, StreamRef& out) {
  const bool legacy = handle == nullptr || handle == legacy_stream();
  if (legacy || handle == per_thread_stream()) {
    if (!has_current_context()) return InvalidContext;
    const ContextRef context = current_context();
    if (!context) return ContextIsDestroyed;
    if (const CuResult result = context_state(*context)) return result;
    out = legacy ? context->legacy_stream() : thread_stream(context);
    return out ? Success : ContextIsDestroyed;
  }
  StreamRef found = table().find(from_handle(handle));
  if (!found) return InvalidHandle;
  if (const CuResult result = context_state(*found->context)) return result;
  out = std::move(found);
  return Success;
}

CuResult submit(const StreamRef& stream, std::unique_ptr<Operation> operation) {
  const std::lock_guard lock(stream->context->mutex);
  std::uint64_t ticket = 0;
  return enqueue(stream, operation, ticket);
}

CuResult submit_and_wait(const StreamRef& stream, std::unique_ptr<Operation> operation) {
  std::unique_lock lock(stream->context->mutex);
  std::uint64_t ticket = 0;
  if (const CuResult result = enqueue(stream, operation, ticket)) return result;
  // Cancelled work completes as well, and only then is it sure that nobody touches the caller's memory any more.
  stream->context->progress.wait(lock, [&] { return stream->completed >= ticket; });
  return context_state(*stream->context);
}

CuResult synchronize_context(ContextState& context) {
  std::unique_lock lock(context.mutex);
  std::vector<StreamState::Dependency> targets;
  for (const StreamRef& stream : context.streams) targets.push_back({stream, stream->submitted});
  for (const auto& target : targets) {
    if (const CuResult result = wait_for(context, lock, target)) return result;
  }
  return context_state(context);
}

CuResult synchronize_owner(const Range& range) {
  const ContextRef owner = find_context(range.context);
  if (!owner) return Success;
  {
    const std::lock_guard lock(owner->mutex);
    ++owner->standing;
  }
  const CuResult result = synchronize_context(*owner);
  const std::lock_guard lock(owner->mutex);
  --owner->standing;
  owner->progress.notify_all();
  return result;
}

void stand_behind_others() {
  const ContextRef context = current_context();
  if (!context) return;
  std::unique_lock lock(context->mutex);
  context->progress.wait(lock, [&] { return context->standing == 0 || context->cancelled(); });
}

void hold_stream(const StreamRef& stream, bool held) {
  const std::lock_guard lock(stream->context->mutex);
  stream->held = held && !stream->closed;
  stream->wake.notify_all();
}

std::size_t live_streams() { return table().size(); }

void Backoff::pause() {
  constexpr unsigned kSpins = 64;
  constexpr unsigned kFirst = 20;
  constexpr unsigned kLongest = 200; // microseconds
  if (rounds_ < kSpins) {
    ++rounds_;
    std::this_thread::yield();
    return;
  }
  const unsigned doublings = std::min(rounds_++ - kSpins, 4U);
  std::this_thread::sleep_for(std::chrono::microseconds(std::min(kFirst << doublings, kLongest)));
}

namespace api {

CuResult cuStreamCreate(Stream* stream, unsigned flags) {
  if (stream == nullptr || (flags & ~static_cast<unsigned>(StreamNonBlocking)) != 0) return InvalidValue;
  const ContextRef context = current_context();
  StreamRef made;
  {
    const std::lock_guard lock(context->mutex);
    if (const CuResult result = context_state(*context)) return result;
    made = make_stream(context, (flags & StreamNonBlocking) != 0 ? StreamKind::NonBlocking : StreamKind::Blocking);
  }
  *stream = to_handle<Stream>(table().add(std::move(made)));
  return Success;
}

CuResult cuStreamDestroy(Stream stream) {
  const StreamRef found = table().find(from_handle(stream));
  if (!found) return InvalidHandle;
  if (const CuResult result = context_state(*found->context)) return result;
  if (!table().take(from_handle(stream))) return InvalidHandle;
  close_stream(found);
  return Success;
}

CuResult cuStreamQuery(Stream stream) {
  StreamRef found;
  if (const CuResult result = resolve_stream(stream, found)) return result;
  const std::lock_guard lock(found->context->mutex);
  if (const CuResult result = capture_forbids(*found)) return result;
  const auto targets = everything_before(found);
  const bool done =
      std::ranges::all_of(targets, [](const auto& target) { return target.stream->completed >= target.ticket; });
  return done ? Success : NotReady;
}

CuResult cuStreamSynchronize(Stream stream) {
  StreamRef found;
  if (const CuResult result = resolve_stream(stream, found)) return result;
  {
    std::unique_lock lock(found->context->mutex);
    if (const CuResult result = capture_forbids(*found)) return result;
    for (const auto& target : everything_before(found)) {
      if (const CuResult result = wait_for(*found->context, lock, target)) return result;
    }
  }
  trim_pools();
  return Success;
}

} // namespace api
} // namespace gpuloan::sim
