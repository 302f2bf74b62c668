// SPDX-License-Identifier: MIT
//
// Device memory as callers see it: VMM handles, reservations and mappings, plain allocations, and the free-memory
// count. VMM calls need no context; a chunk is mapped whole and access is per mapping (fact V10).
#include <sim/address_space.hpp>
#include <sim/api.hpp>
#include <sim/context.hpp>
#include <sim/device.hpp>
#include <sim/memory.hpp>
#include <sim/stream.hpp>

#include <cerrno>

namespace gpuloan::sim {
namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20; // fact V5
constexpr std::size_t kAllocationUnit = 512;

struct MemoryHandle {
  std::shared_ptr<Chunk> chunk;
  Fd fd; // of memory that can be exported; an imported handle cannot
};

HandleTable<MemoryHandle>& table() {
  static auto* instance = new HandleTable<MemoryHandle>(0x54);
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

MemHandle add_handle(std::shared_ptr<Chunk> chunk, Fd fd) {
  auto handle = std::make_shared<MemoryHandle>();
  handle->chunk = std::move(chunk);
  handle->fd = std::move(fd);
  return table().add(std::move(handle));
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
  Fd fd;
  if (const CuResult result = Chunk::create(physical_device(prop->location.id), bytes, chunk, fd)) return result;
  if (prop->requested_handle_types == HandleNone) fd = Fd();
  *handle = add_handle(std::move(chunk), std::move(fd));
  return Success;
}

CuResult cuMemRelease(MemHandle handle) { return table().take(handle) ? Success : InvalidValue; }

CuResult cuMemMap(DevicePtr pointer, std::size_t bytes, std::size_t offset, MemHandle handle,
                  unsigned long long flags) {
  const auto found = table().find(handle);
  if (!found || flags != 0 || !is_chunk_size(bytes) || pointer % kGranularity != 0) return InvalidValue;
  if (offset != 0 || bytes != found->chunk->size()) return NotSupported;
  return AddressSpace::get().map(pointer, bytes, found->chunk);
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
  if (!found || !found->fd) return InvalidValue;
  const int copy = duplicate(found->fd.get());
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
  *handle = add_handle(std::move(chunk), Fd());
  return Success;
}

CuResult cuMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
  if (free_bytes == nullptr || total == nullptr) return InvalidValue;
  const std::uint64_t capacity = config().memory_bytes;
  const std::uint64_t used = account_used(static_cast<std::uint32_t>(current_context()->physical));
  *free_bytes = used < capacity ? capacity - used : 0;
  *total = capacity;
  return Success;
}

CuResult cuMemAlloc(DevicePtr* pointer, std::size_t bytes) {
  if (pointer == nullptr || bytes == 0) return InvalidValue;
  const ContextRef context = current_context();
  if (bytes > config().memory_bytes) return OutOfMemory;
  const std::size_t rounded = (bytes + kAllocationUnit - 1) / kAllocationUnit * kAllocationUnit;
  std::shared_ptr<Chunk> chunk;
  Fd fd; // of no use: such memory cannot be exported (fact V6)
  if (const CuResult result = Chunk::create(context->physical, rounded, chunk, fd)) return result;
  return AddressSpace::get().allocate(std::move(chunk), bytes, context->handle, *pointer);
}

// Waits for the context's work first, as the real one does: it blocks behind a stream that waits (fact S10).
CuResult cuMemFree(DevicePtr pointer) {
  if (pointer == 0) return Success;
  Range range;
  const bool found = AddressSpace::get().find(pointer, range);
  if (!found || range.kind != RangeKind::Allocated || range.start != pointer) return InvalidValue;
  if (const CuResult result = synchronize_owner(range)) return result;
  return AddressSpace::get().free(pointer);
}

CuResult cuMemGetAddressRange(DevicePtr* base, std::size_t* bytes, DevicePtr pointer) {
  Range range;
  if (!AddressSpace::get().find(pointer, range)) return NotFound;
  if (base != nullptr) *base = range.start;
  if (bytes != nullptr) *bytes = range.size;
  return Success;
}

} // namespace api
} // namespace gpuloan::sim
