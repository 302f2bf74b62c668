// SPDX-License-Identifier: MIT
//
// Checks of the tests that run without a framework, because they have to run alone on another machine and in several
// processes and threads at once. A failed check throws; whoever runs a test case catches it, reports it and goes on with
// the next case.
#pragma once

#include <gpuloan/gpuloan.h>

#include <source_location>
#include <string>
#include <string_view>

namespace loan_test {

using Where = std::source_location;

struct Failure {
  std::string text; // "file:line: what"
};
// The case cannot run here; never a success.
struct Skip {
  std::string reason;
};

inline constexpr std::uint32_t kWaitMs = 20'000; // longer than anything takes that goes well
inline constexpr std::uint32_t kSettleMs = 2000; // for what passes by itself: UBSan makes a pipe now and then

[[noreturn]] void fail(std::string_view what, Where where = Where::current());
void expect(bool good, std::string_view what, Where where = Where::current());
// The text of the calling thread's last error is part of the message.
void expect_status(gpuloan_status got, gpuloan_status wanted, std::string_view what, Where where = Where::current());
void expect_ok(gpuloan_status got, std::string_view what, Where where = Where::current());
void expect_contains(std::string_view text, std::string_view part, std::string_view what, Where where = Where::current());

template <typename Got, typename Wanted>
void expect_equal(const Got& got, const Wanted& wanted, std::string_view what, Where where = Where::current()) {
  if (got == static_cast<Got>(wanted)) return;
  fail(std::string(what) + ": got " + std::to_string(got) + ", wanted " + std::to_string(wanted), where);
}

// main() of a test program. What `run` throws is said: exit status 2, or 77 for a Skip.
[[nodiscard]] int run_program(int (*run)(int count, char** words), int count, char** words);

[[nodiscard]] std::uint64_t now_ms();
void nap(); // a millisecond, between two looks

// Looks until `done()` says yes; false when it has not after `limit_ms`. For what nothing can be waited on.
template <typename Done>
[[nodiscard]] bool becomes(Done done, std::uint32_t limit_ms = kWaitMs) {
  for (const std::uint64_t end = now_ms() + limit_ms; !done(); nap()) {
    if (now_ms() >= end) return false;
  }
  return true;
}

// An output or options struct with its size set and everything else 0.
template <typename Struct>
[[nodiscard]] Struct init() {
  Struct value = {};
  value.size = sizeof value;
  return value;
}

} // namespace loan_test
