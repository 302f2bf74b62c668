// SPDX-License-Identifier: MIT
//
// A driver that refuses to register more than GPULOAN_TEST_PIN_KIB (default 2048) of host memory at once, and is otherwise the
// libcuda.so.1 that it needs: so the host rung runs without pinned memory on a real GPU too. What is not exported here is found in
// that library, on which this one depends.
#include <driver/types.hpp>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

using gpuloan::cuda::CuResult;

namespace {

template <typename Function>
Function* real(const char* name) {
  static void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return library != nullptr ? reinterpret_cast<Function*>(::dlsym(library, name)) : nullptr;
}

std::size_t limit() {
  const char* text = std::getenv("GPULOAN_TEST_PIN_KIB");
  return (text != nullptr ? std::strtoull(text, nullptr, 10) : 2048) << 10;
}

} // namespace

#define EXPORTED extern "C" __attribute__((visibility("default"))) CuResult

EXPORTED cuMemHostRegister_v2(void* pointer, std::size_t bytes, unsigned flags) {
  if (bytes > limit()) return gpuloan::cuda::OutOfMemory;
  auto* const next = real<CuResult(void*, std::size_t, unsigned)>("cuMemHostRegister_v2");
  return next != nullptr ? next(pointer, bytes, flags) : static_cast<CuResult>(gpuloan::cuda::NotFound);
}

EXPORTED cuGetProcAddress_v2(const char* name, void** function, int version, std::uint64_t flags, int* found) {
  auto* const next = real<CuResult(const char*, void**, int, std::uint64_t, int*)>("cuGetProcAddress_v2");
  const CuResult result = next != nullptr ? next(name, function, version, flags, found) : static_cast<CuResult>(gpuloan::cuda::NotFound);
  if (result == gpuloan::cuda::Success && std::strcmp(name, "cuMemHostRegister") == 0) *function = reinterpret_cast<void*>(&cuMemHostRegister_v2);
  return result;
}
