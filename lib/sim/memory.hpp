// SPDX-License-Identifier: MIT
//
// Counts of the VMM side, for tests.
#pragma once

#include <cstddef>

namespace gpuloan::sim {

[[nodiscard]] std::size_t live_memory_handles();

} // namespace gpuloan::sim
