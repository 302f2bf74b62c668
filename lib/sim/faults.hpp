// SPDX-License-Identifier: MIT
//
// Faults on demand: every call of every function is counted, and GPULOAN_SIM_FAIL names calls that fail.
#pragma once

#include <sim/rows.hpp>

#include <cstdint>
#include <optional>

namespace gpuloan::sim {

// Counts one call; the result it has to return at once, if any: with Success it lies, having done nothing.
[[nodiscard]] std::optional<CuResult> count_call(Row row) noexcept;
[[nodiscard]] std::uint64_t calls_so_far(Row row) noexcept;

} // namespace gpuloan::sim
