// SPDX-License-Identifier: MIT
#include "canary_memory.hpp"

#include "exit_codes.hpp"

#include <algorithm>
#include <dlfcn.h>

namespace gpuloan::tool {
namespace {

// A function of the driver that the command only needs here, and that older drivers may lack.
template <typename... Parameters>
struct Call {
  Call(const char* path, const char* symbol) : name(symbol) {
    void* library = ::dlopen(path, RTLD_NOW); // gpuloan holds it open anyway
    function = library == nullptr ? nullptr : reinterpret_cast<Function>(::dlsym(library, symbol));
    if (function == nullptr) throw Failure(ExitNoDriver, std::string(path) + " lacks " + symbol);
  }
  void operator()(Parameters... parameters) const {
    const cuda::CuResult code = function(parameters...);
    if (code == cuda::Success) return;
    throw Failure(code == cuda::OutOfMemory ? ExitDeviceMemory : ExitNoDriver,
                  std::string(name) + ": CUresult " + std::to_string(code));
  }
  using Function = cuda::CuResult (*)(Parameters...);
  const char* name;
  Function function = nullptr;
};

using cuda::DevicePtr;
using cuda::MemHandle;
using Size = std::size_t;

} // namespace

CanaryMemory::CanaryMemory(Cuda& cuda, const gpuloan_driver_info& driver, int ordinal, Kind kind, std::uint64_t bytes,
                           std::uint64_t granularity)
    : cuda_(cuda) {
  try {
    switch (kind) {
      case Kind::TwoChunks: make_two_chunks(driver.path, ordinal, bytes, granularity); break;
      case Kind::Pool: make_pool(driver.path, ordinal, bytes); break;
      case Kind::Alloc: make_alloc(driver.path, bytes); break;
    }
  } catch (...) {
    while (!undo_.empty()) undo_.back()(), undo_.pop_back();
    throw;
  }
}

CanaryMemory::~CanaryMemory() {
  while (!undo_.empty()) undo_.back()(), undo_.pop_back();
}

void CanaryMemory::make_two_chunks(const char* path, int ordinal, std::uint64_t bytes, std::uint64_t granularity) {
  const Call<MemHandle*, Size, const cuda::AllocationProp*, unsigned long long> create(path, "cuMemCreate");
  const Call<MemHandle> release(path, "cuMemRelease");
  const Call<DevicePtr*, Size, Size, DevicePtr, unsigned long long> reserve(path, "cuMemAddressReserve");
  const Call<DevicePtr, Size> free_addresses(path, "cuMemAddressFree"), unmap(path, "cuMemUnmap");
  const Call<DevicePtr, Size, Size, MemHandle, unsigned long long> map(path, "cuMemMap");
  const Call<DevicePtr, Size, const cuda::AccessDesc*, Size> set_access(path, "cuMemSetAccess");
  const std::uint64_t unit = std::max(granularity, kSeam);
  if (bytes > kSeam + unit) throw Failure(ExitInternal, "the block does not fit into two chunks");
  cuda::AllocationProp prop = {};
  prop.type = cuda::AllocationPinned;
  prop.requested_handle_types = cuda::HandlePosixFd;
  prop.location = {cuda::LocationDevice, ordinal};
  DevicePtr base = 0;
  reserve(&base, 2 * unit, 0, 0, 0);
  undo_.emplace_back([=] { static_cast<void>(free_addresses.function(base, 2 * unit)); });
  for (const DevicePtr at : {base, base + unit}) {
    MemHandle handle = 0;
    create(&handle, unit, &prop, 0);
    undo_.emplace_back([=] { static_cast<void>(release.function(handle)); });
    map(at, unit, 0, handle, 0);
    undo_.emplace_back([=] { static_cast<void>(unmap.function(at, unit)); });
    const cuda::AccessDesc access = {{cuda::LocationDevice, ordinal}, cuda::AccessReadWrite};
    set_access(at, unit, &access, 1);
  }
  pointer_ = base + unit - kSeam;
}

void CanaryMemory::make_pool(const char* path, int ordinal, std::uint64_t bytes) {
  const Call<cuda::Pool*, const cuda::PoolProps*> create(path, "cuMemPoolCreate");
  const Call<cuda::Pool> destroy(path, "cuMemPoolDestroy");
  const Call<DevicePtr*, Size, cuda::Pool, cuda::Stream> allocate(path, "cuMemAllocFromPoolAsync");
  const Call<DevicePtr> free_memory(path, "cuMemFree_v2");
  cuda::PoolProps props = {};
  props.type = cuda::AllocationPinned;
  props.handle_types = cuda::HandlePosixFd;
  props.location = {cuda::LocationDevice, ordinal};
  cuda::Pool pool = nullptr;
  create(&pool, &props);
  undo_.emplace_back([=] { static_cast<void>(destroy.function(pool)); });
  DevicePtr made = 0;
  allocate(&made, bytes, pool, cuda_.stream());
  undo_.emplace_back([=] { static_cast<void>(free_memory.function(made)); });
  pointer_ = made;
}

void CanaryMemory::make_alloc(const char* path, std::uint64_t bytes) {
  const Call<DevicePtr*, Size> allocate(path, "cuMemAlloc_v2");
  const Call<DevicePtr> free_memory(path, "cuMemFree_v2");
  DevicePtr made = 0;
  allocate(&made, bytes);
  undo_.emplace_back([=] { static_cast<void>(free_memory.function(made)); });
  pointer_ = made;
}

} // namespace gpuloan::tool
