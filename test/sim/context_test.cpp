// SPDX-License-Identifier: MIT
//
// Contexts: the stack of a thread, primary contexts, failure that stays, and processes that may not use the driver.
#include "child.hpp"
#include "driver.hpp"

#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace sim_test;

namespace {

bool in_forked_child = false;

} // namespace

// In a forked child LeakSanitizer waits for ever for locks that another thread of the parent may have held, and takes for lost
// what the stacks of those threads hold.
extern "C" __attribute__((visibility("default"))) int __lsan_is_turned_off() { return in_forked_child ? 1 : 0; }

TEST_CASE("calls that need a context say so") {
  Machine machine;
  in_child([] {
    const Driver& cuda = driver();
    REQUIRE(cuda.cuInit(0) == Success);
    Stream stream = nullptr;
    Device device = 0;
    DevicePtr pointer = 0;
    CHECK(cuda.cuStreamCreate(&stream, 0) == InvalidContext);
    CHECK(cuda.cuCtxGetDevice(&device) == InvalidContext);
    CHECK(cuda.cuMemAlloc(&pointer, 16) == InvalidContext);
    CHECK(cuda.cuCtxPopCurrent(nullptr) == InvalidContext);
    CHECK(cuda.cuCtxPushCurrent(nullptr) == InvalidValue);
    CHECK(cuda.cuCtxPushCurrent(reinterpret_cast<Context>(&stream)) == InvalidContext);
    CHECK(cuda.cuStreamQuery(nullptr) == InvalidContext);
    Context current = reinterpret_cast<Context>(&device);
    CHECK(cuda.cuCtxGetCurrent(&current) == Success);
    CHECK(current == nullptr);
  });
}

TEST_CASE("what names its stream, event or memory needs no current context") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream stream = make_stream();
    const Event event = make_event();
    DevicePtr pointer = 0;
    REQUIRE(cuda.cuMemAlloc(&pointer, 16) == Success);
    REQUIRE(cuda.cuCtxPopCurrent(nullptr) == Success);
    CHECK(cuda.cuMemsetD32Async(pointer, 1, 1, stream) == Success);
    CHECK(cuda.cuMemsetD32Async(pointer, 1, 1, nullptr) == InvalidContext);
    CHECK(cuda.cuMemsetD32Async(pointer, 1, 1, per_thread_stream()) == InvalidContext);
    CHECK(cuda.cuEventRecord(event, stream) == Success);
    CHECK(cuda.cuEventSynchronize(event) == Success);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(cuda.cuMemFree(pointer) == Success);
    CHECK(cuda.cuEventDestroy(event) == Success);
    CHECK(cuda.cuStreamDestroy(stream) == Success);
  });
}

TEST_CASE("the current context is a matter of the thread") {
  Machine machine;
  machine.set("GPULOAN_SIM_DEVICES", "2");
  in_child([] {
    const Driver& cuda = start(1);
    Device device = -1;
    CHECK(cuda.cuCtxGetDevice(&device) == Success);
    CHECK(device == 1);
    Context mine = nullptr;
    CHECK(cuda.cuCtxGetCurrent(&mine) == Success);
    std::thread([&] {
      Context theirs = mine;
      CHECK(cuda.cuCtxGetCurrent(&theirs) == Success);
      CHECK(theirs == nullptr);
    }).join();
    Context other = nullptr;
    CHECK(cuda.cuCtxCreate(&other, 0, 0) == Success);
    CHECK(cuda.cuCtxGetDevice(&device) == Success);
    CHECK(device == 0);
    Context popped = nullptr;
    CHECK(cuda.cuCtxPopCurrent(&popped) == Success);
    CHECK(popped == other);
    CHECK(cuda.cuCtxSetCurrent(other) == Success);
    CHECK(cuda.cuCtxDestroy(other) == Success);
    CHECK(cuda.cuCtxDestroy(other) == InvalidContext);
  });
}

TEST_CASE("the primary context is counted, and what belongs to it ends with it") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    Context again = nullptr;
    Context first = nullptr;
    CHECK(cuda.cuCtxGetCurrent(&first) == Success);
    CHECK(cuda.cuDevicePrimaryCtxRetain(&again, 0) == Success);
    CHECK(again == first);
    CHECK(cuda.cuDevicePrimaryCtxRelease(0) == Success);
    const Stream stream = make_stream();
    DevicePtr pointer = 0;
    CHECK(cuda.cuMemAlloc(&pointer, kMiB) == Success);
    CHECK(cuda.cuMemsetD8Async(pointer, 1, kMiB, stream) == Success);
    CHECK(cuda.live("streams") == 1);
    CHECK(cuda.cuDevicePrimaryCtxRelease(0) == Success);
    CHECK(cuda.cuStreamQuery(stream) == InvalidHandle);
    CHECK(cuda.cuMemAlloc(&pointer, kMiB) == ContextIsDestroyed);
    Device device = -1;
    CHECK(cuda.cuCtxGetDevice(&device) == Success);
    CHECK(device == 0);
    CHECK(cuda.live("contexts") == 0);
    CHECK(cuda.live("streams") == 0);
    CHECK(cuda.live("allocations") == 0);
    CHECK(cuda.cuDevicePrimaryCtxRelease(0) == InvalidContext);
    CHECK(cuda.cuDevicePrimaryCtxRetain(&again, 0) == Success);
    CHECK(again == first); // and current again, where it was
    CHECK(cuda.cuMemAlloc(&pointer, kMiB) == Success);
  });
}

TEST_CASE("a failed context stays failed, and only that one") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream stream = make_stream();
    const Event event = make_event();
    CHECK(cuda.stream_delay(stream, 1'000'000'000) == Success);
    CHECK(cuda.cuEventRecord(event, stream) == Success);
    CHECK(cuda.context_fail(IllegalAddress) == Success);
    DevicePtr pointer = 0;
    CHECK(cuda.cuStreamQuery(stream) == IllegalAddress);
    CHECK(cuda.cuStreamSynchronize(stream) == IllegalAddress);
    CHECK(cuda.cuEventQuery(event) == IllegalAddress);
    CHECK(cuda.cuEventSynchronize(event) == IllegalAddress);
    CHECK(cuda.cuMemAlloc(&pointer, 16) == IllegalAddress);
    CHECK(cuda.cuCtxSynchronize() == IllegalAddress);
    CHECK(cuda.cuStreamDestroy(stream) == IllegalAddress);
    CHECK(cuda.cuEventDestroy(event) == IllegalAddress);
    const MemHandle handle = create_chunk(2 * kMiB); // VMM calls belong to no context
    unmap_chunk(map_chunk(handle, 2 * kMiB), 2 * kMiB);
    CHECK(cuda.cuMemRelease(handle) == Success);
    Context other = nullptr;
    CHECK(cuda.cuCtxCreate(&other, 0, 0) == Success);
    CHECK(cuda.cuMemAlloc(&pointer, 16) == Success);
    CHECK(cuda.cuStreamQuery(stream) == IllegalAddress);
    CHECK(cuda.cuCtxDestroy(other) == Success);
  });
}

TEST_CASE("the forked child of an initialised process is refused") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream stream = make_stream();
    CHECK(cuda.stream_delay(stream, 1'000'000'000) == Success);
    CHECK(cuda.cuStreamQuery(per_thread_stream()) == Success);
    const pid_t child = ::fork();
    if (child == 0) {
      in_forked_child = true;
      ::alarm(60);
      int count = 0;
      const bool refused = cuda.cuInit(0) == NotInitialized && cuda.cuDeviceGetCount(&count) == NotInitialized &&
                           cuda.cuStreamQuery(stream) == NotInitialized;
      std::exit(refused ? 0 : 1);
    }
    int status = -1;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    CHECK(cuda.cuStreamQuery(stream) == NotReady);
  });
}

TEST_CASE("a driver that was shut down says so") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    cuda.deinitialize();
    int count = 0;
    CHECK(cuda.cuDeviceGetCount(&count) == Deinitialized);
    CHECK(cuda.cuInit(0) == Deinitialized);
  });
}
