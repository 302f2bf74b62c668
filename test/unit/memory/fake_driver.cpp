// SPDX-License-Identifier: MIT
//
// The functions of the fake. Physical memory has a count of its handle and its mappings and is given back with the last.
#include "fake_driver.hpp"

#include <cstring>
#include <filesystem>
#include <sys/mman.h>
#include <utility>

namespace fake {
namespace {

State* current = new State;

using Lock = std::lock_guard<std::recursive_mutex>;

// Counts one call. Not Success when it is the one that has to fail.
CuResult enter(const char* function) {
  State& now = state();
  ++now.calls[function];
  ++now.total_calls;
  if (now.fail_at == 0 || --now.fail_at != 0) return Success;
  now.failed = function;
  return now.fail_code;
}

void leave(const char* function) {
  State& now = state();
  ++now.calls[function];
  ++now.total_calls;
}

#define FAKE_ENTER(function)                                                                                           \
  const Lock lock(state().mutex);                                                                                      \
  if (const CuResult code_ = enter(#function); code_ != Success) return code_

FakeStream& stream_of(Stream handle) {
  return handle == gpuloan::cuda::legacy_stream() ? state().legacy : *reinterpret_cast<FakeStream*>(handle);
}
FakeEvent& event_of(Event handle) { return *reinterpret_cast<FakeEvent*>(handle); }

void unref(MemHandle handle) {
  State& now = state();
  if (--now.references.at(handle) != 0) return;
  now.references.erase(handle);
  now.used -= now.handles.at(handle);
  now.handles.erase(handle);
}

// ---- Device --------------------------------------------------------------------------------------------------------

CuResult get_count(int* count) { return *count = 1, Success; }
CuResult get_device(Device* device, int ordinal) { return *device = ordinal, Success; }
CuResult get_version(int* version) { return *version = 13000, Success; }
CuResult get_uuid(Uuid* uuid, Device) { return *uuid = {}, Success; }
CuResult get_total(std::size_t* bytes, Device) { return *bytes = state().total, Success; }
CuResult get_name(char* name, int length, Device) {
  std::strncpy(name, "fake", static_cast<std::size_t>(length));
  return Success;
}
CuResult get_attribute(int* value, int attribute, Device) {
  *value = attribute == AttrVmm ? state().vmm : attribute == AttrHostRegister ? state().host_register : 1;
  if (attribute == AttrHostPointerForRegistered) *value = state().host_register;
  return Success;
}
CuResult get_granularity(std::size_t* bytes, const AllocationProp*, int) { return *bytes = state().granularity, Success; }
CuResult error_name(CuResult, const char**) { return InvalidValue; }

// ---- Context -------------------------------------------------------------------------------------------------------

thread_local Context thread_context = nullptr;

Context the_context() { return reinterpret_cast<Context>(std::uintptr_t{0x40}); }

CuResult retain(Context* context, Device) {
  FAKE_ENTER(cuDevicePrimaryCtxRetain);
  *context = the_context();
  return Success;
}
CuResult release(Device) { return Success; }
CuResult get_current(Context* context) { return *context = thread_context, Success; }
CuResult push(Context context) { return thread_context = context, Success; }
CuResult pop(Context* context) { return *context = std::exchange(thread_context, nullptr), Success; }
CuResult synchronize() {
  FAKE_ENTER(cuCtxSynchronize);
  return Success;
}
CuResult exchange_mode(int*) { return Success; }
CuResult get_info(std::size_t* free_bytes, std::size_t* total) {
  FAKE_ENTER(cuMemGetInfo);
  *free_bytes = state().total - state().used;
  *total = state().total;
  return Success;
}

// ---- Memory --------------------------------------------------------------------------------------------------------

CuResult create(MemHandle* handle, std::size_t bytes, const AllocationProp*, unsigned long long) {
  FAKE_ENTER(cuMemCreate);
  State& now = state();
  if (bytes % now.granularity != 0) return InvalidValue;
  if (bytes > now.total - now.used) return OutOfMemory;
  *handle = now.next++;
  now.handles[*handle] = bytes;
  now.references[*handle] = 1;
  now.used += bytes;
  return Success;
}
CuResult release_memory(MemHandle handle) {
  const Lock lock(state().mutex);
  leave("cuMemRelease");
  return unref(handle), Success;
}
CuResult reserve(DevicePtr* pointer, std::size_t bytes, std::size_t, DevicePtr, unsigned long long) {
  FAKE_ENTER(cuMemAddressReserve);
  State& now = state();
  *pointer = (DevicePtr{1} << 56) + (now.next++ << 40);
  now.reserved[*pointer] = bytes;
  return Success;
}
CuResult free_address(DevicePtr pointer, std::size_t) {
  const Lock lock(state().mutex);
  leave("cuMemAddressFree");
  if (state().mapped.contains(pointer)) return InvalidValue;
  return state().reserved.erase(pointer) == 1 ? Success : InvalidValue;
}
CuResult map(DevicePtr pointer, std::size_t, std::size_t, MemHandle handle, unsigned long long) {
  FAKE_ENTER(cuMemMap);
  ++state().references.at(handle);
  state().mapped[pointer] = handle;
  return Success;
}
CuResult unmap(DevicePtr pointer, std::size_t) {
  const Lock lock(state().mutex);
  leave("cuMemUnmap");
  unref(state().mapped.at(pointer));
  state().mapped.erase(pointer);
  return Success;
}
CuResult set_access(DevicePtr, std::size_t, const AccessDesc*, std::size_t) {
  FAKE_ENTER(cuMemSetAccess);
  return Success;
}
CuResult export_fd(void* shareable, MemHandle, int, unsigned long long) {
  FAKE_ENTER(cuMemExportToShareableHandle);
  *static_cast<int*>(shareable) = ::memfd_create("fake-chunk", 0);
  return Success;
}
CuResult register_host(void* pointer, std::size_t, unsigned) {
  FAKE_ENTER(cuMemHostRegister);
  return state().registered.insert(pointer).second ? Success : HostMemoryAlreadyRegistered;
}
CuResult unregister_host(void* pointer) {
  const Lock lock(state().mutex);
  leave("cuMemHostUnregister");
  return state().registered.erase(pointer) == 1 ? Success : HostMemoryNotRegistered;
}
CuResult host_pointer(DevicePtr* device, void* host, unsigned) {
  FAKE_ENTER(cuMemHostGetDevicePointer);
  *device = reinterpret_cast<std::uintptr_t>(host) + (DevicePtr{1} << 60); // not the host's, to tell the two apart
  return Success;
}

// ---- Streams and events --------------------------------------------------------------------------------------------

CuResult is_capturing(Stream handle, int* status) {
  FAKE_ENTER(cuStreamIsCapturing);
  FakeStream& stream = stream_of(handle);
  if (!stream.valid) return InvalidHandle;
  // The legacy stream's answer while a blocking stream is in capture.
  if (&stream == &state().legacy && stream.capture != CaptureNone) return StreamCaptureImplicit;
  return *status = stream.capture, Success;
}
CuResult query_stream(Stream handle) {
  FAKE_ENTER(cuStreamQuery);
  FakeStream& stream = stream_of(handle);
  if (!stream.valid) return InvalidHandle;
  if (stream.capture != CaptureNone) return ++stream.touched_in_capture, StreamCaptureInvalidated;
  return stream.done == stream.queued ? Success : NotReady;
}
CuResult create_event(Event* event, unsigned) {
  FAKE_ENTER(cuEventCreate);
  auto* made = new FakeEvent;
  state().events.insert(made);
  *event = reinterpret_cast<Event>(made);
  return Success;
}
CuResult destroy_event(Event event) {
  const Lock lock(state().mutex);
  leave("cuEventDestroy");
  state().events.erase(&event_of(event));
  delete &event_of(event);
  return Success;
}
CuResult record(Event event, Stream handle) {
  FAKE_ENTER(cuEventRecord);
  FakeStream& stream = stream_of(handle);
  if (!stream.valid) return InvalidHandle;
  if (stream.capture != CaptureNone) return ++stream.touched_in_capture, StreamCaptureInvalidated;
  event_of(event) = {&stream, stream.queued};
  return Success;
}
CuResult query_event(Event event) {
  FAKE_ENTER(cuEventQuery);
  const FakeEvent& known = event_of(event);
  return known.stream == nullptr || known.stream->done >= known.behind ? Success : NotReady;
}

gpuloan::driver::Table table() {
  gpuloan::driver::Table made;
  made.cuDriverGetVersion = get_version;
  made.cuGetErrorName = error_name;
  made.cuGetErrorString = error_name;
  made.cuDeviceGetCount = get_count;
  made.cuDeviceGet = get_device;
  made.cuDeviceGetName = get_name;
  made.cuDeviceGetUuid = get_uuid;
  made.cuDeviceGetAttribute = get_attribute;
  made.cuDeviceTotalMem = get_total;
  made.cuDevicePrimaryCtxRetain = retain;
  made.cuDevicePrimaryCtxRelease = release;
  made.cuCtxGetCurrent = get_current;
  made.cuCtxPushCurrent = push;
  made.cuCtxPopCurrent = pop;
  made.cuCtxSynchronize = synchronize;
  made.cuMemGetInfo = get_info;
  made.cuStreamQuery = query_stream;
  made.cuEventCreate = create_event;
  made.cuEventDestroy = destroy_event;
  made.cuEventRecord = record;
  made.cuEventQuery = query_event;
  made.cuStreamIsCapturing = is_capturing;
  made.cuThreadExchangeStreamCaptureMode = exchange_mode;
  made.cuMemGetAllocationGranularity = get_granularity;
  made.cuMemAddressReserve = reserve;
  made.cuMemAddressFree = free_address;
  made.cuMemCreate = create;
  made.cuMemRelease = release_memory;
  made.cuMemMap = map;
  made.cuMemUnmap = unmap;
  made.cuMemSetAccess = set_access;
  made.cuMemExportToShareableHandle = export_fd;
  made.cuMemImportFromShareableHandle = [](MemHandle*, void*, int) -> CuResult { return NotSupported; };
  made.cuMemHostRegister = register_host;
  made.cuMemHostUnregister = unregister_host;
  made.cuMemHostGetDevicePointer = host_pointer;
  return made;
}

} // namespace

State& state() { return *current; }

void reset() {
  delete current;
  current = new State;
}

std::shared_ptr<gpuloan::driver::Gpu> open_gpu() {
  auto gpu = gpuloan::driver::Gpu::open(gpuloan::driver::Driver::wrap(table()), 0);
  return gpu ? *gpu : nullptr;
}

std::uint64_t calls() {
  const Lock lock(state().mutex);
  return state().total_calls;
}

std::uint64_t calls(const std::string& function) {
  const Lock lock(state().mutex);
  return state().calls[function];
}

std::size_t open_fds() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    static_cast<void>(entry);
    ++count;
  }
  return count;
}

} // namespace fake
