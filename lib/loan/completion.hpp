// SPDX-License-Identifier: MIT
//
// Completion: who waits for the importer's own GPU work. Its thread sleeps in the driver on the event recorded behind a
// turn's work, so that the loop never does and a finished turn is noticed at once (S16); a caller-driven context has no
// thread and polls from its dispatch instead. Jobs and disposals that may block run here too.
#pragma once

#include <driver/handles.hpp>

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

namespace gpuloan::loan {

class Completion {
 public:
  using Report = std::function<void(Result<void>)>; // called without any lock

  Completion(bool threaded, bool spins) : shared_(std::make_shared<Shared>()), threaded_(threaded) { shared_->spins = spins; }
  ~Completion() { stop(); }
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;

  // Reports once everything before `event` is complete, or with the driver's error.
  void watch(std::shared_ptr<const driver::OwnedEvent> event, Report report);
  // Runs `job` on the thread; a caller-driven context runs it in the next poll().
  void run(std::function<void()> job);
  // Caller-driven: reports what is complete and runs jobs; true while something still waits. Else: makes the thread, should
  // there have been none to be had.
  bool poll();
  [[nodiscard]] bool pending() const noexcept;
  // Ends the thread. Bounded: GPU work that does not end within a second is left to itself, with its event; false then.
  bool stop() noexcept;

 private:
  struct Item {
    std::shared_ptr<const driver::OwnedEvent> event; // null: a job
    Report report;
    std::function<void()> job;
  };
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::list<Item> items;
    bool stopping = false, ended = false;
    bool spins = false; // before it sleeps; constant
  };
  static void main(const std::shared_ptr<Shared>& shared);
  static bool finish(Item& item, std::uint64_t spin_ns) noexcept;
  static bool poll_items(Shared& shared) noexcept;
  void push(Item item);
  void start_missing() noexcept; // lock held

  std::shared_ptr<Shared> shared_; // outlives this object when the thread had to be left behind
  const bool threaded_;
  std::thread thread_;
};

} // namespace gpuloan::loan
