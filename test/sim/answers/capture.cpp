// SPDX-License-Identifier: MIT
//
// Questions about stream capture.
#include "answers.hpp"

#include <atomic>
#include <cstdlib>

namespace answers {

void ask_capture() {
  start();
  const Stream one = stream();
  int status = -1;
  void* graph = nullptr;
  say("end.without", cuda.cuStreamEndCapture(one, &graph));
  say("begin.legacy", cuda.cuStreamBeginCapture(nullptr, CaptureRelaxed));
  say("begin", cuda.cuStreamBeginCapture(one, CaptureRelaxed));
  say("begin.twice", cuda.cuStreamBeginCapture(one, CaptureRelaxed));
  cuda.cuStreamIsCapturing(one, &status);
  say("status", status);
  say("query", cuda.cuStreamQuery(one));
  cuda.cuStreamIsCapturing(one, &status);
  say("status.after-query", status);
  std::uint64_t* page = words();
  say("work.invalidated", cuda.cuMemsetD8Async(at(page), 1, 8, one));
  say("end.invalidated", cuda.cuStreamEndCapture(one, &graph));
  say("query.after-end", cuda.cuStreamQuery(one));
  need(cuda.cuStreamBeginCapture(one, CaptureRelaxed), "begin");
  say("sync", cuda.cuStreamSynchronize(one));
  cuda.cuStreamIsCapturing(one, &status);
  say("status.after-sync", status);
  cuda.cuStreamEndCapture(one, &graph);
  need(cuda.cuStreamBeginCapture(one, CaptureRelaxed), "begin");
  say("other-stream.query", cuda.cuStreamQuery(stream()));
  say("legacy.nonblocking-captures", cuda.cuMemsetD8Async(at(page), 1, 8, nullptr));
  say("legacy.is-capturing", cuda.cuStreamIsCapturing(nullptr, &status));
  say("record", cuda.cuEventRecord(event(EventDisableTiming), one));
  say("ctx-sync", cuda.cuCtxSynchronize());
  cuda.cuStreamIsCapturing(one, &status);
  say("status.end", status);
  say("end", cuda.cuStreamEndCapture(one, &graph));
  const Stream blocking = stream(StreamDefault);
  need(cuda.cuStreamBeginCapture(blocking, CaptureRelaxed), "begin");
  say("blocking.legacy.is-capturing", cuda.cuStreamIsCapturing(nullptr, &status));
  cuda.cuStreamIsCapturing(blocking, &status);
  say("blocking.status", status);
  say("blocking.legacy.query", cuda.cuStreamQuery(nullptr));
  cuda.cuStreamIsCapturing(blocking, &status);
  say("blocking.status.after-query", status);
  cuda.cuStreamEndCapture(blocking, &graph);
  need(cuda.cuStreamBeginCapture(blocking, CaptureRelaxed), "begin");
  say("blocking.legacy.work", cuda.cuMemsetD8Async(at(page), 1, 8, nullptr));
  cuda.cuStreamIsCapturing(blocking, &status);
  say("blocking.status.after-work", status);
  cuda.cuStreamEndCapture(blocking, &graph);
  need(cuda.cuStreamBeginCapture(blocking, CaptureRelaxed), "begin");
  say("blocking.legacy.record", cuda.cuEventRecord(event(EventDisableTiming), nullptr));
  cuda.cuStreamIsCapturing(blocking, &status);
  say("blocking.status.after-record", status);
  cuda.cuStreamEndCapture(blocking, &graph);
  need(cuda.cuStreamBeginCapture(blocking, CaptureRelaxed), "begin");
  say("blocking.legacy.sync", cuda.cuStreamSynchronize(nullptr));
  cuda.cuStreamIsCapturing(blocking, &status);
  say("blocking.status.after-sync", status);
}

// Which calls of another thread does a global capture forbid, and does it survive them?
void ask_unsafe() {
  start();
  const Stream captured = stream();
  const Stream free_stream = stream();
  const Event local = event(EventDisableTiming);
  std::uint64_t* page = words();
  DevicePtr device = 0;
  need(cuda.cuMemAlloc(&device, 4096), "cuMemAlloc");
  static unsigned host[4];
  const auto ask = [&](const char* question, const std::function<CuResult()>& call) {
    void* graph = nullptr;
    int status = -1;
    need(cuda.cuStreamBeginCapture(captured, CaptureGlobal), "begin");
    static CuResult result;
    if (!ends_within_ms(5000, [&] { result = call(); })) result = -2;
    cuda.cuStreamIsCapturing(captured, &status);
    cuda.cuStreamEndCapture(captured, &graph);
    say(question, result * 10 + status);
  };
  ask("event-query", [&] { return cuda.cuEventQuery(local); });
  ask("event-synchronize", [&] { return cuda.cuEventSynchronize(local); });
  ask("event-record", [&] { return cuda.cuEventRecord(local, free_stream); });
  ask("event-create", [&] {
    Event made;
    return cuda.cuEventCreate(&made, EventDisableTiming);
  });
  ask("event-create-shared", [&] {
    Event made;
    return cuda.cuEventCreate(&made, kShared);
  });
  ask("stream-query", [&] { return cuda.cuStreamQuery(free_stream); });
  ask("stream-synchronize", [&] { return cuda.cuStreamSynchronize(free_stream); });
  ask("stream-wait-event", [&] { return cuda.cuStreamWaitEvent(free_stream, local, 0); });
  ask("stream-create", [&] {
    Stream made;
    return cuda.cuStreamCreate(&made, StreamNonBlocking);
  });
  ask("ctx-synchronize", [&] { return cuda.cuCtxSynchronize(); });
  ask("mem-alloc", [&] {
    DevicePtr made;
    return cuda.cuMemAlloc(&made, 64);
  });
  ask("mem-free", [&] { return cuda.cuMemFree(device); });
  ask("mem-get-info", [&] {
    std::size_t a, b;
    return cuda.cuMemGetInfo(&a, &b);
  });
  need(cuda.cuMemAlloc(&device, 4096), "cuMemAlloc");
  const AllocationProp wish = prop();
  MemHandle handle = 0;
  DevicePtr address = 0;
  int fd = -1;
  ask("mem-create", [&] { return cuda.cuMemCreate(&handle, 2 * kMiB, &wish, 0); });
  if (handle == 0) handle = create();
  ask("address-reserve", [&] { return cuda.cuMemAddressReserve(&address, 2 * kMiB, 0, 0, 0); });
  if (address == 0) need(cuda.cuMemAddressReserve(&address, 2 * kMiB, 0, 0, 0), "reserve");
  ask("mem-map", [&] { return cuda.cuMemMap(address, 2 * kMiB, 0, handle, 0); });
  cuda.cuMemMap(address, 2 * kMiB, 0, handle, 0);
  ask("set-access", [&] { return give(address, 2 * kMiB, AccessReadWrite); });
  ask("export", [&] { return cuda.cuMemExportToShareableHandle(&fd, handle, HandlePosixFd, 0); });
  cuda.cuMemExportToShareableHandle(&fd, handle, HandlePosixFd, 0);
  ask("import", [&] {
    MemHandle made;
    return cuda.cuMemImportFromShareableHandle(&made, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)), 1);
  });
  ask("unmap", [&] { return cuda.cuMemUnmap(address, 2 * kMiB); });
  ask("release", [&] { return cuda.cuMemRelease(handle); });
  ask("write-value", [&] { return cuda.cuStreamWriteValue64(free_stream, at(page), 1, 0); });
  ask("copy-pageable", [&] { return cuda.cuMemcpyHtoDAsync(device, host, 4, free_stream); });
  ask("copy-to-pageable", [&] { return cuda.cuMemcpyDtoHAsync(host, device, 4, free_stream); });
  ask("copy-device", [&] { return cuda.cuMemcpyDtoDAsync(device, device + 64, 4, free_stream); });
  ask("copy-registered", [&] { return cuda.cuMemcpyHtoDAsync(device, page, 8, free_stream); });
  ask("fill", [&] { return cuda.cuMemsetD8Async(device, 1, 8, free_stream); });
  ask("fill-legacy", [&] { return cuda.cuMemsetD8Async(device, 1, 8, nullptr); });
  ask("pointer-attributes", [&] {
    unsigned type = 0;
    const int attribute = PointerMemoryType;
    void* out = &type;
    return cuda.cuPointerGetAttributes(1, &attribute, &out, device);
  });
  ask("is-capturing", [&] {
    int status;
    return cuda.cuStreamIsCapturing(free_stream, &status);
  });
  void* memory = ::aligned_alloc(4096, 4096);
  ask("host-register", [&] { return cuda.cuMemHostRegister(memory, 4096, 0); });
  cuda.cuMemHostRegister(memory, 4096, 0);
  ask("host-unregister", [&] { return cuda.cuMemHostUnregister(memory); });
  const Stream doomed = stream();
  ask("stream-destroy", [&] { return cuda.cuStreamDestroy(doomed); });
  const Event over = event(EventDisableTiming);
  ask("event-destroy", [&] { return cuda.cuEventDestroy(over); });
  ask("host-alloc", [&] {
    void* made;
    return cuda.cuMemAllocHost(&made, 4096);
  });
}

} // namespace answers
