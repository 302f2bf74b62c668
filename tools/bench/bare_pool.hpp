// SPDX-License-Identifier: MIT
//
// The floor of the pool rung: one allocation of a pool that can be shared. Its export data are made once and kept; a turn imports the
// pointer, works, synchronises and frees it again.
#pragma once

#include "../cuda.hpp"
#include "../files.hpp"
#include "pair.hpp"

namespace gpuloan::tool::bench {

#define GPULOAN_BENCH_POOL_CALLS(X)                                                                       \
  X(cuMemPoolCreate, create, (cuda::Pool*, const cuda::PoolProps*))                                       \
  X(cuMemPoolDestroy, destroy, (cuda::Pool))                                                              \
  X(cuMemPoolSetAccess, set_access, (cuda::Pool, const cuda::AccessDesc*, std::size_t))                   \
  X(cuMemPoolExportToShareableHandle, export_pool, (void*, cuda::Pool, int, unsigned long long))          \
  X(cuMemPoolImportFromShareableHandle, import_pool, (cuda::Pool*, void*, int, unsigned long long))       \
  X(cuMemPoolExportPointer, export_pointer, (cuda::PoolPointer*, cuda::DevicePtr))                        \
  X(cuMemPoolImportPointer, import_pointer, (cuda::DevicePtr*, cuda::Pool, cuda::PoolPointer*))           \
  X(cuMemAllocFromPoolAsync, allocate, (cuda::DevicePtr*, std::size_t, cuda::Pool, cuda::Stream))         \
  X(cuMemFree_v2, free, (cuda::DevicePtr))

struct BarePoolCalls {
  explicit BarePoolCalls(const Cuda& cuda);
#define GPULOAN_BENCH_MEMBER(symbol, member, parameters) cuda::CuResult(*member) parameters = nullptr;
  GPULOAN_BENCH_POOL_CALLS(GPULOAN_BENCH_MEMBER)
#undef GPULOAN_BENCH_MEMBER
};

class BarePool {
 public:
  BarePool(Cuda& cuda, int device, std::uint64_t bytes);
  ~BarePool() { end(); }
  BarePool(const BarePool&) = delete;
  BarePool& operator=(const BarePool&) = delete;
  [[nodiscard]] cuda::DevicePtr pointer() const noexcept { return pointer_; }
  void share(Channel& channel) const; // sends it as Op::Pool

 private:
  void end() noexcept;
  Cuda& cuda_;
  BarePoolCalls calls_;
  std::uint64_t bytes_;
  cuda::Pool pool_ = nullptr;
  cuda::DevicePtr pointer_ = 0;
};

class BarePoolImport {
 public:
  // `message` and `fd` (borrowed) as share() sent them.
  BarePoolImport(const Cuda& cuda, int device, const Message& message, const Fd& fd);
  ~BarePoolImport();
  BarePoolImport(const BarePoolImport&) = delete;
  BarePoolImport& operator=(const BarePoolImport&) = delete;
  [[nodiscard]] cuda::DevicePtr open();
  void close(cuda::DevicePtr pointer); // no work uses it any more

 private:
  const Cuda& cuda_;
  BarePoolCalls calls_;
  cuda::Pool pool_ = nullptr;
  cuda::PoolPointer shared_ = {};
};

} // namespace gpuloan::tool::bench
