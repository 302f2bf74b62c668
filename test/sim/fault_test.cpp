// SPDX-License-Identifier: MIT
//
// Calls that fail on demand, and the counters for tests.
#include "child.hpp"
#include "driver.hpp"

using namespace sim_test;

TEST_CASE("the n-th call of a function fails as told, and changes nothing") {
  Machine machine;
  machine.set("GPULOAN_SIM_FAIL", "cuMemCreate:2:2,cuMemCreate:4:999,cuStreamCreate:2+:46,cuMemUnmap:1:700");
  in_child([] {
    const Driver& cuda = start();
    const AllocationProp prop = exportable();
    MemHandle handle = 0;
    CHECK(cuda.cuMemCreate(&handle, 2 * kMiB, &prop, 0) == Success);
    CHECK(cuda.cuMemCreate(&handle, 2 * kMiB, &prop, 0) == OutOfMemory);
    CHECK(cuda.cuMemCreate(&handle, 2 * kMiB, &prop, 0) == Success);
    CHECK(cuda.cuMemCreate(&handle, 2 * kMiB, &prop, 0) == Unknown);
    CHECK(cuda.cuMemCreate(&handle, 2 * kMiB, &prop, 0) == Success);
    CHECK(used_bytes() == 6 * kMiB);
    CHECK(cuda.calls("cuMemCreate") == 5);
    CHECK(cuda.calls("cuMemCreat") == -1);
    Stream stream = nullptr;
    CHECK(cuda.cuStreamCreate(&stream, 0) == Success);
    CHECK(cuda.cuStreamCreate(&stream, 0) == DeviceUnavailable);
    CHECK(cuda.cuStreamCreate(&stream, 0) == DeviceUnavailable);
    const DevicePtr address = map_chunk(handle, 2 * kMiB);
    CHECK(cuda.cuMemUnmap(address, 2 * kMiB) == IllegalAddress);
    CHECK(cuda.cuMemUnmap(address, 2 * kMiB) == Success);
    CHECK(cuda.live("streams") == 1);
    CHECK(cuda.live("handles") == 3);
    CHECK(cuda.live("elephants") == -1);
  });
}

TEST_CASE("a call that lies says success and does nothing") {
  Machine machine;
  machine.set("GPULOAN_SIM_FAIL", "cuMemcpyHtoDAsync:2:0");
  in_child([] {
    const Driver& cuda = start();
    DevicePtr memory = 0;
    CHECK(cuda.cuMemAlloc(&memory, 4) == Success);
    const auto write = [&](std::uint32_t value) {
      CHECK(cuda.cuMemcpyHtoDAsync(memory, &value, sizeof value, nullptr) == Success);
      CHECK(cuda.cuStreamSynchronize(nullptr) == Success);
      std::uint32_t got = 0;
      CHECK(cuda.cuMemcpyDtoHAsync(&got, memory, sizeof got, nullptr) == Success);
      CHECK(cuda.cuStreamSynchronize(nullptr) == Success);
      return got;
    };
    CHECK(write(1) == 1);
    CHECK(write(2) == 1);
    CHECK(write(3) == 3);
  });
}

TEST_CASE("start-up can fail as told") {
  Machine machine;
  machine.set("GPULOAN_SIM_FAIL", "cuInit:1:100,cuDeviceGetCount:1:999");
  in_child([] {
    CHECK(driver().cuInit(0) == NoDevice);
    CHECK(driver().cuInit(0) == Success);
    int count = 0;
    CHECK(driver().cuDeviceGetCount(&count) == Unknown);
    CHECK(driver().cuDeviceGetCount(&count) == Success);
  });
}
