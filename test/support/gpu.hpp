// SPDX-License-Identifier: MIT
//
// The driver as a caller of gpuloan would use it: streams, copies, patterns. It is the library that gpuloan opened
// (gpuloan_driver_probe says which), the simulated one or the real one; only the hooks of the simulated driver differ.
//
// A Gpu belongs to one thread. The primary context of its device is current in it while the object lives.
#pragma once

#include <driver/types.hpp>
#include <gpuloan/gpuloan.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace loan_test {

inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kNoise = 32 * kMiB; // what a real driver may keep for itself, and what others give back meanwhile

namespace cuda = gpuloan::cuda;
using cuda::CuResult;

struct CudaTable {
  CuResult (*cuInit)(unsigned flags);
  CuResult (*cuDevicePrimaryCtxRetain)(cuda::Context* context, cuda::Device device);
  CuResult (*cuDevicePrimaryCtxRelease)(cuda::Device device);
  CuResult (*cuCtxPushCurrent)(cuda::Context context);
  CuResult (*cuCtxPopCurrent)(cuda::Context* context);
  CuResult (*cuPointerGetAttributes)(unsigned count, const int* attributes, void** data, cuda::DevicePtr pointer);
  CuResult (*cuStreamCreate)(cuda::Stream* stream, unsigned flags);
  CuResult (*cuStreamDestroy)(cuda::Stream stream);
  CuResult (*cuStreamQuery)(cuda::Stream stream);
  CuResult (*cuStreamSynchronize)(cuda::Stream stream);
  CuResult (*cuStreamWaitValue64)(cuda::Stream stream, cuda::DevicePtr address, std::uint64_t value, unsigned flags);
  CuResult (*cuMemAlloc)(cuda::DevicePtr* pointer, std::size_t bytes);
  CuResult (*cuMemFree)(cuda::DevicePtr pointer);
  CuResult (*cuMemPoolCreate)(cuda::Pool* pool, const cuda::PoolProps* props);
  CuResult (*cuMemPoolDestroy)(cuda::Pool pool);
  CuResult (*cuMemPoolExportToShareableHandle)(void* shareable, cuda::Pool pool, int type, unsigned long long flags);
  CuResult (*cuMemAllocFromPoolAsync)(cuda::DevicePtr* pointer, std::size_t bytes, cuda::Pool pool, cuda::Stream stream);
  CuResult (*cuMemAllocHost)(void** pointer, std::size_t bytes);
  CuResult (*cuMemFreeHost)(void* pointer);
  CuResult (*cuMemGetInfo)(std::size_t* free_bytes, std::size_t* total);
  CuResult (*cuMemcpyHtoDAsync)(cuda::DevicePtr to, const void* from, std::size_t bytes, cuda::Stream stream);
  CuResult (*cuMemcpyDtoHAsync)(void* to, cuda::DevicePtr from, std::size_t bytes, cuda::Stream stream);
  CuResult (*cuMemsetD8Async)(cuda::DevicePtr to, unsigned char value, std::size_t bytes, cuda::Stream stream);
  // The simulated driver's; null on the real one.
  CuResult (*sim_hold)(void* stream);
  CuResult (*sim_release)(void* stream);
  CuResult (*sim_context_fail)(int result);
  CuResult (*sim_delay)(void* stream, unsigned microseconds);
  std::int64_t (*sim_live)(const char* what);
  std::int64_t (*sim_calls)(const char* function);
  void (*sim_pin_limit)(std::uint64_t bytes);
};

// What the simulated driver `driver` of this process says that it holds of something; makes no CUDA context.
[[nodiscard]] std::int64_t sim_live(const char* driver, const char* what);

class Gpu {
 public:
  explicit Gpu(const char* driver, int ordinal = 0);
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu();

  [[nodiscard]] bool simulated() const noexcept { return call.sim_hold != nullptr; }
  [[nodiscard]] const gpuloan_driver_info& info() const noexcept { return info_; }
  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
  [[nodiscard]] cuda::Context context() const noexcept { return context_; }
  // The device on which memory lies, by its number in this process.
  [[nodiscard]] int device_of(std::uint64_t pointer) const;
  // A non-blocking stream, made at its first use. Each has its own queue; tests number them.
  [[nodiscard]] cuda::Stream stream(unsigned index = 0);
  [[nodiscard]] bool idle(unsigned index);
  void sync(unsigned index = 0);

  // Lets the driver load what it loads at first use, so that it does not look like a leak.
  void warm_up();

  // What is enqueued from now on does not begin before release().
  void hold(unsigned index);
  void release(unsigned index) noexcept;
  void release_all() noexcept;
  // The stream works for some milliseconds first.
  void delay(unsigned index);

  // Enqueues the copy of a pattern to device memory. Returns at once.
  void upload(std::uint64_t pointer, std::uint64_t bytes, std::uint64_t seed, unsigned index = 0);
  // Copies back behind what is in the stream, waits, and says what is wrong; "" for nothing.
  [[nodiscard]] std::string mismatch(std::uint64_t pointer, std::uint64_t bytes, std::uint64_t seed, unsigned index = 0);
  [[nodiscard]] std::uint64_t alloc(std::uint64_t bytes);
  void alloc_from_pool(); // from now on alloc() takes memory of a shareable pool
  void settle_pool();     // lets the pool, if there is one, give back what is free
  void free(std::uint64_t pointer);

  [[nodiscard]] std::uint64_t used_bytes() const; // of the device, by all processes
  // What this process holds of the driver, beyond what this object itself does: "events 2, mappings 1"; simulated only.
  [[nodiscard]] std::map<std::string, std::int64_t> live() const;

  CudaTable call = {};

 private:
  struct Pinned {
    unsigned char* data;
    std::size_t bytes;
  };
  struct StreamSlot {
    cuda::Stream handle = nullptr;
    std::vector<Pinned> in_use; // until the next sync
    std::uint64_t waits = 0;    // of hold() on the real driver
    bool held = false;
  };
  void resolve(const char* driver);
  [[nodiscard]] StreamSlot& slot(unsigned index);
  [[nodiscard]] Pinned pinned(std::uint64_t bytes);
  void check(CuResult result, const char* what) const;

  gpuloan_driver_info info_ = {};
  const int ordinal_;
  cuda::Context context_ = nullptr;
  std::map<unsigned, StreamSlot> streams_;
  std::vector<Pinned> free_;
  std::int64_t pinned_ = 0;
  volatile std::uint64_t* hold_words_ = nullptr; // pinned; this and the next: real driver only
  cuda::DevicePtr scratch_ = 0;
  cuda::Pool pool_ = nullptr;
};

// "GPU-67...", of a device of this process; by hexadecimal digits, also of a slice.
[[nodiscard]] std::string uuid_of(const char* driver, int ordinal);

// The thread has another current context alone, or none (null), while the object lives. The destructor fails when somebody
// left another one behind.
class OtherContext {
 public:
  OtherContext(Gpu& gpu, cuda::Context other);
  OtherContext(const OtherContext&) = delete;
  OtherContext& operator=(const OtherContext&) = delete;
  ~OtherContext() noexcept(false);

 private:
  Gpu& gpu_;
  const cuda::Context other_;
  std::vector<cuda::Context> put_aside_; // the thread's, the current one first
};

} // namespace loan_test
