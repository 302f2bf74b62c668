// SPDX-License-Identifier: MIT
//
// Device memory that is no VMM: plain and managed allocations, and the free-memory count. Managed memory is device
// memory that says otherwise; the CPU cannot reach it here.
#include <sim/address_space.hpp>
#include <sim/api.hpp>
#include <sim/context.hpp>
#include <sim/pool_register.hpp>
#include <sim/stream.hpp>

namespace gpuloan::sim {
namespace {

constexpr std::size_t kAllocationUnit = 512;

CuResult allocate(RangeKind kind, std::size_t bytes, DevicePtr& out) {
  const ContextRef context = current_context();
  if (bytes > config().memory_bytes) return OutOfMemory;
  const std::size_t rounded = (bytes + kAllocationUnit - 1) / kAllocationUnit * kAllocationUnit;
  const bool shareable = kind == RangeKind::Allocated && config().has(Group::IpcMemory);
  Range range;
  if (const CuResult result = Chunk::create(context->physical, rounded, shareable, range.chunk)) return result;
  range.kind = kind;
  range.size = bytes;
  range.context = context->handle;
  range.access.fill(AccessReadWrite);
  return AddressSpace::get().allocate(std::move(range), out);
}

} // namespace

namespace api {

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
  return allocate(RangeKind::Allocated, bytes, *pointer);
}

CuResult cuMemAllocManaged(DevicePtr* pointer, std::size_t bytes, unsigned flags) {
  constexpr unsigned kGlobal = 1;
  constexpr unsigned kHost = 2;
  if (pointer == nullptr || bytes == 0 || (flags != kGlobal && flags != kHost)) return InvalidValue;
  return allocate(RangeKind::Managed, bytes, *pointer);
}

// Waits for the context's work first, as the real one does: it blocks behind a stream that waits (fact S10). Not so for
// memory of a pool (documented; measured for an imported one): what still uses it then faults.
CuResult cuMemFree(DevicePtr pointer) {
  if (pointer == 0) return Success;
  Range range;
  const bool found = AddressSpace::get().find(pointer, range);
  if (found && range.pool != 0 && range.start == pointer) {
    const auto memory = take_pool_memory(pointer);
    if (!memory) return InvalidValue;
    if (memory->kind() == RangeKind::Pooled) memory->stay_counted();
    return Success;
  }
  const bool plain = range.kind == RangeKind::Allocated || range.kind == RangeKind::Managed;
  if (!found || !plain || range.start != pointer) return InvalidValue;
  if (const CuResult result = synchronize_owner(range)) return result;
  return AddressSpace::get().free(pointer, range.kind);
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
