// SPDX-License-Identifier: MIT
#include <doctest/doctest.h>

#include <driver/standing.hpp>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

using gpuloan::driver::StandingCall;
using gpuloan::driver::StreamWait;
using namespace std::chrono_literals;

TEST_CASE("a standing call waits until no stream waits, and holds up new waits") {
  auto first = StreamWait::begin();
  auto second = StreamWait::begin();
  REQUIRE(first);
  REQUIRE(second);
  std::promise<void> begun, over;
  std::thread caller([&, until = over.get_future()] {
    const StandingCall standing;
    begun.set_value();
    until.wait();
  });
  auto inside = begun.get_future();
  first.reset();
  CHECK(inside.wait_for(20ms) == std::future_status::timeout);
  StreamWait moved = std::move(*second);
  second.reset(); // nothing is its any more
  CHECK(inside.wait_for(20ms) == std::future_status::timeout);
  { const StreamWait ends = std::move(moved); }
  REQUIRE(inside.wait_for(10s) == std::future_status::ready);
  CHECK_FALSE(StreamWait::begin());
  over.set_value();
  caller.join();
  CHECK(StreamWait::begin());
}

TEST_CASE("waits that follow each other without a gap hold up no call for ever, and are soon let on") {
  std::atomic<bool> stop = false, began = false;
  std::atomic<int> refused = 0;
  std::thread streams([&] {
    auto wait = StreamWait::begin();
    began = true;
    while (!stop) {
      std::this_thread::sleep_for(100us);
      auto next = StreamWait::begin();
      if (!next) ++refused;
      wait = std::move(next);
    }
  });
  while (!began) std::this_thread::yield();
  auto call = std::async(std::launch::async, [] { const StandingCall standing; });
  CHECK(call.wait_for(20s) == std::future_status::ready);
  stop = true;
  streams.join();
  CHECK(refused > 0);

  auto long_one = StreamWait::begin();
  auto behind = std::async(std::launch::async, [] { const StandingCall standing; });
  std::this_thread::sleep_for(150ms); // it has barred others at least once, most likely
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  bool let_on = false;
  while (!let_on && std::chrono::steady_clock::now() < deadline) let_on = StreamWait::begin().has_value();
  CHECK(let_on);
  CHECK(behind.wait_for(0s) == std::future_status::timeout);
  long_one.reset();
  CHECK(behind.wait_for(10s) == std::future_status::ready);
}
