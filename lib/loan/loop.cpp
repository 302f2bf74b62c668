// SPDX-License-Identifier: MIT
//
// Context: the loop. Who turns it, how long it waits, and when it looks again at what wakes nobody (ticks).
#include <loan/context.hpp>

#include <base/log.hpp>
#include <base/thread.hpp>

#include <algorithm>
#include <cerrno>
#include <future>
#include <new>
#include <sched.h>
#include <sys/eventfd.h>

namespace gpuloan::loan {
namespace {

constexpr std::uint64_t kLongestWaitNs = 1'000'000'000;
constexpr std::uint64_t kLoopSpinNs = 50'000;
constexpr int kQuickWaits = 2; // before the loop spins
constexpr std::uint64_t kTickShare = 19; // at most a twentieth of the loop's time goes into looking
constexpr std::uint64_t kTickPauseMaxNs = 50'000'000; // it took long because others had the CPU, then
constexpr std::uint64_t kRetryNs = 10'000'000; // of a turn that had no memory

} // namespace

bool may_spin() noexcept {
  static const bool several = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    return ::sched_getaffinity(0, sizeof set, &set) != 0 || CPU_COUNT(&set) > 1;
  }();
  return several;
}

void Context::log_turn(const std::exception& error) noexcept {
  try {
    GPULOAN_LOG(GPULOAN_LOG_ERROR, std::string("a turn of the loop failed: ") + error.what());
  } catch (...) { // no memory for the line either
  }
  std::this_thread::sleep_for(std::chrono::nanoseconds(kRetryNs));
}

Result<void> Context::start() {
  if (options_.loop_thread) {
    event_fd_ = UniqueFd::take(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!event_fd_) return fail_errno("eventfd", errno);
  }
  const bool ring_allowed = options_.loop_thread && options_.role == GPULOAN_ROLE_EXPORTER;
  const auto make = [this, ring_allowed]() -> Result<void> {
    auto choice = loop::make_engine(ring_allowed ? options_.engine : GPULOAN_ENGINE_EPOLL, ring_allowed);
    if (!choice) return forward(std::move(choice.error()));
    engine_ = std::move(choice->engine);
    engine_kind_ = engine_->kind();
    engine_reason_ = ring_allowed ? choice->reason
                                  : (options_.role == GPULOAN_ROLE_IMPORTER ? "an importer keeps its sockets out of io_uring"
                                                                            : "a caller-driven loop has a descriptor to poll");
    return {};
  };
  if (!options_.loop_thread) {
    GPULOAN_TRY(make());
    poll_fd_ = engine_->poll_fd();
    return {};
  }
  std::promise<Result<void>> made;
  auto future = made.get_future();
  loop_thread_ = start_thread("gpuloan-loop", [this, &made, make] { // an io_uring belongs to the thread that makes it
    Result<void> result;
    try {
      result = make();
    } catch (const std::bad_alloc&) {
      result = std::unexpected(out_of_memory());
    }
    const bool ok = result.has_value();
    loop_id_ = std::this_thread::get_id();
    made.set_value(std::move(result));
    if (ok) loop_main();
  });
  Result<void> result = future.get();
  if (!result) loop_thread_.join();
  return result;
}

void Context::loop_main() {
  while (!stopping_) {
    try {
      run_once(kLongestWaitNs);
    } catch (const std::exception& error) { // out of memory: what was due is looked at again in the next turn
      log_turn(error);
    }
  }
  try {
    run_tasks();
  } catch (const std::exception& error) {
    log_turn(error);
  }
  const Lock lock(mutex_); // others look at it to wake it
  engine_.reset();
}

void Context::run_once(std::uint64_t limit_ns) {
  std::uint64_t timeout = limit_ns;
  {
    const Lock lock(mutex_);
    if (!tasks_.empty() || next_task_ < running_.size() || leaving_) timeout = 0;
    if (timeout != 0 && tick_at_ns_ != kNever) {
      const std::uint64_t now = now_ns();
      timeout = std::min(timeout, tick_at_ns_ > now ? tick_at_ns_ - now : 0);
    }
    if (hot_until_ns_ != 0 && now_ns() < hot_until_ns_) timeout = 0;
    sleeping_ = timeout > kTickMaxNs;
    turn_messages_ = 0;
    turn_others_ = timeout == 0 && limit_ns != 0;
  }
  const auto waited = wait_in_engine(timeout);
  if (std::exchange(notify_later_, false)) changed_.notify_all();
  if (!waited) {
    GPULOAN_LOG(GPULOAN_LOG_ERROR, "the loop cannot wait: " + waited.error().text);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  sleeping_ = false;
  run_tasks();
  after_turn();
  const Lock lock(mutex_);
  if (leaving_) {
    take_out_lost();
    turn_others_ = true;
  }
  if (closed_) return;
  // A turn that brought an exporter records, and them alone, has done what there was to do.
  if (options_.role == GPULOAN_ROLE_EXPORTER && turn_messages_ > 0 && !turn_others_ && now_ns() < tick_at_ns_) return;
  if (std::exchange(any_stalled_, false)) {
    for (const auto& [tag, peer] : peers_) {
      if (std::exchange(peer->stalled, false) && !peer->lost) flush(peer);
    }
  }
  tick_at_ns_ = now_ns() + kTickMaxNs; // should the tick have no memory
  const std::uint64_t wanted = std::min(timed_tick(), any_stalled_ ? kTickMaxNs : kNever);
  tick_at_ns_ = wanted == kNever ? kNever : now_ns() + wanted;
}

// A peer that answers one record at once is spun for: sleeping and waking takes longer than its answer. Where many come together, or none
// for a while, the CPU is of more use to others.
Result<bool> Context::wait_in_engine(std::uint64_t timeout_ns) {
  struct Waiting {
    std::atomic<std::thread::id>& id;
    explicit Waiting(std::atomic<std::thread::id>& who) : id(who) { id = std::this_thread::get_id(); }
    ~Waiting() { id = std::thread::id(); }
  } const waiting(waiting_id_);
  if (timeout_ns == 0) return engine_->wait(0, *this);
  const std::uint64_t start = now_ns(), until = start + std::min(timeout_ns, kLoopSpinNs);
  Result<bool> came = false;
  if (quick_waits_ >= kQuickWaits && spins()) {
    do {
      came = engine_->wait(0, *this);
    } while (came && !*came && now_ns() < until);
  }
  if (came && !*came) came = engine_->wait(timeout_ns, *this);
  const bool cut_short = came && !*came && timeout_ns < kLoopSpinNs; // by the next tick: that says nothing
  if (turn_messages_ > 1 || (now_ns() >= until && !cut_short)) quick_waits_ = 0;
  else if (turn_messages_ == 1) quick_waits_ = std::min(quick_waits_ + 1, kQuickWaits);
  return came;
}

// A tick looks at everything that is out, so with thousands of loans it takes its time: what is left for the others stays
// several times that.
std::uint64_t Context::timed_tick() {
  const std::uint64_t start = now_ns();
  if (start < tick_not_before_ns_) return tick_not_before_ns_ - start;
  const std::uint64_t wanted = tick();
  const std::uint64_t end = now_ns();
  const std::uint64_t pause = end - start > kTickFirstNs / 2 ? std::min((end - start) * kTickShare, kTickPauseMaxNs) : 0;
  tick_not_before_ns_ = end + pause;
  return std::max(wanted, pause);
}

void Context::run_tasks() {
  if (next_task_ >= running_.size()) {
    const Lock lock(mutex_);
    running_.swap(tasks_);
    turn_others_ |= !running_.empty();
  }
  for (; next_task_ < running_.size(); ++next_task_) running_[next_task_]();
  running_.clear();
  next_task_ = 0;
}

void Context::turn_loop(Lock& lock, std::uint64_t limit_ns) {
  if (std::unique_lock turn(turn_mutex_, std::try_to_lock); turn) {
    struct Turning { // ends with the lock held, whatever the turn throws
      Lock& lock;
      std::thread::id& id;
      Turning(Lock& held, std::thread::id& who) : lock(held), id(who) {
        id = std::this_thread::get_id();
        lock.unlock();
      }
      ~Turning() {
        lock.lock();
        id = {};
      }
    };
    {
      const Turning turning(lock, turning_);
      run_once(limit_ns);
    }
    changed_.notify_all(); // who waits for the turn may take it
  } else {
    changed_.wait_for(lock, std::chrono::nanoseconds(std::min(limit_ns, kTickMaxNs)));
  }
}

void Context::post(std::function<void()> task) {
  tasks_.push_back(std::move(task));
  if (engine_ && !in_turn()) engine_->wake();
}

void Context::request_tick(std::uint64_t first_ns) {
  tick_ns_ = std::min(tick_ns_, first_ns);
  tick_at_ns_ = std::min(tick_at_ns_, now_ns() + first_ns);
  if (sleeping_ && engine_ && !in_turn()) engine_->wake();
}

void Context::stop_loop() noexcept {
  stopping_ = true;
  if (loop_thread_.joinable()) {
    {
      const Lock lock(mutex_);
      if (engine_) engine_->wake();
    }
    loop_thread_.join();
  } else if (engine_) {
    const std::lock_guard turn(turn_mutex_);
    try {
      run_tasks();
    } catch (const std::exception& error) {
      log_turn(error);
    }
    engine_.reset();
  }
}

Result<void> Context::dispatch(std::uint32_t timeout_ms) {
  if (options_.loop_thread) return fail(GPULOAN_ERR_STATE, "this context has a loop thread: gpuloan_context_dispatch is for GPULOAN_LOOP_CALLER");
  Lock lock(mutex_);
  turn_loop(lock, std::uint64_t{timeout_ms} * 1'000'000U);
  return {};
}

} // namespace gpuloan::loan
