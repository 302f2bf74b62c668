// SPDX-License-Identifier: MIT
#include "cuda.hpp"

#include "exit_codes.hpp"

#include <dlfcn.h>

namespace gpuloan::tool {

void Cuda::resolve(const char* path) {
  // gpuloan holds the library open for the life of the process, so this handle is never closed either.
  library_ = ::dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (library_ == nullptr) library_ = ::dlopen(path, RTLD_NOW);
  if (library_ == nullptr)
    throw Failure(ExitNoDriver, std::string("cannot open the driver library again: ") + ::dlerror());
#define GPULOAN_TOOL_RESOLVE(symbol, member, parameters) find(#symbol, call_.member);
  GPULOAN_TOOL_CALLS(GPULOAN_TOOL_RESOLVE)
#undef GPULOAN_TOOL_RESOLVE
}

void* Cuda::address(const char* name) const {
  void* const found = ::dlsym(library_, name);
  if (found == nullptr) throw Failure(ExitNoDriver, std::string("the driver library lacks ") + name);
  return found;
}

void Cuda::check(const char* call, cuda::CuResult code) const {
  if (code == cuda::Success) return;
  const char* name = nullptr;
  static_cast<void>(call_.error_name(code, &name));
  const char* const remedy = code != cuda::DeviceUnavailable ? "" : "; the device's compute mode is exclusive and another process has it, or prohibited: "
                                                                    "nvidia-smi -c DEFAULT lets all use it, and in exclusive mode MPS does";
  throw Failure(code == cuda::OutOfMemory ? ExitDeviceMemory : ExitNoDriver,
                std::string(call) + ": " + (name != nullptr ? name : "unknown CUresult") + " (" + std::to_string(code) + ")" + remedy);
}

Cuda::Cuda(const gpuloan_driver_info& info, int ordinal) {
  resolve(info.path);
  cuda::Context context = nullptr;
  check("cuDeviceGet", call_.device_get(&device_, ordinal));
  check("cuDevicePrimaryCtxRetain", call_.primary_retain(&context, device_));
  check("cuCtxPushCurrent", call_.push_current(context));
  check("cuStreamCreate", call_.stream_create(&stream_, cuda::StreamNonBlocking));
}

Cuda::~Cuda() {
  cuda::Context context = nullptr;
  static_cast<void>(call_.stream_destroy(stream_));
  static_cast<void>(call_.pop_current(&context));
  static_cast<void>(call_.primary_release(device_));
}

void Cuda::copy_in(std::uint64_t to, const void* from, std::size_t bytes) {
  if (bytes > 0) check("cuMemcpyHtoDAsync", call_.copy_in(to, from, bytes, stream_));
}

void Cuda::copy_out(void* to, std::uint64_t from, std::size_t bytes) {
  if (bytes > 0) check("cuMemcpyDtoHAsync", call_.copy_out(to, from, bytes, stream_));
}

void Cuda::copy_on(std::uint64_t to, std::uint64_t from, std::size_t bytes) {
  if (bytes > 0) check("cuMemcpyDtoDAsync", call_.copy_on(to, from, bytes, stream_));
}

void Cuda::fill8(std::uint64_t to, unsigned char value, std::size_t bytes) {
  if (bytes > 0) check("cuMemsetD8Async", call_.fill8(to, value, bytes, stream_));
}

void Cuda::fill32(std::uint64_t to, std::uint32_t value, std::size_t words) {
  if (words > 0) check("cuMemsetD32Async", call_.fill32(to, value, words, stream_));
}

void Cuda::synchronize() { check("cuStreamSynchronize", call_.stream_synchronize(stream_)); }

} // namespace gpuloan::tool
