// SPDX-License-Identifier: MIT
//
// Runs a list of test cases: a watchdog and a line of TAP for each, and afterwards the search for what it left behind:
// descriptors, driver objects, device memory.
#pragma once

#include "bench.hpp"

#include <span>

namespace loan_test {

struct Case {
  const char* name;
  void (*run)(const Bench& bench);
  bool needs_process = false;                            // a worker is killed
  const char* (*not_here)(const Bench& bench) = nullptr; // why it does not apply to this cell, or null
};

struct Totals {
  int passed = 0, failed = 0, skipped = 0;
  [[nodiscard]] int exit_status() const noexcept { return failed == 0 && passed > 0 ? 0 : 1; }
};

// Runs `body` under a watchdog and looks for what it left behind: what is wrong, "" for nothing.
[[nodiscard]] std::string run_guarded(const Bench& bench, const char* name, const std::function<void()>& body);

// The cases whose name contains `only`.
[[nodiscard]] Totals run_cases(const Bench& bench, std::span<const Case> cases, std::string_view only);

} // namespace loan_test
