// SPDX-License-Identifier: MIT
//
// Chunks of device memory as the driver's virtual memory management knows them: a handle (the memory), a reservation (the
// addresses), a mapping (one in the other), an access. Releasing a handle under a mapping is legal and usual: the memory
// lives until the last mapping in any process is gone (V3), which is what makes retirement sound (V12).
//
// A chunk is mapped whole and with one access for its whole life: the driver refuses parts and offsets of imported
// handles (V10).
#include <driver/handles.hpp>

#include <driver/require.hpp>

#include <cerrno>
#include <fcntl.h>

namespace gpuloan::driver {
namespace {

AllocationProp chunk_prop(const Gpu& gpu) {
  AllocationProp prop = {};
  prop.type = AllocationPinned;
  prop.requested_handle_types = HandlePosixFd;
  prop.location = {LocationDevice, gpu.device()};
  return prop;
}

// Adds the numbers to an out-of-memory error: what was asked for, and what the driver says is free.
Error with_numbers(Error error, const Driver& driver, std::size_t bytes) {
  if (error.status != GPULOAN_ERR_DEVICE_MEMORY) return error;
  error.text += "; asked for " + std::to_string(bytes) + " bytes, ";
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  if (driver.call.cuMemGetInfo(&free_bytes, &total) == Success) {
    error.text += std::to_string(free_bytes) + " of " + std::to_string(total) + " are free";
  } else {
    error.text += "how much is free is not known";
  }
  return error;
}

// Running out of addresses is not running out of device memory.
Error reserve_error(const Driver& driver, CuResult code, std::size_t bytes) {
  Error error = driver.error("cuMemAddressReserve", code);
  if (code == OutOfMemory) {
    error.status = GPULOAN_ERR_NO_MEMORY;
    error.text += "; no address range of " + std::to_string(bytes) + " bytes in this process: look at RLIMIT_AS";
  }
  return error;
}

} // namespace

Result<VmmHandle> VmmHandle::create(std::shared_ptr<Gpu> gpu, std::size_t bytes) {
  const Driver& driver = gpu->driver();
  GPULOAN_TRY(require(driver, Group::Vmm));
  const Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  const AllocationProp prop = chunk_prop(*gpu);
  VmmHandle made;
  if (auto created = GPULOAN_CU(driver, cuMemCreate, &made.handle_, bytes, &prop, 0); !created) {
    return std::unexpected(with_numbers(std::move(created.error()), driver, bytes));
  }
  made.bytes_ = bytes;
  made.gpu_ = std::move(gpu);
  return made;
}

Result<VmmHandle> VmmHandle::import_fd(std::shared_ptr<Gpu> gpu, int fd, std::size_t bytes) {
  const Driver& driver = gpu->driver();
  GPULOAN_TRY(require(driver, Group::Vmm));
  const Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  VmmHandle made;
  // The descriptor travels in the pointer's value. The driver keeps its own reference; `fd` stays the caller's.
  void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  GPULOAN_TRY(GPULOAN_CU(driver, cuMemImportFromShareableHandle, &made.handle_, shareable, HandlePosixFd));
  made.bytes_ = bytes;
  made.gpu_ = std::move(gpu);
  return made;
}

Result<VmmHandle> VmmHandle::retain(std::shared_ptr<Gpu> gpu, DevicePtr address, std::size_t bytes) {
  const Driver& driver = gpu->driver();
  GPULOAN_TRY(require(driver, Group::ForeignVmm));
  const Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  VmmHandle made;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver wants the address as a pointer
  const CuResult code = driver.call.cuMemRetainAllocationHandle(&made.handle_, reinterpret_cast<void*>(address));
  if (code == InvalidValue) return fail(GPULOAN_ERR_INVALID, "the memory was not made through VMM");
  GPULOAN_TRY(driver.check("cuMemRetainAllocationHandle", code));
  made.bytes_ = bytes;
  made.gpu_ = std::move(gpu);
  return made;
}

Result<int> VmmHandle::handle_types() const {
  AllocationProp prop = {};
  GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuMemGetAllocationPropertiesFromHandle, &prop, handle_));
  return prop.requested_handle_types;
}

VmmHandle::VmmHandle(VmmHandle&& other) noexcept
    : gpu_(std::move(other.gpu_)), handle_(std::exchange(other.handle_, 0)), bytes_(std::exchange(other.bytes_, 0)) {}

VmmHandle& VmmHandle::operator=(VmmHandle&& other) noexcept {
  VmmHandle taken(std::move(other));
  std::swap(gpu_, taken.gpu_);
  std::swap(handle_, taken.handle_);
  std::swap(bytes_, taken.bytes_);
  return *this;
}

VmmHandle::~VmmHandle() {
  if (gpu_ == nullptr || !calls_allowed()) return;
  const Gpu::Scope scope(*gpu_);
  if (scope.ok()) gpu_->driver().call.cuMemRelease(handle_);
}

Result<UniqueFd> VmmHandle::export_fd() const {
  const Driver& driver = gpu_->driver();
  const Gpu::Scope scope(*gpu_);
  GPULOAN_TRY(scope.ok());
  int raw = -1;
  GPULOAN_TRY(GPULOAN_CU(driver, cuMemExportToShareableHandle, &raw, handle_, HandlePosixFd, 0));
  UniqueFd fd = UniqueFd::take(raw);
  if (!fd) return fail(GPULOAN_ERR_DRIVER, "cuMemExportToShareableHandle gave no descriptor [" + driver.describe() + "]");
  // The driver's own flag is not documented: an exec between its call and this one may leak the descriptor.
  if (::fcntl(raw, F_SETFD, FD_CLOEXEC) != 0) return fail_errno("fcntl(F_SETFD)", errno);
  if (raw < 3) return UniqueFd::dup(raw);
  return fd;
}

Result<VmmMapping> VmmMapping::map(std::shared_ptr<Gpu> gpu, const VmmHandle& handle, AccessFlags access) {
  const Driver& driver = gpu->driver();
  GPULOAN_TRY(require(driver, Group::Vmm));
  const Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  const std::size_t bytes = handle.bytes();
  DevicePtr pointer = 0;
  if (const CuResult code = driver.call.cuMemAddressReserve(&pointer, bytes, 0, 0, 0); code != Success) {
    return std::unexpected(reserve_error(driver, code, bytes));
  }
  if (auto mapped = GPULOAN_CU(driver, cuMemMap, pointer, bytes, 0, handle.get(), 0); !mapped) {
    driver.call.cuMemAddressFree(pointer, bytes);
    return forward(std::move(mapped.error()));
  }
  const AccessDesc desc = {{LocationDevice, gpu->device()}, access};
  if (auto allowed = GPULOAN_CU(driver, cuMemSetAccess, pointer, bytes, &desc, 1); !allowed) {
    // Addresses that are still mapped must not be freed: then they are lost, which costs nothing but addresses.
    if (driver.call.cuMemUnmap(pointer, bytes) == Success) driver.call.cuMemAddressFree(pointer, bytes);
    return forward(std::move(allowed.error()));
  }
  VmmMapping made;
  made.pointer_ = pointer;
  made.bytes_ = bytes;
  made.gpu_ = std::move(gpu);
  return made;
}

VmmMapping::VmmMapping(VmmMapping&& other) noexcept
    : gpu_(std::move(other.gpu_)), pointer_(std::exchange(other.pointer_, 0)), bytes_(std::exchange(other.bytes_, 0)) {}

VmmMapping& VmmMapping::operator=(VmmMapping&& other) noexcept {
  VmmMapping taken(std::move(other));
  std::swap(gpu_, taken.gpu_);
  std::swap(pointer_, taken.pointer_);
  std::swap(bytes_, taken.bytes_);
  return *this;
}

VmmMapping::~VmmMapping() {
  if (pointer_ == 0 || !calls_allowed()) return;
  const Gpu::Scope scope(*gpu_);
  if (!scope.ok()) return;
  const Table& call = gpu_->driver().call;
  if (call.cuMemUnmap(pointer_, bytes_) == Success) call.cuMemAddressFree(pointer_, bytes_);
}

// What is mapped is taken back by the destructor, wherever this stops.
Result<VmmRange> VmmRange::map(std::shared_ptr<Gpu> gpu, std::span<const VmmHandle> handles, AccessFlags access) {
  const Driver& driver = gpu->driver();
  GPULOAN_TRY(require(driver, Group::Vmm));
  const Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  VmmRange made;
  for (const VmmHandle& handle : handles) made.bytes_ += handle.bytes();
  if (const CuResult code = driver.call.cuMemAddressReserve(&made.pointer_, made.bytes_, 0, 0, 0); code != Success) {
    return std::unexpected(reserve_error(driver, code, made.bytes_));
  }
  const AccessDesc desc = {{LocationDevice, gpu->device()}, access};
  made.gpu_ = std::move(gpu);
  DevicePtr at = made.pointer_;
  for (const VmmHandle& handle : handles) {
    GPULOAN_TRY(GPULOAN_CU(driver, cuMemMap, at, handle.bytes(), 0, handle.get(), 0));
    made.pieces_.push_back(handle.bytes());
    at += handle.bytes();
  }
  GPULOAN_TRY(GPULOAN_CU(driver, cuMemSetAccess, made.pointer_, made.bytes_, &desc, 1));
  return made;
}

VmmRange::VmmRange(VmmRange&& other) noexcept
    : gpu_(std::move(other.gpu_)), pointer_(std::exchange(other.pointer_, 0)), bytes_(std::exchange(other.bytes_, 0)),
      pieces_(std::move(other.pieces_)) {}

VmmRange& VmmRange::operator=(VmmRange&& other) noexcept {
  VmmRange taken(std::move(other));
  std::swap(gpu_, taken.gpu_);
  std::swap(pointer_, taken.pointer_);
  std::swap(bytes_, taken.bytes_);
  std::swap(pieces_, taken.pieces_);
  return *this;
}

VmmRange::~VmmRange() {
  if (pointer_ == 0 || !calls_allowed()) return;
  const Gpu::Scope scope(*gpu_);
  if (!scope.ok()) return;
  const Table& call = gpu_->driver().call;
  DevicePtr at = pointer_;
  bool clean = true;
  for (const std::size_t bytes : pieces_) {
    clean = call.cuMemUnmap(at, bytes) == Success && clean;
    at += bytes;
  }
  if (clean) call.cuMemAddressFree(pointer_, bytes_); // else the addresses are lost, which costs nothing but addresses
}

} // namespace gpuloan::driver
