// SPDX-License-Identifier: MIT
//
// When the driver may still be called: not in a forked child of the process that initialised it, and not once the
// process runs its exit handlers. calls_allowed() of driver.hpp is the yes or no; the rest is for lib/driver only.
#pragma once

#include <driver/driver.hpp>

namespace gpuloan::driver {

// Call before cuInit: from here on a forked child has no usable driver.
void claim_process() noexcept;
// Call after cuInit: exit handlers run in reverse order, so ours then runs before the driver's own, and no destructor
// meets a driver that has already shut down.
void watch_exit() noexcept;

[[nodiscard]] bool forked_since_claim() noexcept;
// FORKED or STATE with a sentence, where calls_allowed() is false.
[[nodiscard]] Result<void> check_calls_allowed();

} // namespace gpuloan::driver
