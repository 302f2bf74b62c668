// SPDX-License-Identifier: MIT
//
// Pools as callers see them: creating, asking, trimming, and the current pool of a device. What an imported pool
// refuses is as measured: it cannot be allocated from, made current or trimmed, and gives no access to read only.
#include <sim/api.hpp>
#include <sim/device.hpp>
#include <sim/handles.hpp>
#include <sim/pool_register.hpp>

namespace gpuloan::sim {
namespace {

bool imported(const PoolState& pool) { return pool.origin == PoolState::Origin::Imported; }

CuResult check_props(const PoolProps* props) {
  if (props == nullptr || props->type != AllocationPinned || props->location.type != LocationDevice)
    return InvalidValue;
  if (!is_device(props->location.id)) return InvalidDevice;
  return (props->handle_types & ~static_cast<int>(HandlePosixFd)) == 0 ? Success : InvalidValue;
}

CuResult check_access(const PoolState& pool, const AccessDesc& wish) {
  if (wish.location.type != LocationDevice) return InvalidValue;
  if (!is_device(wish.location.id)) return InvalidDevice;
  if (wish.flags != AccessNone && !config().reaches(physical_device(wish.location.id), pool.physical)) return InvalidDevice;
  if (wish.flags == AccessRead) return NotSupported;
  if (wish.flags == AccessReadWrite) return Success;
  const bool at_home = physical_device(wish.location.id) == pool.physical;
  return wish.flags == AccessNone && !at_home ? Success : InvalidValue;
}

} // namespace

namespace api {

CuResult cuMemPoolCreate(Pool* pool, const PoolProps* props) {
  if (pool == nullptr) return InvalidValue;
  if (const CuResult result = check_props(props)) return result;
  const int physical = physical_device(props->location.id);
  auto made = std::make_shared<PoolState>(PoolState::Origin::Created, physical, props->handle_types);
  made->max_bytes = props->max_size;
  add_pool(made);
  *pool = to_handle<Pool>(made->handle);
  return Success;
}

CuResult cuMemPoolDestroy(Pool pool) {
  const PoolRef found = find_pool(pool);
  if (!found || found->origin == PoolState::Origin::Standard || !found->retire()) return InvalidValue;
  forget_pool(found);
  return Success;
}

CuResult cuMemPoolSetAttribute(Pool pool, int attribute, void* value) {
  const PoolRef found = find_pool(pool);
  if (!found || value == nullptr || attribute != PoolReleaseThreshold || imported(*found)) return InvalidValue;
  found->set_threshold(*static_cast<std::uint64_t*>(value));
  return Success;
}

CuResult cuMemPoolGetAttribute(Pool pool, int attribute, void* value) {
  const PoolRef found = find_pool(pool);
  if (!found || value == nullptr) return InvalidValue;
  auto& out = *static_cast<std::uint64_t*>(value);
  switch (attribute) {
    case PoolReleaseThreshold: out = found->threshold(); return Success;
    case PoolReservedBytes: out = found->reserved_bytes(); return Success;
    case PoolUsedBytes: out = found->used_bytes(); return Success;
    default: return InvalidValue;
  }
}

CuResult cuMemPoolSetAccess(Pool pool, const AccessDesc* access, std::size_t count) {
  const PoolRef found = find_pool(pool);
  if (!found || access == nullptr || count == 0) return InvalidValue;
  for (std::size_t index = 0; index < count; ++index) {
    if (const CuResult result = check_access(*found, access[index])) return result;
  }
  for (std::size_t index = 0; index < count; ++index) {
    found->set_access(physical_device(access[index].location.id), access[index].flags);
  }
  return Success;
}

CuResult cuMemPoolTrimTo(Pool pool, std::size_t keep) {
  const PoolRef found = find_pool(pool);
  if (!found || imported(*found)) return InvalidValue; // fact P9
  found->trim_to(keep);
  return Success;
}

CuResult cuDeviceGetDefaultMemPool(Pool* pool, Device device) {
  if (pool == nullptr) return InvalidValue;
  if (!is_device(device)) return InvalidDevice;
  *pool = to_handle<Pool>(standard_pool(device)->handle);
  return Success;
}

CuResult cuDeviceGetMemPool(Pool* pool, Device device) {
  if (pool == nullptr) return InvalidValue;
  if (!is_device(device)) return InvalidDevice;
  *pool = to_handle<Pool>(current_pool(device)->handle);
  return Success;
}

CuResult cuDeviceSetMemPool(Device device, Pool pool) {
  if (!is_device(device)) return InvalidDevice;
  PoolRef found = find_pool(pool);
  if (!found || imported(*found) || found->physical != physical_device(device)) return InvalidValue;
  set_current_pool(device, std::move(found));
  return Success;
}

} // namespace api
} // namespace gpuloan::sim
