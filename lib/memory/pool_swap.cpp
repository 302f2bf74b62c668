// SPDX-License-Identifier: MIT
#include <memory/pool_swap.hpp>

#include <base/fork.hpp>
#include <base/log.hpp>
#include <driver/gpu.hpp>

#include <map>
#include <mutex>
#include <vector>

namespace gpuloan::memory {
namespace {

struct Swap {
  std::shared_ptr<const driver::Driver> driver;
  cuda::Device device = 0; // whose primary context is retained
  cuda::Pool pool = nullptr;
  cuda::Pool before = nullptr; // what was current
};

struct Swaps {
  std::mutex mutex;
  std::map<std::pair<const driver::Driver*, int>, Swap> installed;
  std::vector<Swap> aside;
  const std::uint32_t generation = fork_generation();
};

Swaps& swaps() {
  static auto* instance = new Swaps; // never destroyed: the driver may be gone by then
  return *instance;
}

// The mutex may be held by a thread that a forked child does not have.
Result<void> check_forked() {
  if (swaps().generation == fork_generation()) return {};
  return fail(GPULOAN_ERR_FORKED, "the device's pool belongs to the parent of this forked process; start workers with exec");
}

std::string device_text(int ordinal) { return "device " + std::to_string(ordinal); }

// The device's primary context, current in this scope.
class PrimaryScope {
 public:
  PrimaryScope(const driver::Driver& driver, cuda::Device device) : driver_(driver), device_(device) {
    cuda::Context context = nullptr;
    ok_ = GPULOAN_CU(driver, cuDevicePrimaryCtxRetain, &context, device);
    if (!ok_) return;
    retained_ = true;
    ok_ = GPULOAN_CU(driver, cuCtxPushCurrent, context);
    pushed_ = ok_.has_value();
  }
  PrimaryScope(const PrimaryScope&) = delete;
  PrimaryScope& operator=(const PrimaryScope&) = delete;
  ~PrimaryScope() {
    cuda::Context popped = nullptr;
    if (pushed_) driver_.call.cuCtxPopCurrent(&popped);
    if (retained_) driver_.call.cuDevicePrimaryCtxRelease(device_);
  }
  [[nodiscard]] const Result<void>& ok() const noexcept { return ok_; }
  void keep() noexcept { retained_ = false; } // the caller releases it

 private:
  const driver::Driver& driver_;
  const cuda::Device device_;
  Result<void> ok_;
  bool retained_ = false, pushed_ = false;
};

Result<std::uint64_t> used_bytes(const driver::Driver& driver, cuda::Pool pool) {
  std::uint64_t used = 0;
  GPULOAN_TRY(GPULOAN_CU(driver, cuMemPoolGetAttribute, pool, cuda::PoolUsedBytes, &used));
  return used;
}

Result<void> set_threshold(const driver::Driver& driver, cuda::Pool pool, std::uint64_t bytes) {
  return GPULOAN_CU(driver, cuMemPoolSetAttribute, pool, cuda::PoolReleaseThreshold, &bytes);
}

Result<cuda::Pool> make_pool(const driver::Driver& driver, cuda::Device device) {
  cuda::PoolProps props = {};
  props.type = cuda::AllocationPinned;
  props.handle_types = cuda::HandlePosixFd;
  props.location = {cuda::LocationDevice, device};
  cuda::Pool pool = nullptr;
  GPULOAN_TRY(GPULOAN_CU(driver, cuMemPoolCreate, &pool, &props));
  // What is trimmed after it was exported is lost to the device (P8), so freed memory stays with the pool.
  if (auto set = set_threshold(driver, pool, UINT64_MAX); !set) {
    driver.call.cuMemPoolDestroy(pool);
    return forward(std::move(set.error()));
  }
  return pool;
}

// With the lock: destroys what was set aside and is not in use any more. What the driver does not answer for stays.
void sweep_aside() {
  std::erase_if(swaps().aside, [](const Swap& swap) {
    const PrimaryScope scope(*swap.driver, swap.device);
    const auto used = scope.ok() ? used_bytes(*swap.driver, swap.pool) : Result<std::uint64_t>(1);
    if (!used || *used > 0) return false;
    swap.driver->call.cuMemPoolDestroy(swap.pool);
    swap.driver->call.cuDevicePrimaryCtxRelease(swap.device);
    return true;
  });
}

} // namespace

Result<void> install_pool(const std::shared_ptr<const driver::Driver>& driver, int ordinal) {
  GPULOAN_TRY(check_forked());
  auto floors = driver::probe_floors(*driver, ordinal);
  if (!floors) return forward(std::move(floors.error()));
  if (!floors->has(GPULOAN_FLOOR_POOLS)) return fail(GPULOAN_ERR_UNSUPPORTED, device_text(ordinal) + " has no memory pools that can be shared: " + floors->reason);

  const std::lock_guard lock(swaps().mutex);
  sweep_aside();
  decltype(Swaps::installed) made; // its node moves over when nothing can fail any more
  Swap& swap = made[{driver.get(), ordinal}];
  if (swaps().installed.contains(made.begin()->first)) {
    return fail(GPULOAN_ERR_STATE, "a pool is installed on " + device_text(ordinal) + " already; gpuloan_pool_uninstall takes it away");
  }
  swap.driver = driver;
  GPULOAN_TRY(GPULOAN_CU(*driver, cuDeviceGet, &swap.device, ordinal));
  PrimaryScope scope(*driver, swap.device);
  GPULOAN_TRY(scope.ok());
  GPULOAN_TRY(GPULOAN_CU(*driver, cuDeviceGetMemPool, &swap.before, swap.device));
  auto used = used_bytes(*driver, swap.before);
  if (!used) return forward(std::move(used.error()));
  const std::string late = *used == 0 ? "" : "; TOO LATE for " + std::to_string(*used) + " bytes that the former pool has in use: they stay there and are lent as copies";
  auto pool = make_pool(*driver, swap.device);
  if (!pool) return forward(std::move(pool.error()));
  swap.pool = *pool;
  if (auto set = GPULOAN_CU(*driver, cuDeviceSetMemPool, swap.device, swap.pool); !set) {
    driver->call.cuMemPoolDestroy(swap.pool);
    return set;
  }
  scope.keep();
  swaps().installed.merge(made);
  GPULOAN_LOG(GPULOAN_LOG_WARNING, "EXPERIMENTAL: the memory pool of " + device_text(ordinal) + " is gpuloan's now. What is allocated by cuMemAllocAsync from here on can be "
                                   "lent by the pool rung where that is allowed, and what was lent stays with the pool when it is freed" + late);
  return {};
}

Result<void> uninstall_pool(const std::shared_ptr<const driver::Driver>& driver, int ordinal) {
  GPULOAN_TRY(check_forked());
  const std::lock_guard lock(swaps().mutex);
  sweep_aside();
  const auto found = swaps().installed.find({driver.get(), ordinal});
  if (found == swaps().installed.end()) return fail(GPULOAN_ERR_STATE, "no pool of gpuloan's is installed on " + device_text(ordinal));
  const Swap swap = found->second;
  const PrimaryScope scope(*driver, swap.device);
  GPULOAN_TRY(scope.ok());
  cuda::Pool current = nullptr;
  GPULOAN_TRY(GPULOAN_CU(*driver, cuDeviceGetMemPool, &current, swap.device));
  auto used = used_bytes(*driver, swap.pool);
  if (!used) return forward(std::move(used.error()));
  if (*used > 0) {
    swaps().aside.reserve(swaps().aside.size() + 1);
    // This trims what is freed from now on, and strands nothing that would not be lost anyway: nothing more is allocated from
    // the pool, and memory of which a pointer was exported comes back with the pool alone, trimmed or not (P8).
    GPULOAN_TRY(set_threshold(*driver, swap.pool, 0));
  }
  if (current == swap.pool) GPULOAN_TRY(GPULOAN_CU(*driver, cuDeviceSetMemPool, swap.device, swap.before));
  swaps().installed.erase(found);
  if (*used > 0) {
    swaps().aside.push_back(swap);
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "EXPERIMENTAL: the pool that was installed on " + device_text(ordinal) + " has " + std::to_string(*used) +
                                     " bytes in use and is kept until they are freed");
    return {};
  }
  driver->call.cuMemPoolDestroy(swap.pool);
  driver->call.cuDevicePrimaryCtxRelease(swap.device); // that install kept; the scope has its own
  return {};
}

} // namespace gpuloan::memory
