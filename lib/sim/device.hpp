// SPDX-License-Identifier: MIT
//
// The simulated devices. A physical ordinal counts the devices of the machine and is what processes share; a Device, as
// callers know it, indexes the devices that this process may see.
#pragma once

#include <sim/rows.hpp>

#include <string>

namespace gpuloan::sim {

// Physical ordinal to UUID: the same in every process and on every machine.
[[nodiscard]] Uuid device_uuid(int physical) noexcept;
// "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", or "MIG-..." of a slice
[[nodiscard]] std::string uuid_text(const Uuid& uuid, bool slice);

[[nodiscard]] bool is_device(Device device);
[[nodiscard]] int physical_device(Device device); // of a valid device
[[nodiscard]] Device visible_device(int physical); // -1 when this process may not see it

} // namespace gpuloan::sim
