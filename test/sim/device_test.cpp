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
