// SPDX-License-Identifier: MIT
//
// Detached threads that take objects from one queue. A thread is added whenever more objects wait than threads are idle, so
// one that is stuck holds up nothing else; idle ones wait a moment for the next object, and end.
#include <base/reaper.hpp>

#include <base/process_wide.hpp>
#include <base/thread.hpp>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <list>
#include <mutex>
#include <new>

namespace gpuloan {
namespace {

constexpr std::chrono::milliseconds kIdle{200};

struct Queue {
  std::mutex mutex;
  std::condition_variable filled, emptied;
  std::list<std::shared_ptr<void>> objects; // empty it takes no memory
  std::size_t idle = 0;    // threads that wait for an object, or are about to
  std::size_t pending = 0; // objects that are not destroyed yet
};

void reap() {
  Queue& work = process_wide<Queue>();
  std::unique_lock lock(work.mutex);
  while (work.filled.wait_for(lock, kIdle, [&] { return !work.objects.empty(); })) {
    --work.idle;
    std::shared_ptr<void> object = std::move(work.objects.front());
    work.objects.pop_front();
    lock.unlock();
    object.reset();
    lock.lock();
    --work.pending;
    work.emptied.notify_all();
    ++work.idle;
  }
  --work.idle;
}

// Where there is none to be had the objects wait for the next try.
void add_thread(Queue& work) noexcept {
  try {
    const std::lock_guard lock(work.mutex);
    if (work.objects.size() <= work.idle) return;
    start_thread("gpuloan-reap", reap).detach();
    ++work.idle;
  } catch (...) {
  }
}

} // namespace

void dispose(std::shared_ptr<void> object) noexcept {
  constexpr int kTries = 3; // others may free memory meanwhile
  for (int tries = 0; object && tries < kTries; ++tries) {
    try {
      Queue& work = process_wide<Queue>();
      const std::lock_guard lock(work.mutex);
      work.objects.push_back(object);
      ++work.pending;
      object.reset();
      work.filled.notify_one();
    } catch (const std::bad_alloc&) {
      std::this_thread::yield();
    }
  }
  if (object) abandon(std::move(object)); // destroying it here could block
  else add_thread(process_wide<Queue>());
}

bool wait_disposed(std::uint32_t timeout_ms) noexcept try {
  Queue& work = process_wide<Queue>();
  add_thread(work);
  std::unique_lock lock(work.mutex);
  return work.emptied.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return work.pending == 0; });
} catch (const std::bad_alloc&) { // no queue, so nothing in it
  return true;
}

} // namespace gpuloan
