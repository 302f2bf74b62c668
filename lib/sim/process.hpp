// SPDX-License-Identifier: MIT
//
// Where this process stands with the driver: not initialised, initialised, shut down, or a forked child of an
// initialised process, which the driver refuses for good.
#pragma once

#include <sim/rows.hpp>

namespace gpuloan::sim {

// Success, NotInitialized or Deinitialized.
[[nodiscard]] CuResult process_state() noexcept;
[[nodiscard]] bool forked_since_init() noexcept;
// From now on every call says CUDA_ERROR_DEINITIALIZED, as it does once a real driver's exit handler has run.
void deinitialize() noexcept;

} // namespace gpuloan::sim
