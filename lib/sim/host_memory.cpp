// SPDX-License-Identifier: MIT
//
// Host memory that the device may reach: registered by the caller, or allocated for it. The device uses the host
// address. Registering pins nothing here; unmapping registered memory is the caller's fault and can crash its process.
#include <sim/address_space.hpp>
#include <sim/api.hpp>
#include <sim/config.hpp>
#include <sim/context.hpp>
#include <sim/host_memory.hpp>

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <memory>
#include <sys/mman.h>
#include <unistd.h>

namespace gpuloan::sim {

bool is_host_memory(const void* start, std::size_t bytes) noexcept {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(start);
  std::uintptr_t end = 0;
  if (__builtin_add_overflow(address, bytes, &end)) return false;
  if (AddressSpace::get().touches_reservation(address, bytes)) return false;
  const std::uintptr_t first = address / page * page;
  // MS_ASYNC starts nothing on Linux; it fails with ENOMEM where a page of the range is not mapped.
  return ::msync(reinterpret_cast<void*>(first), end - first, MS_ASYNC) == 0;
}

namespace {

std::atomic<std::uint64_t> registered{0};

std::atomic<std::uint64_t>& pin_limit() {
  static std::atomic<std::uint64_t> limit{config().pin_limit};
  return limit;
}

constexpr unsigned kReadOnly = 8; // CU_MEMHOSTREGISTER_READ_ONLY: the device only reads

// Whether the whole range is mapped readable, and writable if need be. There is no system call that tells.
bool is_usable(const void* start, std::size_t bytes, bool writable) {
  auto at = reinterpret_cast<std::uintptr_t>(start);
  std::uintptr_t end = 0;
  if (__builtin_add_overflow(at, bytes, &end)) return false;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> maps(std::fopen("/proc/self/maps", "re"), std::fclose);
  if (!maps) return is_host_memory(start, bytes);
  char line[512]; // of a longer line (a long file name) the rest is read as a line that says nothing
  while (at < end && std::fgets(line, sizeof line, maps.get()) != nullptr) {
    std::uintptr_t first = 0;
    std::uintptr_t last = 0;
    char access[5] = {};
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &first, &last, access) != 3 || last <= at) continue;
    if (first > at || access[0] != 'r' || (writable && access[1] != 'w')) return false;
    at = last;
  }
  return at >= end;
}

} // namespace

void set_pin_limit(std::uint64_t bytes) noexcept { pin_limit() = bytes; }

namespace api {

CuResult cuMemHostRegister(void* pointer, std::size_t bytes, unsigned flags) {
  constexpr unsigned kKnown = RegisterPortable | RegisterDeviceMap | kReadOnly;
  if (pointer == nullptr || bytes == 0 || (flags & ~kKnown) != 0) return InvalidValue;
  if (!is_usable(pointer, bytes, (flags & kReadOnly) == 0)) return InvalidValue;
  if (registered.fetch_add(bytes) + bytes > pin_limit()) {
    registered -= bytes;
    return OutOfMemory;
  }
  const ContextRef context = current_context();
  const CuResult result = AddressSpace::get().add_host(pointer, bytes, context->handle, context->physical, false);
  if (result != Success) registered -= bytes;
  return result;
}

// Waits for the context's work first (measured): it blocks behind a stream that waits.
CuResult cuMemHostUnregister(void* pointer) {
  if (pointer == nullptr) return InvalidValue;
  Range range;
  const DevicePtr address = reinterpret_cast<std::uintptr_t>(pointer);
  if (!AddressSpace::get().find(address, range)) return HostMemoryNotRegistered;
  if (range.kind != RangeKind::Host || range.start != address || range.owned) return InvalidValue;
  if (const CuResult result = synchronize_owner(range)) return result;
  const CuResult result = AddressSpace::get().remove_host(pointer, false);
  if (result == Success) registered -= range.size;
  return result;
}

CuResult cuMemHostGetDevicePointer(DevicePtr* device, void* host, unsigned flags) {
  if (device == nullptr || flags != 0) return InvalidValue;
  Range range;
  const DevicePtr address = reinterpret_cast<std::uintptr_t>(host);
  if (!AddressSpace::get().find(address, range) || range.kind != RangeKind::Host) return InvalidValue;
  *device = address;
  return Success;
}

CuResult cuMemAllocHost(void** pointer, std::size_t bytes) {
  if (pointer == nullptr) return InvalidValue;
  if (bytes == 0) {
    *pointer = nullptr;
    return Success;
  }
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return OutOfMemory;
  const ContextRef context = current_context();
  if (const CuResult result = AddressSpace::get().add_host(address, bytes, context->handle, context->physical, true)) {
    ::munmap(address, bytes);
    return result;
  }
  *pointer = address;
  return Success;
}

CuResult cuMemFreeHost(void* pointer) {
  Range range;
  const DevicePtr address = reinterpret_cast<std::uintptr_t>(pointer);
  const bool found = AddressSpace::get().find(address, range);
  if (!found || range.kind != RangeKind::Host || range.start != address || !range.owned) return InvalidValue;
  if (const CuResult result = synchronize_owner(range)) return result;
  if (const CuResult result = AddressSpace::get().remove_host(pointer, true)) return result;
  ::munmap(pointer, range.size);
  return Success;
}

} // namespace api
} // namespace gpuloan::sim
