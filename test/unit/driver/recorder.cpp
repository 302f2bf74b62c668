// SPDX-License-Identifier: MIT
//
// Every row of symbols.inc first gets a function that only writes its name down; those with outputs or effects are then
// replaced.
#include "recorder.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wunused-parameter"

using namespace gpuloan::cuda;

namespace recorder {
namespace {

State current;

CuResult step(const char* name) {
  current.calls.emplace_back(name);
  current.modes_seen.push_back(current.capture_mode);
  if (current.fail_at != 0 && --current.fail_at == 0) return current.fail_code;
  const auto found = current.fail.find(name);
  return found != current.fail.end() ? found->second : Success;
}

void born(const char* kind) { ++current.alive[kind]; }

CuResult gone(const char* name, const char* kind) {
  if (const CuResult code = step(name); code != Success) return code;
  const auto found = current.alive.find(kind);
  if (found == current.alive.end()) return InvalidValue; // released twice, or never made
  if (--found->second == 0) current.alive.erase(found);
  return Success;
}

template <typename T>
CuResult make(const char* name, const char* kind, T* out, T value) {
  if (const CuResult code = step(name); code != Success) return code;
  if (kind != nullptr) born(kind);
  *out = value;
  return Success;
}

template <typename T>
T token(std::uintptr_t number) {
  return reinterpret_cast<T>(number);
}

void add_device(gpuloan::driver::Table& table) {
  table.cuDriverGetVersion = [](int* out) { return make("cuDriverGetVersion", nullptr, out, 13000); };
  table.cuGetErrorName = [](CuResult, const char**) -> CuResult { return InvalidValue; };
  table.cuGetErrorString = [](CuResult, const char**) -> CuResult { return InvalidValue; };
  table.cuDeviceGetCount = [](int* out) { return make("cuDeviceGetCount", nullptr, out, current.device_count); };
  table.cuDeviceGet = [](Device* out, int ordinal) { return make("cuDeviceGet", nullptr, out, kDevice + ordinal); };
  table.cuDeviceGetName = [](char* out, int, Device) { return make("cuDeviceGetName", nullptr, out, 'R'); };
  table.cuDeviceGetUuid = [](Uuid* out, Device) { return make("cuDeviceGetUuid", nullptr, out, Uuid{{1, 2, 3}}); };
  table.cuDeviceTotalMem = [](std::size_t* out, Device) {
    return make("cuDeviceTotalMem", nullptr, out, std::size_t{1} << 30);
  };
  table.cuDeviceGetAttribute = [](int* out, int attribute, Device device) -> CuResult {
    if (const CuResult code = step("cuDeviceGetAttribute"); code != Success) return code;
    const auto found = current.attributes.find(attribute);
    if (found == current.attributes.end() || device != kDevice) return InvalidValue;
    *out = found->second;
    return Success;
  };
}

void add_contexts(gpuloan::driver::Table& table) {
  table.cuDevicePrimaryCtxRetain = [](Context* out, Device) {
    return make("cuDevicePrimaryCtxRetain", "primary", out, token<Context>(0x100));
  };
  table.cuDevicePrimaryCtxRelease = [](Device) { return gone("cuDevicePrimaryCtxRelease", "primary"); };
  table.cuCtxGetCurrent = [](Context* out) {
    return make("cuCtxGetCurrent", nullptr, out, current.contexts.empty() ? nullptr : current.contexts.back());
  };
  table.cuCtxGetDevice = [](Device* out) { return make("cuCtxGetDevice", nullptr, out, kDevice); };
  table.cuCtxPushCurrent = [](Context context) {
    const CuResult code = step("cuCtxPushCurrent");
    if (code == Success) current.contexts.push_back(context);
    return code;
  };
  table.cuCtxPopCurrent = [](Context* out) -> CuResult {
    if (const CuResult code = step("cuCtxPopCurrent"); code != Success) return code;
    if (current.contexts.empty()) return InvalidContext;
    *out = current.contexts.back();
    current.contexts.pop_back();
    return Success;
  };
  table.cuThreadExchangeStreamCaptureMode = [](int* mode) {
    const CuResult code = step("cuThreadExchangeStreamCaptureMode");
    if (code == Success) std::swap(*mode, current.capture_mode);
    return code;
  };
}

void add_streams(gpuloan::driver::Table& table) {
  table.cuStreamCreate = [](Stream* out, unsigned flags) {
    current.asked_flags = flags;
    return make("cuStreamCreate", "stream", out, token<Stream>(0x200));
  };
  table.cuStreamDestroy = [](Stream) { return gone("cuStreamDestroy", "stream"); };
  table.cuEventCreate = [](Event* out, unsigned flags) {
    current.asked_flags = flags;
    return make("cuEventCreate", "event", out, token<Event>(0x300));
  };
  table.cuEventDestroy = [](Event) { return gone("cuEventDestroy", "event"); };
  table.cuIpcOpenEventHandle = [](Event* out, IpcEventHandle handle) {
    if (handle.reserved[0] != 7) return static_cast<CuResult>(InvalidValue);
    return make("cuIpcOpenEventHandle", "event", out, token<Event>(0x301));
  };
  table.cuIpcGetEventHandle = [](IpcEventHandle* out, Event) {
    return make("cuIpcGetEventHandle", nullptr, out, IpcEventHandle{{7}});
  };
}

void add_memory(gpuloan::driver::Table& table) {
  table.cuMemGetInfo = [](std::size_t* out, std::size_t* total) {
    *total = 4096;
    return make("cuMemGetInfo", nullptr, out, std::size_t{1234});
  };
  table.cuMemGetAllocationGranularity = [](std::size_t* out, const AllocationProp*, int) {
    return make("cuMemGetAllocationGranularity", nullptr, out, kGranularity);
  };
  table.cuMemCreate = [](MemHandle* out, std::size_t bytes, const AllocationProp* prop, unsigned long long) {
    current.asked_bytes = bytes;
    current.asked_flags = static_cast<unsigned>(prop->requested_handle_types);
    current.asked_location = prop->location.id;
    return make("cuMemCreate", "handle", out, MemHandle{0}); // 0 is a handle like any other
  };
  table.cuMemImportFromShareableHandle = [](MemHandle* out, void* shareable, int) {
    current.asked_bytes = reinterpret_cast<std::size_t>(shareable);
    return make("cuMemImportFromShareableHandle", "handle", out, MemHandle{6});
  };
  table.cuMemExportToShareableHandle = [](void* out, MemHandle, int, unsigned long long) {
    const CuResult code = step("cuMemExportToShareableHandle");
    if (code != Success) return code;
    if (current.close_on_export) ::close(0);
    *static_cast<int*>(out) = ::memfd_create("export", 0);
    return code;
  };
  table.cuMemRelease = [](MemHandle) { return gone("cuMemRelease", "handle"); };
  table.cuMemAddressReserve = [](DevicePtr* out, std::size_t bytes, std::size_t, DevicePtr, unsigned long long) {
    current.asked_bytes = bytes;
    return make("cuMemAddressReserve", "range", out, DevicePtr{0x10000000});
  };
  table.cuMemAddressFree = [](DevicePtr, std::size_t) -> CuResult {
    const bool mapped = current.alive.contains("mapping");
    const CuResult code = gone("cuMemAddressFree", "range");
    return mapped ? InvalidValue : code;
  };
  table.cuMemMap = [](DevicePtr, std::size_t, std::size_t, MemHandle, unsigned long long) {
    const CuResult code = step("cuMemMap");
    if (code == Success) born("mapping");
    return code;
  };
  table.cuMemUnmap = [](DevicePtr, std::size_t) { return gone("cuMemUnmap", "mapping"); };
  table.cuMemSetAccess = [](DevicePtr, std::size_t, const AccessDesc* access, std::size_t) {
    current.asked_access = access->flags;
    current.asked_location = access->location.id;
    return step("cuMemSetAccess");
  };
  table.cuMemHostRegister = [](void*, std::size_t, unsigned flags) {
    current.asked_flags = flags;
    const CuResult code = step("cuMemHostRegister");
    if (code == Success) born("registration");
    return code;
  };
  table.cuMemHostUnregister = [](void*) { return gone("cuMemHostUnregister", "registration"); };
  table.cuMemHostGetDevicePointer = [](DevicePtr* out, void*, unsigned) {
    return make("cuMemHostGetDevicePointer", nullptr, out, DevicePtr{0x7000});
  };
}

void add_sharing(gpuloan::driver::Table& table) {
  table.cuIpcGetMemHandle = [](IpcMemHandle* out, DevicePtr) { return make("cuIpcGetMemHandle", nullptr, out, IpcMemHandle{{7}}); };
  table.cuIpcOpenMemHandle = [](DevicePtr* out, IpcMemHandle, unsigned) { return make("cuIpcOpenMemHandle", "opening", out, DevicePtr{0x8000}); };
  table.cuIpcCloseMemHandle = [](DevicePtr) { return gone("cuIpcCloseMemHandle", "opening"); };
  table.cuMemPoolExportToShareableHandle = [](void* out, Pool, int, unsigned long long) {
    const CuResult code = step("cuMemPoolExportToShareableHandle");
    if (code == Success) *static_cast<int*>(out) = ::memfd_create("pool", 0);
    return code;
  };
  table.cuMemPoolImportFromShareableHandle = [](Pool* out, void*, int, unsigned long long) {
    return make("cuMemPoolImportFromShareableHandle", "pool", out, token<Pool>(0x400));
  };
  table.cuMemPoolDestroy = [](Pool) { return gone("cuMemPoolDestroy", "pool"); };
  table.cuMemPoolImportPointer = [](DevicePtr* out, Pool, PoolPointer*) { return make("cuMemPoolImportPointer", "pointer", out, DevicePtr{0x9000}); };
  table.cuMemFree = [](DevicePtr) { return gone("cuMemFree", "pointer"); };
}

bool of_scope(const std::string& name) {
  return name == "cuCtxGetCurrent" || name == "cuCtxPushCurrent" || name == "cuCtxPopCurrent" ||
         name == "cuThreadExchangeStreamCaptureMode" || name == "cuDevicePrimaryCtxRetain";
}

} // namespace

State& state() { return current; }

std::string State::all() const {
  std::string text;
  for (const auto& name : calls) text += (text.empty() ? "" : " ") + name;
  return text;
}

std::string State::work() const {
  std::string text;
  for (const auto& name : calls) {
    if (!of_scope(name)) text += (text.empty() ? "" : " ") + name;
  }
  return text;
}

std::size_t State::count(const std::string& name) const {
  std::size_t sum = 0;
  for (const auto& call : calls) sum += call == name ? 1U : 0U;
  return sum;
}

gpuloan::driver::Table fresh_table() {
  current = State{};
  current.attributes = {{AttrIntegrated, 0}, {AttrComputeMode, 3},   {AttrUnifiedAddressing, 1},
                        {AttrHostRegister, 1}, {AttrHostPointerForRegistered, 1}, {AttrVmm, 1},
                        {AttrVmmPosixFd, 1}, {AttrMemOps64, 1},     {AttrIpcEvents, 1},
                        {AttrMemoryPools, 1}, {AttrPoolHandleTypes, HandlePosixFd}, {AttrMpsEnabled, 0}};
  gpuloan::driver::Table table;
#define GPULOAN_CUDA(need, since, group, name, exported, params)                                                       \
  table.name = [] params -> CuResult { return step(#name); };
#include <driver/symbols.inc>
#undef GPULOAN_CUDA
  add_device(table);
  add_contexts(table);
  add_streams(table);
  add_memory(table);
  add_sharing(table);
  return table;
}

} // namespace recorder
