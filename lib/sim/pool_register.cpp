// SPDX-License-Identifier: MIT
//
// Two tables and the current pool of each device. Nothing here is ever destroyed: a process may end with memory out.
#include <sim/device.hpp>
#include <sim/handles.hpp>
#include <sim/pool_register.hpp>

#include <algorithm>
#include <map>

namespace gpuloan::sim {
namespace {

HandleTable<PoolState>& table() {
  static auto* instance = new HandleTable<PoolState>(0x55);
  return *instance;
}

struct Register {
  std::mutex mutex;
  std::map<DevicePtr, std::shared_ptr<PoolMemory>> memory;
  std::array<PoolRef, kMaxDevices> standard; // made when first asked for
  std::array<PoolRef, kMaxDevices> current; // null: the standard one
};

Register& pools() {
  static auto* instance = new Register;
  return *instance;
}

} // namespace

void add_pool(const PoolRef& pool) {
  pool->handle = table().reserve();
  table().put(pool->handle, pool);
}

PoolRef find_pool(Pool handle) { return table().find(from_handle(handle)); }

void forget_pool(const PoolRef& pool) {
  static_cast<void>(table().take(pool->handle));
  const std::lock_guard lock(pools().mutex);
  std::ranges::replace(pools().current, pool, PoolRef());
}

std::vector<PoolRef> all_pools() { return table().all(); }

std::size_t live_pools() {
  return static_cast<std::size_t>(std::ranges::count_if(
      all_pools(), [](const PoolRef& pool) { return pool->origin != PoolState::Origin::Standard; }));
}

PoolRef standard_pool(Device device) {
  const std::lock_guard lock(pools().mutex);
  PoolRef& pool = pools().standard[static_cast<std::size_t>(device)];
  if (!pool) {
    pool = std::make_shared<PoolState>(PoolState::Origin::Standard, physical_device(device), HandleNone);
    add_pool(pool);
  }
  return pool;
}

PoolRef current_pool(Device device) {
  {
    const std::lock_guard lock(pools().mutex);
    if (const PoolRef& pool = pools().current[static_cast<std::size_t>(device)]) return pool;
  }
  return standard_pool(device);
}

void set_current_pool(Device device, PoolRef pool) {
  const std::lock_guard lock(pools().mutex);
  pools().current[static_cast<std::size_t>(device)] = std::move(pool);
}

void add_pool_memory(std::shared_ptr<PoolMemory> memory) {
  const std::lock_guard lock(pools().mutex);
  const DevicePtr start = memory->start();
  pools().memory[start] = std::move(memory);
}

std::shared_ptr<PoolMemory> take_pool_memory(DevicePtr start) {
  const std::lock_guard lock(pools().mutex);
  const auto found = pools().memory.find(start);
  if (found == pools().memory.end()) return nullptr;
  auto memory = std::move(found->second);
  pools().memory.erase(found);
  return memory;
}

std::shared_ptr<PoolMemory> find_pool_memory(DevicePtr start) {
  const std::lock_guard lock(pools().mutex);
  const auto found = pools().memory.find(start);
  return found != pools().memory.end() ? found->second : nullptr;
}

std::shared_ptr<PoolMemory> find_pool_import(FileIdentity file, std::size_t bytes) {
  const std::lock_guard lock(pools().mutex);
  for (const auto& [start, memory] : pools().memory) {
    if (memory->kind() != RangeKind::Imported || memory->bytes() != bytes) continue;
    if (memory->chunk().file() == file) return memory;
  }
  return nullptr;
}

} // namespace gpuloan::sim
