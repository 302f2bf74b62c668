// SPDX-License-Identifier: MIT
//
// Pointer kinds: what a device pointer is, by the driver's answers alone, so that it does not matter which allocator or
// framework made it. Asked at each lend: an address may have changed its meaning since (P14).
#pragma once

#include <driver/handles.hpp>

#include <cstdint>
#include <vector>

namespace gpuloan::memory {

enum class PointerKind : std::uint8_t {
  Unknown,        // the driver does not know it
  Alloc,          // cuMemAlloc: has a legacy handle
  PoolShareable,  // of a pool made with POSIX FD handles
  PoolPrivate,    // of a pool without them (the device's default pool), or of an imported pool
  VmmShareable,   // mapped chunks that were made with POSIX FD handles
  VmmPrivate,     // mapped chunks, one of them at least without
  Managed,
  HostAlloc,      // host memory that the device reaches, allocated or registered
  Imported,       // another process's, opened by a legacy handle
};
[[nodiscard]] const char* pointer_kind_name(PointerKind kind) noexcept;

// For messages: "0x7f00", and "0x7f00 with 16 bytes".
[[nodiscard]] std::string address_text(std::uint64_t pointer);
[[nodiscard]] std::string range_text(std::uint64_t pointer, std::uint64_t bytes);

struct PointerInfo {
  PointerKind kind = PointerKind::Unknown;
  std::uint64_t base = 0;      // of the allocation; of the first chunk for VMM
  std::uint64_t bytes = 0;     // of the allocation; of all chunks that the range touches for VMM
  std::uint64_t buffer_id = 0; // never used twice by one process
  cuda::Pool pool = nullptr;   // PoolShareable
  std::uint32_t pieces = 1;    // chunks that the range touches, VMM only
};
// INVALID when [pointer, pointer + bytes) is not wholly memory of one allocation (or of chunks that are mapped without a
// gap), or of another device; Unknown is no error. 0 bytes are not asked about.
[[nodiscard]] Result<PointerInfo> classify(driver::Gpu& gpu, std::uint64_t pointer, std::uint64_t bytes);

// VmmShareable: handles of our own to the chunks under [pointer, pointer + bytes), in order. They keep the memory.
[[nodiscard]] Result<std::vector<driver::VmmHandle>> retain_chunks(const std::shared_ptr<driver::Gpu>& gpu, std::uint64_t pointer, std::uint64_t bytes);

} // namespace gpuloan::memory
