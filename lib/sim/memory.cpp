// SPDX-License-Identifier: MIT
//
// VMM as callers see it: handles, reservations and mappings. The calls need no context; a chunk is mapped whole and
// access is per mapping (fact V10). A handle is one more owner of a chunk, whichever call it came from.
#include <sim/address_space.hpp>
#include <sim/api.hpp>
#include <sim/config.hpp>
#include <sim/device.hpp>
#include <sim/handles.hpp>
#include <sim/memory.hpp>

#include <cerrno>

namespace gpuloan::sim {
namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20; // fact V5

HandleTable<Chunk>& table() {
  static auto* instance = new HandleTable<Chunk>(0x54);
  return *instance;
}

// A size that VMM calls accept, and small enough that no address arithmetic overflows.
bool is_chunk_size(std::size_t bytes) noexcept {
  return bytes != 0 && bytes % kGranularity == 0 && bytes < std::size_t{1} << 46;
}

CuResult check_prop(const AllocationProp* prop) {
  if (prop == nullptr || prop->type != AllocationPinned || prop->location.type != LocationDevice) return InvalidValue;
  if (!is_device(prop->location.id)) return InvalidDevice;
  return (prop->requested_handle_types & ~static_cast<int>(HandlePosixFd)) == 0 ? Success : InvalidValue;
}

} // namespace

std::size_t live_memory_handles() { return table().size(); }

namespace api {

CuResult cuMemGetAllocationGranularity(std::size_t* bytes, const AllocationProp* prop, int flags) {
  if (bytes == nullptr || flags < GranularityMinimum || flags > GranularityRecommended) return InvalidValue;
  if (const CuResult result = check_prop(prop)) return result;
  *bytes = kGranularity;
  return Success;
}

CuResult cuMemAddressReserve(DevicePtr* pointer, std::size_t bytes, std::size_t alignment, DevicePtr,
                             unsigned long long flags) {
  const bool power_of_two = (alignment & (alignment - 1)) == 0; // 0 too: no wish
  if (pointer == nullptr || !is_chunk_size(bytes) || !power_of_two || flags != 0) return InvalidValue;
  return AddressSpace::get().reserve(bytes, alignment, *pointer);
}

CuResult cuMemAddressFree(DevicePtr pointer, std::size_t bytes) {
  return AddressSpace::get().unreserve(pointer, bytes);
}

CuResult cuMemCreate(MemHandle* handle, std::size_t bytes, const AllocationProp* prop, unsigned long long flags) {
  if (handle == nullptr || flags != 0 || !is_chunk_size(bytes)) return InvalidValue;
  if (const CuResult result = check_prop(prop)) return result;
  std::shared_ptr<Chunk> chunk;
  const int physical = physical_device(prop->location.id);
  const bool exportable = prop->requested_handle_types != HandleNone;
  if (const CuResult result = Chunk::create(physical, bytes, exportable, chunk)) return result;
  *handle = table().add(std::move(chunk));
  return Success;
}

CuResult cuMemRelease(MemHandle handle) { return table().take(handle) ? Success : InvalidValue; }

CuResult cuMemMap(DevicePtr pointer, std::size_t bytes, std::size_t offset, MemHandle handle,
                  unsigned long long flags) {
  const auto found = table().find(handle);
  if (!found || flags != 0 || !is_chunk_size(bytes) || pointer % kGranularity != 0) return InvalidValue;
  if (offset != 0 || bytes != found->size()) return NotSupported;
  return AddressSpace::get().map(pointer, bytes, found);
}

CuResult cuMemUnmap(DevicePtr pointer, std::size_t bytes) {
  if (bytes == 0) return InvalidValue;
  return AddressSpace::get().unmap(pointer, bytes);
}

CuResult cuMemSetAccess(DevicePtr pointer, std::size_t bytes, const AccessDesc* access, std::size_t count) {
  if (access == nullptr || count == 0 || !is_chunk_size(bytes)) return InvalidValue;
  for (std::size_t index = 0; index < count; ++index) {
    const AccessDesc& wish = access[index];
    const bool known = wish.flags == AccessNone || wish.flags == AccessRead || wish.flags == AccessReadWrite;
    if (wish.location.type != LocationDevice || !known) return InvalidValue;
    if (!is_device(wish.location.id)) return InvalidDevice;
  }
  for (std::size_t index = 0; index < count; ++index) {
    const int physical = physical_device(access[index].location.id);
    if (const CuResult result = AddressSpace::get().set_access(pointer, bytes, physical, access[index].flags))
      return result;
  }
  return Success;
}

CuResult cuMemExportToShareableHandle(void* shareable, MemHandle handle, int type, unsigned long long flags) {
  if (shareable == nullptr || flags != 0 || type != HandlePosixFd) return InvalidValue;
  const auto found = table().find(handle);
  if (!found || found->fd() < 0) return InvalidValue;
  const int copy = duplicate(found->fd());
  if (copy < 0) return OperatingSystem;
  *static_cast<int*>(shareable) = copy;
  return Success;
}

CuResult cuMemImportFromShareableHandle(MemHandle* handle, void* shareable, int type) {
  if (handle == nullptr || type != HandlePosixFd) return InvalidValue;
  const auto fd = static_cast<int>(reinterpret_cast<std::intptr_t>(shareable));
  std::shared_ptr<Chunk> chunk;
  if (const CuResult result = Chunk::import(fd, chunk)) return result;
  if (visible_device(chunk->physical()) < 0) return InvalidDevice;
  *handle = table().add(std::move(chunk));
  return Success;
}

// These two are of a group that keeps a function which is no VMM, so the gate lets them pass.
CuResult cuMemRetainAllocationHandle(MemHandle* handle, void* address) {
  if (!config().has(Group::Vmm)) return NotSupported;
  if (handle == nullptr) return InvalidValue;
  auto chunk = AddressSpace::get().mapped_chunk(reinterpret_cast<std::uintptr_t>(address));
  if (!chunk) return InvalidValue; // fact V6
  *handle = table().add(std::move(chunk));
  return Success;
}

CuResult cuMemGetAllocationPropertiesFromHandle(AllocationProp* prop, MemHandle handle) {
  if (!config().has(Group::Vmm)) return NotSupported;
  const auto found = table().find(handle);
  if (prop == nullptr || !found) return InvalidValue;
  *prop = {};
  prop->type = AllocationPinned;
  prop->requested_handle_types = found->fd() >= 0 ? HandlePosixFd : HandleNone;
  prop->location = {LocationDevice, visible_device(found->physical())};
  return Success;
}

} // namespace api
} // namespace gpuloan::sim
