// SPDX-License-Identifier: MIT
//
// Telling host memory from device addresses and from nothing.
#pragma once

#include <cstddef>

namespace gpuloan::sim {

// Whether every page of [start, start + bytes) is mapped in this process and is no device address.
[[nodiscard]] bool is_host_memory(const void* start, std::size_t bytes) noexcept;

} // namespace gpuloan::sim
