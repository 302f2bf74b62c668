// SPDX-License-Identifier: MIT
//
// Pools that are shared. The driver counts nothing here: importing a pointer twice gives the same address, and the first
// cuMemFree ends both (P6), so an owner counts. Exporting in several threads at once has crashed drivers (R7).
#include <driver/handles.hpp>
#include <driver/lifetime.hpp>
#include <driver/require.hpp>

#include <cerrno>
#include <fcntl.h>
#include <mutex>
#include <utility>

namespace gpuloan::driver {
namespace {

std::mutex& export_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

} // namespace

Result<UniqueFd> export_pool(Gpu& gpu, Pool pool) {
  const Driver& driver = gpu.driver();
  GPULOAN_TRY(require(driver, Group::Pools));
  const Gpu::Scope scope(gpu);
  GPULOAN_TRY(scope.ok());
  const std::lock_guard serial(export_mutex());
  int raw = -1;
  GPULOAN_TRY(GPULOAN_CU(driver, cuMemPoolExportToShareableHandle, &raw, pool, HandlePosixFd, 0));
  UniqueFd fd = UniqueFd::take(raw);
  if (::fcntl(raw, F_SETFD, FD_CLOEXEC) != 0) return fail_errno("fcntl(F_SETFD)", errno);
  if (raw < 3) return UniqueFd::dup(raw);
  return fd;
}

Result<PoolPointer> export_pool_pointer(Gpu& gpu, DevicePtr base) {
  const Driver& driver = gpu.driver();
  GPULOAN_TRY(require(driver, Group::Pools));
  const Gpu::Scope scope(gpu);
  GPULOAN_TRY(scope.ok());
  const std::lock_guard serial(export_mutex());
  PoolPointer shared = {};
  GPULOAN_TRY(GPULOAN_CU(driver, cuMemPoolExportPointer, &shared, base));
  return shared;
}

Result<ImportedPool> ImportedPool::open(std::shared_ptr<Gpu> gpu, int fd) {
  const Driver& driver = gpu->driver();
  GPULOAN_TRY(require(driver, Group::Pools));
  const Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  ImportedPool made;
  void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  GPULOAN_TRY(GPULOAN_CU(driver, cuMemPoolImportFromShareableHandle, &made.pool_, shareable, HandlePosixFd, 0));
  made.gpu_ = std::move(gpu);
  return made;
}

ImportedPool::ImportedPool(ImportedPool&& other) noexcept
    : gpu_(std::move(other.gpu_)), pool_(std::exchange(other.pool_, nullptr)) {}

ImportedPool& ImportedPool::operator=(ImportedPool&& other) noexcept {
  ImportedPool taken(std::move(other));
  std::swap(gpu_, taken.gpu_);
  std::swap(pool_, taken.pool_);
  return *this;
}

ImportedPool::~ImportedPool() {
  if (pool_ == nullptr || !calls_allowed()) return;
  const Gpu::Scope scope(*gpu_);
  if (scope.ok()) gpu_->driver().call.cuMemPoolDestroy(pool_);
}

Result<PoolMapping> PoolMapping::open(std::shared_ptr<Gpu> gpu, Pool pool, PoolPointer shared) {
  const Driver& driver = gpu->driver();
  const Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  PoolMapping made;
  GPULOAN_TRY(GPULOAN_CU(driver, cuMemPoolImportPointer, &made.pointer_, pool, &shared));
  made.gpu_ = std::move(gpu);
  return made;
}

PoolMapping::PoolMapping(PoolMapping&& other) noexcept
    : gpu_(std::move(other.gpu_)), pointer_(std::exchange(other.pointer_, 0)) {}

PoolMapping& PoolMapping::operator=(PoolMapping&& other) noexcept {
  PoolMapping taken(std::move(other));
  std::swap(gpu_, taken.gpu_);
  std::swap(pointer_, taken.pointer_);
  return *this;
}

PoolMapping::~PoolMapping() {
  if (pointer_ == 0 || !calls_allowed()) return;
  const Gpu::Scope scope(*gpu_);
  if (scope.ok()) gpu_->driver().call.cuMemFree(pointer_);
}

} // namespace gpuloan::driver
