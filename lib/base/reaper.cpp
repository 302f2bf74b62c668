// SPDX-License-Identifier: MIT
//
// Detached threads that take objects from one queue. A thread is added whenever more objects wait than threads are idle, so
// one that is stuck holds up nothing else; idle ones stay for the next object.
#include <base/reaper.hpp>

#include <base/log.hpp>
#include <base/thread.hpp>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>

namespace gpuloan {
namespace {

struct Queue {
  std::mutex mutex;
  std::condition_variable filled, emptied;
  std::deque<std::shared_ptr<void>> objects;
  std::size_t idle = 0;    // threads that wait for an object
  std::size_t pending = 0; // objects that are not destroyed yet
};

Queue& queue() {
  static Queue* instance = new Queue; // never destroyed: a stuck thread may outlive main()
  return *instance;
}

void reap() {
  Queue& work = queue();
  std::unique_lock lock(work.mutex);
  while (true) {
    ++work.idle;
    work.filled.wait(lock, [&] { return !work.objects.empty(); });
    --work.idle;
    std::shared_ptr<void> object = std::move(work.objects.front());
    work.objects.pop_front();
    lock.unlock();
    object.reset();
    lock.lock();
    --work.pending;
    work.emptied.notify_all();
  }
}

} // namespace

void dispose(std::shared_ptr<void> object) noexcept {
  if (!object) return;
  Queue& work = queue();
  try {
    const std::lock_guard lock(work.mutex);
    if (work.objects.size() + 1 > work.idle) start_thread("gpuloan-reap", reap).detach();
    work.objects.push_back(std::move(object));
    ++work.pending;
    work.filled.notify_one();
  } catch (...) { // no thread, no memory
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "no thread to give memory back with; it stays until the process ends");
    if (object) static_cast<void>(new (std::nothrow) std::shared_ptr<void>(std::move(object)));
  }
}

bool wait_disposed(std::uint32_t timeout_ms) noexcept {
  Queue& work = queue();
  std::unique_lock lock(work.mutex);
  return work.emptied.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return work.pending == 0; });
}

} // namespace gpuloan
