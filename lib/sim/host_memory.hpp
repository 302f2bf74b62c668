// SPDX-License-Identifier: MIT
//
// Telling host memory from device addresses and from nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpuloan::sim {

// From now on this process may register no more than `bytes` in all, as by a limit on locked memory.
void set_pin_limit(std::uint64_t bytes) noexcept;

// Whether every page of [start, start + bytes) is mapped in this process and is no device address.
[[nodiscard]] bool is_host_memory(const void* start, std::size_t bytes) noexcept;

} // namespace gpuloan::sim
