// SPDX-License-Identifier: MIT
//
// The questions and what their answers mean were measured on an H200 (test/sim/answers, section "kinds"): a legacy handle
// exists for cuMemAlloc memory alone; pools and VMM say which handles they were made with; memory opened by a legacy
// handle is device memory that has nothing of all this.
#include <memory/pointer_kind.hpp>

#include <cstdio>

namespace gpuloan::memory {
namespace {

// One attribute; 0 where the driver does not know the question (older drivers).
Result<std::uint64_t> ask(const driver::Driver& driver, cuda::PointerAttribute which, std::uint64_t pointer) {
  const int attribute = which;
  std::uint64_t answer = 0;
  void* out = &answer;
  const cuda::CuResult code = driver.call.cuPointerGetAttributes(1, &attribute, &out, pointer);
  if (code == cuda::Success) return answer;
  if (code == cuda::InvalidValue) return 0U; // a driver that does not know the attribute
  return std::unexpected(driver.error("cuPointerGetAttributes", code)); // which says nothing of the pointer
}

Error elsewhere(driver::Gpu& gpu, std::uint64_t pointer, int ordinal) {
  return Error{GPULOAN_ERR_INVALID, address_text(pointer) + " is memory of device " + std::to_string(ordinal) + ", the context works on device " +
                                        std::to_string(gpu.ordinal()) + " (" + gpu.floors().uuid_text() +
                                        "): lend it from a context for that device (options.device with GPULOAN_CONTEXT_DEVICE)"};
}

// Where there are none, no memory is capable of them and none was opened by one. Some platforms only say so when they are asked for one
// (K1); one that has them calls the memory of another process INVALID_VALUE.
bool has_legacy_handles(driver::Gpu& gpu, std::uint64_t pointer) {
  cuda::IpcMemHandle handle = {};
  return gpu.floors().has(GPULOAN_FLOOR_IPC_MEMORY) && gpu.driver().call.cuIpcGetMemHandle(&handle, pointer) != cuda::NotSupported;
}

struct Chunks {
  PointerInfo info;
  bool vmm = false;
};

// Walks the chunks under the range: the driver's range attributes span a whole reservation, its address range one chunk (V8).
Result<Chunks> walk_chunks(driver::Gpu& gpu, std::uint64_t pointer, std::uint64_t bytes) {
  const driver::Driver& driver = gpu.driver();
  Chunks found;
  found.info.kind = PointerKind::VmmShareable;
  found.info.pieces = 0;
  for (std::uint64_t at = pointer; at < pointer + bytes;) {
    cuda::MemHandle handle = 0;
    if (driver.call.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(at)) != cuda::Success) {
      if (found.info.pieces == 0) return found; // no VMM memory at all
      return fail(GPULOAN_ERR_INVALID, range_text(pointer, bytes) + " has a gap in its mapping");
    }
    found.vmm = true;
    cuda::AllocationProp prop = {};
    std::uint64_t base = 0;
    std::size_t size = 0;
    Result<void> asked = GPULOAN_CU(driver, cuMemGetAllocationPropertiesFromHandle, &prop, handle);
    if (asked) asked = GPULOAN_CU(driver, cuMemGetAddressRange, &base, &size, at);
    driver.call.cuMemRelease(handle);
    if (!asked) return forward(std::move(asked.error()));
    if (prop.location.id != gpu.device()) return std::unexpected(elsewhere(gpu, at, prop.location.id));
    if ((prop.requested_handle_types & cuda::HandlePosixFd) == 0) found.info.kind = PointerKind::VmmPrivate;
    if (found.info.pieces++ == 0) found.info.base = base;
    found.info.bytes += size;
    at = base + size;
  }
  return found;
}

} // namespace

std::string address_text(std::uint64_t pointer) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(pointer));
  return text;
}

std::string range_text(std::uint64_t pointer, std::uint64_t bytes) { return address_text(pointer) + " with " + std::to_string(bytes) + " bytes"; }

const char* pointer_kind_name(PointerKind kind) noexcept {
  switch (kind) {
    case PointerKind::Alloc:
      return "cuMemAlloc memory";
    case PointerKind::PoolShareable:
      return "memory of a shareable pool";
    case PointerKind::PoolPrivate:
      return "memory of a pool that cannot be shared";
    case PointerKind::VmmShareable:
      return "VMM memory";
    case PointerKind::VmmPrivate:
      return "VMM memory made without handles";
    case PointerKind::Managed:
      return "managed memory";
    case PointerKind::HostAlloc:
      return "host memory";
    case PointerKind::Imported:
      return "memory of another process";
    default:
      return "memory that the driver does not know";
  }
}

Result<PointerInfo> classify(driver::Gpu& gpu, std::uint64_t pointer, std::uint64_t bytes) {
  driver::Gpu::Scope scope(gpu);
  GPULOAN_TRY(scope.ok());
  const driver::Driver& driver = gpu.driver();
  unsigned type = 0;
  unsigned managed = 0; // four bytes are written, although the attribute is called a boolean
  int ordinal = gpu.ordinal();
  PointerInfo info;
  const int attributes[] = {cuda::PointerMemoryType, cuda::PointerRangeStart, cuda::PointerRangeSize, cuda::PointerBufferId, cuda::PointerIsManaged, cuda::PointerDeviceOrdinal};
  void* values[] = {&type, &info.base, &info.bytes, &info.buffer_id, &managed, &ordinal};
  GPULOAN_TRY(GPULOAN_CU(driver, cuPointerGetAttributes, 6, attributes, values, pointer));
  if (type == 0) return PointerInfo{};
  const bool device = managed == 0 && type == cuda::MemoryDevice;
  const Result<std::uint64_t> pool = device ? ask(driver, cuda::PointerMemPool, pointer) : Result<std::uint64_t>(0U);
  if (!pool) return std::unexpected(pool.error());
  const auto which = *pool != 0 ? cuda::PointerAllowedHandleTypes : cuda::PointerLegacyIpcCapable;
  const Result<std::uint64_t> more = device ? ask(driver, which, pointer) : Result<std::uint64_t>(0U);
  if (!more) return std::unexpected(more.error());
  if (managed != 0) {
    info.kind = PointerKind::Managed;
  } else if (type != cuda::MemoryDevice) {
    info.kind = PointerKind::HostAlloc;
  } else if (*pool != 0) {
    info.kind = (*more & cuda::HandlePosixFd) != 0 ? PointerKind::PoolShareable : PointerKind::PoolPrivate;
    info.pool = reinterpret_cast<cuda::Pool>(*pool);
  } else if ((*more & 0xFF) != 0) {
    info.kind = PointerKind::Alloc;
  } else {
    info.kind = PointerKind::VmmPrivate; // or imported: a driver without these functions does not tell
    if (driver.has(driver::Group::ForeignVmm)) {
      auto chunks = walk_chunks(gpu, pointer, bytes);
      if (!chunks) return forward(std::move(chunks.error()));
      chunks->info.buffer_id = info.buffer_id;
      if (chunks->vmm) return chunks->info;
      info.kind = has_legacy_handles(gpu, pointer) ? PointerKind::Imported : PointerKind::Alloc;
    }
  }
  const bool one_device = info.kind == PointerKind::Alloc || info.kind == PointerKind::PoolShareable || info.kind == PointerKind::PoolPrivate;
  if (one_device && ordinal != gpu.ordinal()) return std::unexpected(elsewhere(gpu, pointer, ordinal));
  if (pointer < info.base || bytes > info.bytes || pointer - info.base > info.bytes - bytes) {
    return fail(GPULOAN_ERR_INVALID, range_text(pointer, bytes) + " is no range of one device allocation");
  }
  return info;
}

Result<std::vector<driver::VmmHandle>> retain_chunks(const std::shared_ptr<driver::Gpu>& gpu, std::uint64_t pointer, std::uint64_t bytes) {
  driver::Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  std::vector<driver::VmmHandle> handles;
  for (std::uint64_t at = pointer; at < pointer + bytes;) {
    std::uint64_t base = 0;
    std::size_t size = 0;
    GPULOAN_TRY(GPULOAN_CU(gpu->driver(), cuMemGetAddressRange, &base, &size, at));
    auto handle = driver::VmmHandle::retain(gpu, at, size);
    if (!handle) return forward(std::move(handle.error()));
    handles.push_back(std::move(*handle));
    at = base + size;
  }
  return handles;
}

} // namespace gpuloan::memory
