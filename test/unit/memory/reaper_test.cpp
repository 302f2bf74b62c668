// SPDX-License-Identifier: MIT
//
// The reaper's threads: one that is stuck holds up nothing, a burst makes no thread that nobody needs, and all end by themselves.
#include <base/reaper.hpp>
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace {

int reapers() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(entry.path() / "comm") >> name;
    count += name == "gpuloan-reap" ? 1 : 0;
  }
  return count;
}

bool becomes(const std::function<bool()>& done) {
  for (int look = 0; look < 5000; ++look, std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    if (done()) return true;
  }
  return false;
}

// Its destructor runs `body`.
std::shared_ptr<void> object(std::function<void()> body) {
  static char something = 0;
  return {&something, [body = std::move(body)](void*) { body(); }};
}

} // namespace

TEST_CASE("one that is stuck holds up nothing else, and all threads end") {
  std::mutex mutex;
  std::condition_variable changed;
  bool go_on = false;
  gpuloan::dispose(object([&] {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return go_on; });
  }));
  std::atomic<int> destroyed{0};
  for (int round = 0; round < 20; ++round) { // one after the other
    gpuloan::dispose(object([&] { ++destroyed; }));
    REQUIRE(becomes([&] { return destroyed == round + 1; }));
  }
  CHECK(reapers() <= 3); // the stuck one, and as the second's last step may be late another
  CHECK(!gpuloan::wait_disposed(10));
  {
    const std::lock_guard lock(mutex);
    go_on = true;
  }
  changed.notify_all();
  CHECK(gpuloan::wait_disposed(5000));
  CHECK(becomes([] { return reapers() == 0; }));
  gpuloan::dispose(object([&] { ++destroyed; })); // and there are new ones when they are needed
  CHECK(becomes([&] { return destroyed == 21; }));
}
