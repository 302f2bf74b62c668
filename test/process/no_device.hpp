// SPDX-License-Identifier: MIT
//
// Contexts that lend host memory between two threads, for tests of the control plane.
#pragma once

#include "../support/check.hpp"

#include <gpuloan/gpuloan.hpp>

namespace loan_test {

inline constexpr gpuloan::Milliseconds kPatience{20'000};

inline gpuloan::Context make_without_device(gpuloan_role role, gpuloan_loop loop = GPULOAN_LOOP_THREAD) {
  auto options = gpuloan::init<gpuloan_context_options>();
  options.role = role;
  options.loop = loop;
  options.flags = GPULOAN_CONTEXT_NO_DEVICE;
  return gpuloan::Context::create(options);
}

// The next event of that type; others are dropped.
inline gpuloan::Event next(gpuloan::Context& context, gpuloan_event_type type) {
  while (auto event = context.next_event(kPatience)) {
    if (event->type() == type) return std::move(*event);
  }
  fail("an event did not come");
}

} // namespace loan_test
