// SPDX-License-Identifier: MIT
//
// With one item the thread spins for a while, then sleeps on its event. With several it polls them all, so that a long kernel
// does not hide the end of a short one behind it.
#include <loan/completion.hpp>

#include <base/clock.hpp>
#include <base/log.hpp>
#include <base/thread.hpp>
#include <loan/context.hpp>

#include <new>

namespace gpuloan::loan {
namespace {

constexpr std::chrono::milliseconds kPatience{1000}, kMemoryPause{10};

// Spins for as long as the last ones suggest, then sleeps in the driver until the event is complete.
Result<void> sleep_on(const driver::OwnedEvent& event, std::uint64_t spin_ns) {
  const std::uint64_t spin_until = now_ns() + spin_ns;
  do {
    auto over = event.query();
    if (!over) return forward(std::move(over.error()));
    if (*over) return {};
  } while (now_ns() < spin_until);
  return event.synchronize();
}

// Complete, or failed.
bool is_over(const driver::OwnedEvent& event) noexcept {
  try {
    const auto over = event.query();
    return !over || *over;
  } catch (const std::bad_alloc&) { // of the error's text: looked at again
    return false;
  }
}

} // namespace

void Completion::push(Item item) {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->stopping) return;
  shared_->items.push_back(std::move(item));
  start_missing();
  shared_->changed.notify_one();
}

// Where no thread is to be had the items wait, and poll() tries again; not once stop() has looked.
void Completion::start_missing() noexcept {
  if (!threaded_ || shared_->stopping || thread_.joinable() || shared_->items.empty()) return;
  try {
    thread_ = start_thread("gpuloan-wait", [shared = shared_] { main(shared); });
  } catch (...) {
  }
}

void Completion::watch(std::shared_ptr<const driver::OwnedEvent> event, Report report) { push({std::move(event), std::move(report), {}}); }

void Completion::run(std::function<void()> job) { push({{}, {}, std::move(job)}); }

bool Completion::pending() const noexcept {
  const std::lock_guard lock(shared_->mutex);
  return !shared_->items.empty();
}

// False where there was no memory for it: others wait for what it does, so it has to be done again.
bool Completion::finish(Item& item, std::uint64_t spin_ns) noexcept {
  try {
    if (item.job) item.job();
    else item.report(sleep_on(*item.event, spin_ns));
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// Takes out every item that is complete and reports it; true while some are left.
bool Completion::poll_items(Shared& shared) noexcept {
  std::list<Item> due;
  {
    const std::lock_guard lock(shared.mutex);
    for (auto at = shared.items.begin(); at != shared.items.end();) {
      const auto item = at++;
      if (!item->event || is_over(*item->event)) due.splice(due.end(), shared.items, item);
    }
  }
  due.remove_if([](Item& item) { return finish(item, 0); });
  const std::lock_guard lock(shared.mutex);
  shared.items.splice(shared.items.begin(), due);
  return !shared.items.empty();
}

bool Completion::poll() {
  if (!threaded_) return poll_items(*shared_);
  const std::lock_guard lock(shared_->mutex);
  start_missing();
  return false;
}

void Completion::main(const std::shared_ptr<Shared>& shared) {
  Patience patience;
  std::unique_lock lock(shared->mutex);
  while (true) {
    shared->changed.wait(lock, [&] { return shared->stopping || !shared->items.empty(); });
    if (shared->items.empty()) break;
    if (shared->items.size() > 1) {
      lock.unlock();
      if (poll_items(*shared)) std::this_thread::sleep_for(std::chrono::microseconds(20));
      lock.lock();
      continue;
    }
    std::list<Item> one = std::move(shared->items);
    shared->items.clear();
    lock.unlock();
    const std::uint64_t start = now_ns();
    while (!finish(one.front(), shared->spins ? patience.spin_ns() : 0)) std::this_thread::sleep_for(kMemoryPause);
    if (one.front().event) patience.waited(now_ns() - start);
    one.clear();
    lock.lock();
  }
  shared->ended = true;
  shared->changed.notify_all();
}

bool Completion::stop() noexcept {
  bool ended = true;
  {
    std::unique_lock lock(shared_->mutex);
    start_missing();
    shared_->stopping = true;
    shared_->changed.notify_all();
    if (thread_.joinable()) ended = shared_->changed.wait_for(lock, kPatience, [&] { return shared_->ended; });
  }
  if (!threaded_) {
    const Deadline deadline = Deadline::after_ms(static_cast<std::uint32_t>(kPatience.count()));
    while (poll_items(*shared_)) {
      if (deadline.passed()) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  if (!thread_.joinable()) return true;
  if (ended) {
    thread_.join();
  } else {
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "GPU work on a loan has not ended; its memory stays mapped until the process ends");
    thread_.detach();
  }
  return ended;
}

} // namespace gpuloan::loan
