// SPDX-License-Identifier: MIT
//
// A libcuda for the loader's tests that can do nothing but start, or fail to. Built several times:
//   (nothing)            exports every row of symbols.inc under its exported name
//   FAKE_OLD_NAMES       and, beside them, old functions under the bare names, which must not be picked
//   FAKE_BARE_NAMES      the bare names only, as a driver from before the _v2 functions
//   FAKE_BY_VERSION=1|2  exports nothing but cuGetProcAddress or cuGetProcAddress_v2
//   FAKE_<group>(...)=   without the rows of that group
//   FAKE_SIM             with the symbol by which the simulated driver is known
// At run time: FAKE_CODE is what every call returns, FAKE_INIT what cuInit does, FAKE_VERSION the driver's version,
// FAKE_LACKS a base name that cuGetProcAddress does not know.
// The rows are weak definitions; fake_libcuda_start.cpp has the few that do something.
#include <driver/types.hpp>

#include <cstdlib>
#include <cstring>

using namespace gpuloan::cuda;

#pragma GCC diagnostic ignored "-Wunused-parameter"

#ifdef FAKE_BY_VERSION
#define FAKE_EXPORT __attribute__((visibility("hidden")))
#else
#define FAKE_EXPORT __attribute__((visibility("default")))
#endif

int fake_setting(const char* name, int otherwise);

int fake_setting(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

#ifdef FAKE_BARE_NAMES
#define FAKE_ROW(name, exported, params) FAKE_DEFINE(name, params)
#else
#define FAKE_ROW(name, exported, params) FAKE_DEFINE(exported, params)
#endif
#define FAKE_DEFINE(symbol, params)                                                                                    \
  extern "C" FAKE_EXPORT CuResult symbol params;                                                                       \
  extern "C" __attribute__((weak)) CuResult symbol params { return fake_setting("FAKE_CODE", Success); }

#ifndef FAKE_Capture
#define FAKE_Capture FAKE_ROW
#endif
#ifndef FAKE_Vmm
#define FAKE_Vmm FAKE_ROW
#endif
#ifndef FAKE_MemOps
#define FAKE_MemOps FAKE_ROW
#endif
#ifndef FAKE_IpcEvents
#define FAKE_IpcEvents FAKE_ROW
#endif
#ifndef FAKE_HostRegister
#define FAKE_HostRegister FAKE_ROW
#endif
#ifndef FAKE_ForeignVmm
#define FAKE_ForeignVmm FAKE_ROW
#endif
#ifndef FAKE_IpcMemory
#define FAKE_IpcMemory FAKE_ROW
#endif
#ifndef FAKE_Pools
#define FAKE_Pools FAKE_ROW
#endif
#define FAKE_Core FAKE_ROW
#define FAKE_Copy FAKE_ROW
#define FAKE_Info FAKE_ROW

#define GPULOAN_CUDA(need, since, group, name, exported, params) FAKE_##group(name, exported, params)
#include <driver/symbols.inc>
#undef GPULOAN_CUDA

#ifdef FAKE_OLD_NAMES
// What tensorpipe#252 met: the functions are there, take 32-bit sizes, and fail.
extern "C" FAKE_EXPORT CuResult cuMemAlloc(unsigned* pointer, unsigned bytes);
extern "C" CuResult cuMemAlloc(unsigned*, unsigned) { return InvalidContext; }
extern "C" FAKE_EXPORT CuResult cuMemGetInfo(unsigned* free_bytes, unsigned* total);
extern "C" CuResult cuMemGetInfo(unsigned*, unsigned*) { return InvalidContext; }
extern "C" FAKE_EXPORT CuResult cuMemGetAddressRange(unsigned* base, unsigned* bytes, unsigned pointer);
extern "C" CuResult cuMemGetAddressRange(unsigned*, unsigned*, unsigned) { return InvalidContext; }
#endif

#ifdef FAKE_SIM
extern "C" __attribute__((visibility("default"))) void gpuloan_sim_stream_delay();
extern "C" void gpuloan_sim_stream_delay() {}
#endif

#ifdef FAKE_BY_VERSION
namespace {

struct Known {
  const char* name;
  int since;
  void* function;
};

const Known kKnown[] = {
#define GPULOAN_CUDA(need, since, group, name, exported, params) {#name, since, reinterpret_cast<void*>(&exported)},
#include <driver/symbols.inc>
#undef GPULOAN_CUDA
};

// Like the driver: a base name at the exact version of its ABI.
void* find(const char* name, int version) {
  const char* lacking = std::getenv("FAKE_LACKS");
  if (lacking != nullptr && std::strcmp(lacking, name) == 0) return nullptr;
  for (const Known& row : kKnown) {
    if (std::strcmp(row.name, name) == 0 && version == row.since) return row.function;
  }
  return nullptr;
}

} // namespace

#if FAKE_BY_VERSION == 1
extern "C" __attribute__((visibility("default"))) CuResult cuGetProcAddress(const char* name, void** function,
                                                                            int version, std::uint64_t flags);
extern "C" CuResult cuGetProcAddress(const char* name, void** function, int version, std::uint64_t) {
  *function = find(name, version);
  return *function != nullptr ? Success : NotFound;
}
#else
extern "C" __attribute__((visibility("default"))) CuResult cuGetProcAddress_v2(const char* name, void** function,
                                                                               int version, std::uint64_t flags,
                                                                               int* status);
extern "C" CuResult cuGetProcAddress_v2(const char* name, void** function, int version, std::uint64_t, int* status) {
  *function = find(name, version);
  *status = *function != nullptr ? 0 : 1; // a name that is not known is no error here, it gives a null function
  return Success;
}
#endif
#endif
