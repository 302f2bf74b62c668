// SPDX-License-Identifier: MIT
//
// The few driver calls with which the command moves bytes between files and device memory. They are taken from the very
// library that gpuloan opened, so that both work in one driver; no CUDA header or library is needed to build.
//
// A Cuda holds the device's primary context and keeps it current on the thread that made it: one thread, one Cuda.
#pragma once

#include <gpuloan/gpuloan.h>

#include <driver/types.hpp>

namespace gpuloan::tool {

// name in the library, member, parameters
#define GPULOAN_TOOL_CALLS(X)                                                                                          \
  X(cuGetErrorName, error_name, (cuda::CuResult, const char**))                                                        \
  X(cuDeviceGet, device_get, (cuda::Device*, int))                                                                     \
  X(cuDevicePrimaryCtxRetain, primary_retain, (cuda::Context*, cuda::Device))                                          \
  X(cuDevicePrimaryCtxRelease_v2, primary_release, (cuda::Device))                                                     \
  X(cuCtxPushCurrent_v2, push_current, (cuda::Context))                                                                \
  X(cuCtxPopCurrent_v2, pop_current, (cuda::Context*))                                                                 \
  X(cuStreamCreate, stream_create, (cuda::Stream*, unsigned))                                                          \
  X(cuStreamDestroy_v2, stream_destroy, (cuda::Stream))                                                                \
  X(cuStreamSynchronize, stream_synchronize, (cuda::Stream))                                                           \
  X(cuMemcpyHtoDAsync_v2, copy_in, (cuda::DevicePtr, const void*, std::size_t, cuda::Stream))                          \
  X(cuMemcpyDtoHAsync_v2, copy_out, (void*, cuda::DevicePtr, std::size_t, cuda::Stream))                               \
  X(cuMemcpyDtoDAsync_v2, copy_on, (cuda::DevicePtr, cuda::DevicePtr, std::size_t, cuda::Stream))                      \
  X(cuMemsetD8Async, fill8, (cuda::DevicePtr, unsigned char, std::size_t, cuda::Stream))                               \
  X(cuMemsetD32Async, fill32, (cuda::DevicePtr, unsigned, std::size_t, cuda::Stream))

class Cuda {
 public:
  // `info` as gpuloan_driver_probe gave it. Throws Failure.
  Cuda(const gpuloan_driver_info& info, int ordinal);
  ~Cuda();
  Cuda(const Cuda&) = delete;
  Cuda& operator=(const Cuda&) = delete;

  [[nodiscard]] cuda::Stream stream() const noexcept { return stream_; }

  // All are ordered on stream(). Each throws Failure that names the call.
  void copy_in(std::uint64_t to, const void* from, std::size_t bytes);
  void copy_out(void* to, std::uint64_t from, std::size_t bytes);
  void copy_on(std::uint64_t to, std::uint64_t from, std::size_t bytes);
  void fill8(std::uint64_t to, unsigned char value, std::size_t bytes);
  void fill32(std::uint64_t to, std::uint32_t value, std::size_t words);
  void synchronize();

  // Another function of the same library. Throws Failure where it has none of that name.
  template <typename Function>
  void find(const char* name, Function& out) const {
    out = reinterpret_cast<Function>(address(name));
  }
  // Throws Failure that names the call.
  void check(const char* call, cuda::CuResult code) const;

 private:
  void resolve(const char* path);
  [[nodiscard]] void* address(const char* name) const;

  struct Calls {
#define GPULOAN_TOOL_MEMBER(symbol, member, parameters) cuda::CuResult(*member) parameters = nullptr;
    GPULOAN_TOOL_CALLS(GPULOAN_TOOL_MEMBER)
#undef GPULOAN_TOOL_MEMBER
  };
  Calls call_;
  void* library_ = nullptr;
  cuda::Device device_ = 0;
  cuda::Stream stream_ = nullptr;
};

} // namespace gpuloan::tool
