// SPDX-License-Identifier: MIT
//
// Start-up, devices, versions, error names, and what the environment can make of them.
#include "child.hpp"
#include "driver.hpp"

#include <string>
#include <vector>

using namespace sim_test;

namespace {

CuResult init_with(const char* variable, const char* value) {
  ::setenv(variable, value, 1);
  return driver().cuInit(0);
}

std::vector<Uuid> uuids() {
  const Driver& cuda = driver();
  int count = 0;
  REQUIRE(cuda.cuDeviceGetCount(&count) == Success);
  std::vector<Uuid> found(static_cast<std::size_t>(count));
  for (int device = 0; device < count; ++device) {
    REQUIRE(cuda.cuDeviceGetUuid(&found[static_cast<std::size_t>(device)], device) == Success);
  }
  return found;
}

std::string name_of(Device device) {
  char name[64] = {};
  REQUIRE(driver().cuDeviceGetName(name, sizeof name, device) == Success);
  return name;
}

int attribute(int which) {
  int value = -1;
  REQUIRE(driver().cuDeviceGetAttribute(&value, which, 0) == Success);
  return value;
}

} // namespace

TEST_CASE("nothing but information works before cuInit") {
  Machine machine;
  in_child([] {
    int number = 0;
    Context context = nullptr;
    CHECK(driver().cuDeviceGetCount(&number) == NotInitialized);
    CHECK(driver().cuCtxGetCurrent(&context) == NotInitialized);
    CHECK(driver().cuDriverGetVersion(&number) == Success);
    CHECK(number == 13000);
    CHECK(driver().cuInit(1) == InvalidValue);
  });
}

TEST_CASE("devices have their names and stable distinct UUIDs") {
  Machine machine;
  machine.set("GPULOAN_SIM_DEVICES", "8").set("GPULOAN_SIM_MEMORY_MIB", "64");
  in_child([] {
    start();
    const auto all = uuids();
    REQUIRE(all.size() == 8);
    for (std::size_t one = 0; one < all.size(); ++one) {
      for (std::size_t other = 0; other < one; ++other) CHECK_FALSE(all[one] == all[other]);
    }
    CHECK(name_of(3) == "gpuloan simulated device 3");
    std::size_t bytes = 0;
    CHECK(driver().cuDeviceTotalMem(&bytes, 7) == Success);
    CHECK(bytes == 64 * kMiB);
    Device device = -1;
    CHECK(driver().cuDeviceGet(&device, 8) == InvalidDevice);
  });
}

TEST_CASE("CUDA_VISIBLE_DEVICES reorders and hides devices, by ordinal and by UUID") {
  Machine machine;
  machine.set("GPULOAN_SIM_DEVICES", "4");
  const auto names = [&](const char* visible, std::vector<std::string> expected, CuResult result = Success) {
    machine.set("CUDA_VISIBLE_DEVICES", visible);
    CAPTURE(visible);
    in_child([&] {
      REQUIRE(driver().cuInit(0) == result);
      if (result != Success) return;
      REQUIRE(uuids().size() == expected.size());
      for (std::size_t device = 0; device < expected.size(); ++device) {
        CHECK(name_of(static_cast<Device>(device)) == "gpuloan simulated device " + expected[device]);
      }
    });
  };
  names("2,0", {"2", "0"});
  names("3", {"3"});
  names("1,9,0", {"1"});
  names("", {}, NoDevice);
  names("-1", {}, NoDevice);
  names("zero", {}, NoDevice);
  names("GPU-", {}, NoDevice);
  names("1,1", {}, InvalidDevice);
  names("1,GPU-6770", {"1"});
  names("GPU-9770756c-6f61-6e00-7369-6d0000000004,GPU-6770", {"3", "0"});
}

// G7
TEST_CASE("slices of GPUs in MIG mode") {
  Machine machine;
  machine.set("GPULOAN_SIM_DEVICES", "2").set("GPULOAN_SIM_MIG", "3").set("GPULOAN_SIM_MEMORY_MIB", "300");
  const auto seen = [&](const char* visible, const char* name, CuResult result = Success) {
    machine.set("CUDA_VISIBLE_DEVICES", visible);
    CAPTURE(visible);
    in_child([&] {
      REQUIRE(driver().cuInit(0) == result);
      if (result != Success) return;
      CHECK(uuids().size() == 1); // never more than one
      CHECK(name_of(0) == name);
      std::size_t bytes = 0;
      CHECK(driver().cuDeviceTotalMem(&bytes, 0) == Success);
      CHECK(bytes == 100 * kMiB);
    });
  };
  seen("0", "gpuloan simulated device 0 MIG 1/3");
  seen("1", "gpuloan simulated device 1 MIG 1/3");
  seen("MIG-8770756c-6f61-6e00-7369-6d0000000003", "gpuloan simulated device 0 MIG 3/3");
  seen("MIG-a770,MIG-8770", "gpuloan simulated device 1 MIG 2/3");
  seen("GPU-8770", "", NoDevice);
  in_child([] {
    ::unsetenv("CUDA_VISIBLE_DEVICES");
    REQUIRE(driver().cuInit(0) == Success);
    CHECK(name_of(0) == "gpuloan simulated device 0 MIG 1/3");
  });
  in_child([] { CHECK(init_with("GPULOAN_SIM_MIG", "5") == InvalidValue); }); // of two: more than 8
}

// G11
TEST_CASE("compute modes") {
  Machine machine;
  machine.set("GPULOAN_SIM_DEVICES", "2").set("GPULOAN_SIM_COMPUTE_MODE", "exclusive");
  const auto retain = [](Device device) {
    Context context = nullptr;
    return driver().cuDevicePrimaryCtxRetain(&context, device);
  };
  Link link;
  Child first([&] {
    REQUIRE(driver().cuInit(0) == Success);
    CHECK(attribute(AttrComputeMode) == ModeExclusiveProcess);
    CHECK(retain(0) == Success);
    Context second = nullptr;
    CHECK(driver().cuCtxCreate(&second, 0, 0) == Success); // the same process
    link.left().say(1);
    CHECK(link.left().hear() == 2);
    CHECK(driver().cuCtxDestroy(second) == Success);
    CHECK(driver().cuDevicePrimaryCtxRelease(0) == Success);
    link.left().say(3);
    CHECK(link.left().hear() == 4);
  });
  in_child([&] {
    REQUIRE(driver().cuInit(0) == Success);
    CHECK(link.right().hear() == 1);
    CHECK(retain(0) == DeviceUnavailable);
    Context context = nullptr;
    CHECK(driver().cuCtxCreate(&context, 0, 0) == DeviceUnavailable);
    CHECK(retain(1) == Success);
    link.right().say(2);
    CHECK(link.right().hear() == 3);
    CHECK(retain(0) == Success);
    link.right().say(4);
  });
  first.finish();
  machine.set("GPULOAN_SIM_COMPUTE_MODE", "prohibited");
  in_child([&] {
    REQUIRE(driver().cuInit(0) == Success);
    CHECK(attribute(AttrComputeMode) == ModeProhibited);
    CHECK(retain(0) == DeviceUnavailable);
  });
  in_child([] { CHECK(init_with("GPULOAN_SIM_COMPUTE_MODE", "thread") == InvalidValue); });
}

// G5
TEST_CASE("peer access is what the matrix says") {
  Machine machine;
  machine.set("GPULOAN_SIM_DEVICES", "3");
  const auto reaches = [](Device from, Device to) {
    int can = -1;
    REQUIRE(driver().cuDeviceCanAccessPeer(&can, from, to) == Success);
    return can;
  };
  in_child([&] {
    start();
    CHECK(reaches(0, 2) == 1);
    CHECK(reaches(1, 1) == 0);
    int can = 0;
    CHECK(driver().cuDeviceCanAccessPeer(&can, 0, 3) == InvalidDevice);
  });
  machine.set("GPULOAN_SIM_PEERS", "0-1,2>0").set("CUDA_VISIBLE_DEVICES", "2,0,1");
  in_child([&] { // by the numbers of this process: machine 2, 0, 1
    const Driver& cuda = start(1);
    CHECK(reaches(1, 2) == 1);
    CHECK(reaches(2, 1) == 1);
    CHECK(reaches(0, 1) == 1);
    CHECK(reaches(1, 0) == 0);
    CHECK(reaches(0, 2) == 0);
    const DevicePtr shared = map_chunk(create_chunk(2 * kMiB, 1), 2 * kMiB, AccessReadWrite, 0);
    AccessDesc grant = {{LocationDevice, 0}, AccessReadWrite};
    const DevicePtr other = map_chunk(create_chunk(2 * kMiB, 2), 2 * kMiB, AccessReadWrite, 1);
    CHECK(cuda.cuMemSetAccess(other, 2 * kMiB, &grant, 1) == InvalidDevice); // 0 does not reach 2
    // Work in a context of 1 on memory of 2 goes; on that of 1, which only 0 was given, it does not.
    write_word(other, 7);
    CHECK(read_word(other) == 7);
    CHECK(cuda.cuMemsetD32Async(shared, 1, 1, nullptr) == InvalidValue);
  });
  machine.set("GPULOAN_SIM_PEERS", "0-3");
  in_child([] { CHECK(driver().cuInit(0) == InvalidValue); });
}

TEST_CASE("a memory handle opens where peer access is") {
  Machine machine;
  machine.set("GPULOAN_SIM_DEVICES", "3").set("GPULOAN_SIM_PEERS", "1>0");
  Link link;
  Child exporter([&] {
    const Driver& cuda = start();
    DevicePtr pointer = 0;
    IpcMemHandle handle = {};
    REQUIRE(cuda.cuMemAlloc(&pointer, 4096) == Success);
    write_word(pointer, 0xfeed);
    REQUIRE(cuda.cuIpcGetMemHandle(&handle, pointer) == Success);
    link.left().send_bytes(&handle, sizeof handle);
    CHECK(link.left().hear() == 1);
  });
  in_child([&] {
    const Driver& cuda = start(1);
    IpcMemHandle handle = {};
    link.right().receive_bytes(&handle, sizeof handle);
    DevicePtr pointer = 0;
    REQUIRE(cuda.cuIpcOpenMemHandle(&pointer, handle, IpcMemLazyPeerAccess) == Success);
    CHECK(read_word(pointer) == 0xfeed);
    Context third = nullptr;
    REQUIRE(cuda.cuCtxCreate(&third, 0, 2) == Success);
    CHECK(cuda.cuIpcOpenMemHandle(&pointer, handle, IpcMemLazyPeerAccess) == PeerAccessUnsupported);
    link.right().say(1);
  });
  exporter.finish();
}

TEST_CASE("cuInit says what it was told to say") {
  Machine machine;
  for (const char* code : {"34", "803", "804", "999"}) {
    in_child([&] {
      CHECK(init_with("GPULOAN_SIM_INIT_RESULT", code) == std::stoi(code));
      int count = 0;
      CHECK(driver().cuDeviceGetCount(&count) == NotInitialized);
    });
  }
  in_child([] { CHECK(init_with("GPULOAN_SIM_INIT_RESULT", "0") == Success); });
  in_child([] { CHECK(init_with("GPULOAN_SIM_DEVICES", "0") == NoDevice); });
}

TEST_CASE("a variable that cannot be understood fails cuInit") {
  Machine machine;
  in_child([] { CHECK(init_with("GPULOAN_SIM_DEVICES", "9") == InvalidValue); });
  in_child([] { CHECK(init_with("GPULOAN_SIM_LAG_US", "soon") == InvalidValue); });
  for (const char* limit : {"-1", "5248:", "5248:sleeps", "5248:dies:fails", "16777217"}) {
    CAPTURE(limit);
    in_child([=] { CHECK(init_with("GPULOAN_SIM_IMPORT_LIMIT_MIB", limit) == InvalidValue); });
  }
  in_child([] { CHECK(init_with("GPULOAN_SIM_FAIL", "cuMemCreat:1:2") == InvalidValue); });
  in_child([] { CHECK(init_with("GPULOAN_SIM_FAIL", "cuMemCreate:0:2") == InvalidValue); });
  in_child([] { CHECK(init_with("GPULOAN_SIM_FAIL", "cuMemCreate:1") == InvalidValue); });
  in_child([] { CHECK(init_with("GPULOAN_SIM_WITHOUT", "gates") == InvalidValue); });
}

TEST_CASE("functions are found by name and version") {
  Machine machine;
  machine.set("GPULOAN_SIM_VERSION", "11060").set("GPULOAN_SIM_WITHOUT", "symbols:cuMemCreate");
  in_child([] {
    const Driver& cuda = driver();
    void* function = nullptr;
    int status = -1;
    CHECK(cuda.get_proc_address("cuMemFree", &function, 11000, 0, &status) == Success);
    CHECK(status == 0);
    CHECK((function == reinterpret_cast<void*>(cuda.cuMemFree)));
    CHECK(cuda.get_proc_address("cuMemFree", &function, 11070, 0, &status) == InvalidValue); // newer than the driver
    CHECK(cuda.get_proc_address("cuStreamWaitValue64", &function, 11060, 0, &status) == Success);
    CHECK(function == nullptr);
    CHECK(status == 1);
    CHECK(cuda.get_proc_address("cuDeviceGetUuid", &function, 11000, 0, &status) == Success);
    CHECK(function == nullptr);
    CHECK(status == 2);
    for (const char* missing : {"cuMemCreate", "cuNothing"}) {
      function = &status;
      CHECK(cuda.get_proc_address(missing, &function, 11060, 0, nullptr) == Success);
      CHECK(function == nullptr);
    }
    int version = 0;
    CHECK(cuda.cuDriverGetVersion(&version) == Success);
    CHECK(version == 11060);
  });
}

TEST_CASE("results have their real names") {
  in_child([] {
    const char* text = nullptr;
    CHECK(driver().cuGetErrorName(OutOfMemory, &text) == Success);
    CHECK(std::string(text) == "CUDA_ERROR_OUT_OF_MEMORY");
    CHECK(driver().cuGetErrorString(IllegalAddress, &text) == Success);
    CHECK(std::string(text) == "an illegal memory access was encountered");
    CHECK(driver().cuGetErrorName(12345, &text) == InvalidValue);
    CHECK(text == nullptr);
  });
}

TEST_CASE("a missing feature reads 0 and its functions are not supported") {
  Machine machine;
  in_child([] {
    start();
    for (const int which :
         {AttrVmm, AttrVmmPosixFd, AttrMemOps64, AttrIpcEvents, AttrHostRegister, AttrUnifiedAddressing,
          AttrMemoryPools, AttrPoolHandleTypes}) {
      CHECK(attribute(which) == 1);
    }
    CHECK(attribute(AttrMpsEnabled) == 0);
    int value = 0;
    CHECK(driver().cuDeviceGetAttribute(&value, 0, 0) == InvalidValue);
  });
  machine.set("GPULOAN_SIM_WITHOUT", "vmm,memops,ipc-events,host-register,capture,ipc-memory,pools");
  machine.set("GPULOAN_SIM_MPS", "1");
  in_child([] {
    const Driver& cuda = start();
    for (const int which : {AttrVmm, AttrVmmPosixFd, AttrMemOps64, AttrIpcEvents, AttrHostRegister, AttrMemoryPools,
                            AttrPoolHandleTypes}) {
      CHECK(attribute(which) == 0);
    }
    CHECK(attribute(AttrMpsEnabled) == 1);
    MemHandle handle = 0;
    const AllocationProp prop = exportable();
    CHECK(cuda.cuMemCreate(&handle, 2 * kMiB, &prop, 0) == NotSupported);
    CHECK(cuda.cuMemRetainAllocationHandle(&handle, &handle) == NotSupported);
    DevicePtr pointer = 0;
    IpcMemHandle legacy = {};
    REQUIRE(cuda.cuMemAlloc(&pointer, 512) == Success);
    CHECK(cuda.cuIpcGetMemHandle(&legacy, pointer) == NotSupported);
    unsigned capable = 99;
    const int which_attribute = PointerLegacyIpcCapable;
    void* data = &capable;
    CHECK(cuda.cuPointerGetAttributes(1, &which_attribute, &data, pointer) == Success);
    CHECK(capable == 0);
    CHECK(cuda.cuMemAllocAsync(&pointer, 512, nullptr) == NotSupported);
    CHECK(cuda.cuStreamWriteValue64(nullptr, 0, 0, 0) == NotSupported);
    Event event = nullptr;
    CHECK(cuda.cuEventCreate(&event, EventDisableTiming | EventInterprocess) == NotSupported);
    CHECK(cuda.cuMemHostRegister(&handle, 8, 0) == NotSupported);
    int status = 0;
    CHECK(cuda.cuStreamIsCapturing(nullptr, &status) == NotSupported);
  });
}
