// SPDX-License-Identifier: MIT
//
// Questions about start-up, contexts, failure and registered host memory.
#include "answers.hpp"

#include <cstdlib>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace answers {

void ask_startup() {
  int count = -1;
  int status = -1;
  void* function = &count;
  Context context = nullptr;
  say("before.device-count", cuda.cuDeviceGetCount(&count));
  say("before.ctx-get-current", cuda.cuCtxGetCurrent(&context));
  say("before.version", cuda.cuDriverGetVersion(&count));
  say("init.flags", cuda.cuInit(1));
  say("proc.unknown", cuda.get_proc_address("cuNothing", &function, 12000, 0, &status));
  say("proc.unknown.status", status);
  say("proc.unknown.null", function == nullptr);
  function = &count;
  say("proc.too-old", cuda.get_proc_address("cuMemCreate", &function, 9000, 0, &status));
  say("proc.too-old.status", status);
  say("proc.too-old.null", function == nullptr);
  status = -1;
  say("proc.too-new", cuda.get_proc_address("cuMemCreate", &function, 99000, 0, &status));
  say("proc.too-new.status", status);
  say("proc.no-status", cuda.get_proc_address("cuNothing", &function, 12000, 0, nullptr));
  need(cuda.cuInit(0), "cuInit");
  say("device-99", cuda.cuDeviceGet(&count, 99));
  say("device-minus-1", cuda.cuDeviceGet(&count, -1));
  say("attribute-0", cuda.cuDeviceGetAttribute(&count, 0, 0));
  say("attribute-1000", cuda.cuDeviceGetAttribute(&count, 1000, 0));
  say("attribute.device-99", cuda.cuDeviceGetAttribute(&count, AttrVmm, 99));
  const char* text = nullptr;
  say("error-name.12345", cuda.cuGetErrorName(12345, &text));
  say("error-name.12345.null", text == nullptr);
}

void ask_no_context() {
  need(cuda.cuInit(0), "cuInit");
  Context context = nullptr;
  need(cuda.cuDevicePrimaryCtxRetain(&context, 0), "retain");
  need(cuda.cuCtxPushCurrent(context), "push");
  const Stream made = stream();
  Event event = nullptr;
  need(cuda.cuEventCreate(&event, EventDisableTiming), "cuEventCreate");
  DevicePtr device = 0;
  need(cuda.cuMemAlloc(&device, 64), "cuMemAlloc");
  std::uint64_t* page = words();
  need(cuda.cuCtxPopCurrent(&context), "pop");

  int number = 0;
  static unsigned host[4];
  say("pop", cuda.cuCtxPopCurrent(&context));
  say("push-null", cuda.cuCtxPushCurrent(nullptr));
  say("pop-again", cuda.cuCtxPopCurrent(&context));
  say("get-current", cuda.cuCtxGetCurrent(&context));
  say("get-current.null", context == nullptr);
  say("get-device", cuda.cuCtxGetDevice(&number));
  say("synchronize", cuda.cuCtxSynchronize());
  std::size_t a = 0;
  std::size_t b = 0;
  say("mem-get-info", cuda.cuMemGetInfo(&a, &b));
  DevicePtr more = 0;
  say("mem-alloc", cuda.cuMemAlloc(&more, 64));
  say("mem-alloc-0", cuda.cuMemAlloc(nullptr, 0));
  Stream other = nullptr;
  say("stream-create", cuda.cuStreamCreate(&other, 0));
  say("stream-query", cuda.cuStreamQuery(made));
  say("stream-query-legacy", cuda.cuStreamQuery(nullptr));
  say("stream-synchronize", cuda.cuStreamSynchronize(made));
  say("is-capturing", cuda.cuStreamIsCapturing(made, &number));
  say("is-capturing-legacy", cuda.cuStreamIsCapturing(nullptr, &number));
  number = 0;
  say("exchange-mode", cuda.cuThreadExchangeStreamCaptureMode(&number));
  say("fill", cuda.cuMemsetD8Async(device, 1, 8, made));
  say("fill-legacy", cuda.cuMemsetD8Async(device, 1, 8, nullptr));
  say("htod", cuda.cuMemcpyHtoDAsync(device, host, 4, made));
  say("write-value", cuda.cuStreamWriteValue64(made, at(page), 1, 0));
  say("event-record", cuda.cuEventRecord(event, made));
  say("event-synchronize", cuda.cuEventSynchronize(event));
  say("event-query", cuda.cuEventQuery(event));
  say("wait-event", cuda.cuStreamWaitEvent(made, event, 0));
  Event more_event = nullptr;
  say("event-create", cuda.cuEventCreate(&more_event, EventDisableTiming));
  unsigned type = 0;
  const int attribute = PointerMemoryType;
  void* out = &type;
  say("pointer-attributes", cuda.cuPointerGetAttributes(1, &attribute, &out, device));
  say("pointer-attributes.type", type);
  DevicePtr base = 0;
  say("address-range", cuda.cuMemGetAddressRange(&base, &a, device));
  void* memory = ::aligned_alloc(4096, 4096);
  say("host-register", cuda.cuMemHostRegister(memory, 4096, 0));
  say("host-pointer", cuda.cuMemHostGetDevicePointer(&base, page, 0));
  say("host-unregister", cuda.cuMemHostUnregister(page));
  const AllocationProp wish = prop();
  MemHandle handle = 0;
  say("granularity", cuda.cuMemGetAllocationGranularity(&a, &wish, 0));
  say("mem-create", cuda.cuMemCreate(&handle, 2 * kMiB, &wish, 0));
  say("reserve", cuda.cuMemAddressReserve(&more, 2 * kMiB, 0, 0, 0));
  say("map", cuda.cuMemMap(more, 2 * kMiB, 0, handle, 0));
  say("set-access", give(more, 2 * kMiB, AccessReadWrite));
  int fd = -1;
  say("export", cuda.cuMemExportToShareableHandle(&fd, handle, HandlePosixFd, 0));
  say("unmap", cuda.cuMemUnmap(more, 2 * kMiB));
  say("address-free", cuda.cuMemAddressFree(more, 2 * kMiB));
  say("release", cuda.cuMemRelease(handle));
  say("mem-free", cuda.cuMemFree(device));
  say("event-destroy", cuda.cuEventDestroy(event));
  say("stream-destroy", cuda.cuStreamDestroy(made));
}

// After a device fault (memory unmapped under queued work): which calls still work?
void ask_sticky() {
  start();
  const MemHandle handle = create();
  const DevicePtr address = map(handle, AccessReadWrite);
  const DevicePtr fault = map(create(), AccessReadWrite);
  DevicePtr device = 0;
  need(cuda.cuMemAlloc(&device, 64), "cuMemAlloc");
  const Stream made = stream();
  Event event = nullptr;
  need(cuda.cuEventCreate(&event, EventDisableTiming), "cuEventCreate");
  std::uint64_t* page = words();
  int number = 0;
  std::size_t a = 0;
  std::size_t b = 0;
  need(cuda.cuStreamWaitValue64(made, at(page), 1, WaitGeq), "wait");
  need(cuda.cuMemsetD8Async(fault, 1, 2 * kMiB, made), "fill");
  need(cuda.cuMemUnmap(fault, 2 * kMiB), "unmap");
  store(page, 1);
  say("sync", cuda.cuStreamSynchronize(made));
  say("stream-query", cuda.cuStreamQuery(made));
  say("is-capturing", cuda.cuStreamIsCapturing(made, &number));
  say("get-device", cuda.cuCtxGetDevice(&number));
  say("mem-get-info", cuda.cuMemGetInfo(&a, &b));
  DevicePtr more = 0;
  say("mem-alloc", cuda.cuMemAlloc(&more, 64));
  Stream other = nullptr;
  say("stream-create", cuda.cuStreamCreate(&other, 0));
  Event more_event = nullptr;
  say("event-create", cuda.cuEventCreate(&more_event, 0));
  say("event-query", cuda.cuEventQuery(event));
  say("event-record", cuda.cuEventRecord(event, made));
  say("fill", cuda.cuMemsetD8Async(device, 1, 8, made));
  say("write-value", cuda.cuStreamWriteValue64(made, at(page), 1, 0));
  unsigned type = 0;
  const int attribute = PointerMemoryType;
  void* out = &type;
  say("pointer-attributes", cuda.cuPointerGetAttributes(1, &attribute, &out, device));
  say("address-range", cuda.cuMemGetAddressRange(&more, &a, device));
  void* memory = ::aligned_alloc(4096, 4096);
  say("host-register", cuda.cuMemHostRegister(memory, 4096, 0));
  say("host-pointer", cuda.cuMemHostGetDevicePointer(&more, page, 0));
  say("host-unregister", cuda.cuMemHostUnregister(page));
  const AllocationProp wish = prop();
  MemHandle fresh = 0;
  say("granularity", cuda.cuMemGetAllocationGranularity(&a, &wish, 0));
  say("mem-create", cuda.cuMemCreate(&fresh, 2 * kMiB, &wish, 0));
  DevicePtr room = 0;
  say("reserve", cuda.cuMemAddressReserve(&room, 2 * kMiB, 0, 0, 0));
  say("map", cuda.cuMemMap(room, 2 * kMiB, 0, handle, 0));
  say("set-access", give(room, 2 * kMiB, AccessReadWrite));
  int fd = -1;
  say("export", cuda.cuMemExportToShareableHandle(&fd, handle, HandlePosixFd, 0));
  say("unmap", cuda.cuMemUnmap(address, 2 * kMiB));
  say("address-free", cuda.cuMemAddressFree(address, 2 * kMiB));
  say("release", cuda.cuMemRelease(handle));
  say("event-destroy", cuda.cuEventDestroy(event));
  say("stream-destroy", cuda.cuStreamDestroy(made));
  say("mem-free", cuda.cuMemFree(device));
  Context context = nullptr;
  say("get-current", cuda.cuCtxGetCurrent(&context));
  say("retain", cuda.cuDevicePrimaryCtxRetain(&context, 0));
  say("push", cuda.cuCtxPushCurrent(context));
  say("pop", cuda.cuCtxPopCurrent(&context));
  say("primary-release", cuda.cuDevicePrimaryCtxRelease(0));
  say("synchronize", cuda.cuCtxSynchronize());
}

void ask_host() {
  start();
  auto* pages =
      static_cast<char*>(::mmap(nullptr, 4 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  DevicePtr device = 0;
  say("register.null", cuda.cuMemHostRegister(nullptr, 4096, 0));
  say("register.size-0", cuda.cuMemHostRegister(pages, 0, 0));
  say("register.flags-1024", cuda.cuMemHostRegister(pages, 4096, 1024));
  say("register.unaligned", cuda.cuMemHostRegister(pages + 100, 5000, 0));
  say("register.overlap", cuda.cuMemHostRegister(pages + 4096, 4096, 0));
  say("register.same-page", cuda.cuMemHostRegister(pages + 5200, 64, 0));
  say("register.around", cuda.cuMemHostRegister(pages, 16384, 0));
  say("pointer.inside", cuda.cuMemHostGetDevicePointer(&device, pages + 200, 0));
  say("pointer.same", device == at(pages + 200));
  say("pointer.page-but-not-range", cuda.cuMemHostGetDevicePointer(&device, pages + 8, 0));
  say("pointer.outside", cuda.cuMemHostGetDevicePointer(&device, pages + 3 * 4096, 0));
  say("unregister.page", cuda.cuMemHostUnregister(pages));
  say("unregister.inside", cuda.cuMemHostUnregister(pages + 200));
  say("unregister.null", cuda.cuMemHostUnregister(nullptr));
  say("unregister", cuda.cuMemHostUnregister(pages + 100));
  say("unregister.twice", cuda.cuMemHostUnregister(pages + 100));
  auto* holed =
      static_cast<char*>(::mmap(nullptr, 4 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ::munmap(holed + 2 * 4096, 4096);
  say("register.hole", cuda.cuMemHostRegister(holed, 4 * 4096, 0));
  ::munmap(holed, 4 * 4096);
  say("register.unmapped", cuda.cuMemHostRegister(holed, 4096, 0));
  void* fixed = ::mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  say("register.read-only", cuda.cuMemHostRegister(fixed, 4096, 0));
  void* made = nullptr;
  say("alloc.size-0", cuda.cuMemAllocHost(&made, 0));
  need(cuda.cuMemAllocHost(&made, 10000), "cuMemAllocHost");
  say("alloc.unregister", cuda.cuMemHostUnregister(made));
  say("alloc.register", cuda.cuMemHostRegister(made, 4096, 0));
  say("alloc.free", cuda.cuMemFreeHost(made));
  say("alloc.free-twice", cuda.cuMemFreeHost(made));
}

// The primary context ends while it is current and its objects are in use.
void ask_released() {
  start();
  int number = 0;
  Context context = nullptr;
  say("release", cuda.cuDevicePrimaryCtxRelease(0));
  say("release.again", cuda.cuDevicePrimaryCtxRelease(0));
  say("get-current", cuda.cuCtxGetCurrent(&context));
  say("get-current.null", context == nullptr);
  say("get-device", cuda.cuCtxGetDevice(&number));
  say("synchronize", cuda.cuCtxSynchronize());
  DevicePtr more = 0;
  say("mem-alloc", cuda.cuMemAlloc(&more, 64));
  Context again = nullptr;
  say("retain", cuda.cuDevicePrimaryCtxRetain(&again, 0));
  say("retain.same", again == context);
  say("mem-alloc.after-retain", cuda.cuMemAlloc(&more, 64));
}

void ask_devices() {
  int count = -1;
  say("init", cuda.cuInit(0));
  say("count.result", cuda.cuDeviceGetCount(&count));
  say("count", count);
}

void ask_fork() {
  start();
  const Stream made = stream();
  const pid_t child = ::fork();
  if (child == 0) {
    int count = 0;
    Context context = nullptr;
    say("init", cuda.cuInit(0));
    say("device-count", cuda.cuDeviceGetCount(&count));
    say("get-current", cuda.cuCtxGetCurrent(&context));
    say("stream-query", cuda.cuStreamQuery(made));
    say("version", cuda.cuDriverGetVersion(&count));
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  say("parent.stream-query", cuda.cuStreamQuery(made));
}

} // namespace answers
