// SPDX-License-Identifier: MIT
//
// Pools that are shared. The driver counts nothing here: importing a pointer twice gives the same address, and the first
// cuMemFree ends both (P6), so an owner counts. Exporting in several threads at once has crashed drivers (R7).
#include <driver/handles.hpp>
#include <driver/lifetime.hpp>
#include <driver/require.hpp>

#include <base/process_wide.hpp>

#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <utility>

namespace gpuloan::driver {
namespace {

struct Exporting {
  std::mutex mutex;
};

} // namespace

Result<UniqueFd> export_pool(Gpu& gpu, Pool pool) {
  const Driver& driver = gpu.driver();
  GPULOAN_TRY(require(driver, Group::Pools));
  const Gpu::Scope scope(gpu);
  GPULOAN_TRY(scope.ok());
  const std::lock_guard serial(process_wide<Exporting>().mutex);
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
  const std::lock_guard serial(process_wide<Exporting>().mutex);
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

struct PoolMapping::Import {
  std::mutex mutex; // opening and closing, one after the other
  std::uint32_t uses = 0;
  std::shared_ptr<Gpu> gpu;
  std::shared_ptr<const void> owner;
  DevicePtr pointer = 0;
};

// Of this process, by what was exported. An import is found as long as somebody has it, also while it is closed.
struct PoolMapping::Imports {
  std::mutex mutex;
  std::map<std::array<unsigned char, sizeof(PoolPointer)>, std::weak_ptr<Import>> known;

  std::shared_ptr<Import> find(const PoolPointer& shared) {
    std::array<unsigned char, sizeof(PoolPointer)> key;
    std::memcpy(key.data(), &shared, key.size());
    const std::lock_guard lock(mutex);
    std::weak_ptr<Import>& known_import = known[key];
    std::shared_ptr<Import> found = known_import.lock();
    if (found) return found;
    found = std::make_shared<Import>();
    known_import = found;
    std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
    return found;
  }
};

Result<PoolMapping> PoolMapping::open(std::shared_ptr<Gpu> gpu, Pool pool, PoolPointer shared, std::shared_ptr<const void> owner) {
  const auto import = process_wide<Imports>().find(shared);
  const std::lock_guard lock(import->mutex);
  if (import->uses == 0) {
    const Driver& driver = gpu->driver();
    const Gpu::Scope scope(*gpu);
    GPULOAN_TRY(scope.ok());
    GPULOAN_TRY(GPULOAN_CU(driver, cuMemPoolImportPointer, &import->pointer, pool, &shared));
    import->gpu = std::move(gpu);
    import->owner = std::move(owner);
  }
  ++import->uses;
  PoolMapping made;
  made.import_ = import;
  return made;
}

DevicePtr PoolMapping::pointer() const noexcept { return import_ != nullptr ? import_->pointer : 0; }

PoolMapping& PoolMapping::operator=(PoolMapping&& other) noexcept {
  PoolMapping taken(std::move(other));
  std::swap(import_, taken.import_);
  return *this;
}

PoolMapping::~PoolMapping() {
  if (import_ == nullptr) return;
  const std::lock_guard lock(import_->mutex);
  if (--import_->uses != 0) return;
  if (calls_allowed()) {
    const Gpu::Scope scope(*import_->gpu);
    if (scope.ok()) import_->gpu->driver().call.cuMemFree(import_->pointer);
  }
  import_->owner.reset();
  import_->gpu.reset();
}

} // namespace gpuloan::driver
