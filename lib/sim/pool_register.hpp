// SPDX-License-Identifier: MIT
//
// Where pools are found by their handles, and their memory by its address.
#pragma once

#include <sim/pool.hpp>

namespace gpuloan::sim {

void add_pool(const PoolRef& pool); // gives it its handle
[[nodiscard]] PoolRef find_pool(Pool handle);
// Ends the handle. A device whose current pool it was has the standard one again.
void forget_pool(const PoolRef& pool);
[[nodiscard]] std::vector<PoolRef> all_pools();
[[nodiscard]] std::size_t live_pools(); // without the standard ones

[[nodiscard]] PoolRef standard_pool(Device device);
[[nodiscard]] PoolRef current_pool(Device device);
void set_current_pool(Device device, PoolRef pool);

void add_pool_memory(std::shared_ptr<PoolMemory> memory);
// Null when nothing of a pool starts there, or when it was freed in a stream already.
[[nodiscard]] std::shared_ptr<PoolMemory> take_pool_memory(DevicePtr start);
// What is known about it, without taking it.
[[nodiscard]] std::shared_ptr<PoolMemory> find_pool_memory(DevicePtr start);
[[nodiscard]] std::shared_ptr<PoolMemory> find_pool_import(FileIdentity file, std::size_t bytes);

} // namespace gpuloan::sim
