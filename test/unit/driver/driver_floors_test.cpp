// SPDX-License-Identifier: MIT
//
// Floors and the choice of a device, on the recorder: each floor off for each reason it can be off for.
#include <doctest/doctest.h>

#include "recorder.hpp"

#include <driver/gpu.hpp>

#include <algorithm>

using namespace gpuloan;
using namespace gpuloan::driver;
using recorder::state;

namespace {

constexpr unsigned kAll = 255;

Floors probe(const Table& table) {
  auto floors = probe_floors(*Driver::wrap(table), 0);
  REQUIRE(floors.has_value());
  CHECK((floors->bits | floors->missing) == kAll);
  CHECK((floors->bits & floors->missing) == 0);
  return *floors;
}

void check_off(const Floors& floors, gpuloan_floor floor, const std::string& words) {
  CHECK_FALSE(floors.has(floor));
  CHECK(floors.missing == static_cast<unsigned>(floor));
  INFO(floors.reason);
  CHECK(floors.reason.find(words) != std::string::npos);
}

} // namespace

TEST_CASE("all floors") {
  const Floors floors = probe(recorder::fresh_table());
  CHECK(floors.bits == kAll);
  CHECK(floors.reason.empty());
  CHECK(floors.granularity == recorder::kGranularity);
  CHECK(floors.total_bytes == std::size_t{1} << 30);
  CHECK(floors.compute_mode == 3);
  CHECK(floors.name == "R");
  CHECK(floors.uuid.bytes[2] == 3);
  CHECK(state().count("cuDevicePrimaryCtxRetain") == 0);
}

// J8, K2, K3, R21
TEST_CASE("vmm") {
  Table table = recorder::fresh_table();
  SUBCASE("symbol") {
    table.cuMemSetAccess = nullptr;
    check_off(probe(table), GPULOAN_FLOOR_VMM, "the driver lacks cuMemSetAccess");
  }
  SUBCASE("attribute") {
    state().attributes[AttrVmm] = 0;
    check_off(probe(table), GPULOAN_FLOOR_VMM, "102");
  }
  SUBCASE("attribute that the driver does not know") {
    state().attributes.erase(AttrVmmPosixFd);
    check_off(probe(table), GPULOAN_FLOOR_VMM, "103");
  }
  SUBCASE("vGPU: the granularity query is refused") {
    state().fail["cuMemGetAllocationGranularity"] = NotSupported;
    const Floors floors = probe(table);
    check_off(floors, GPULOAN_FLOOR_VMM, "CUDA_ERROR_NOT_SUPPORTED (801)");
    CHECK(floors.granularity == 0);
    CHECK(floors.reason.find("vmm: the arena is not lent without a copy") != std::string::npos);
  }
}

// C10, R23
TEST_CASE("memops") {
  Table table = recorder::fresh_table();
  SUBCASE("symbol") {
    table.cuStreamWriteValue64 = nullptr;
    check_off(probe(table), GPULOAN_FLOOR_MEMOPS, "cuStreamWriteValue64");
  }
  SUBCASE("attribute") {
    state().attributes[AttrMemOps64] = 0;
    check_off(probe(table), GPULOAN_FLOOR_MEMOPS, "122");
  }
}

// J8
TEST_CASE("interprocess events") {
  Table table = recorder::fresh_table();
  SUBCASE("symbol") {
    table.cuIpcGetEventHandle = nullptr;
    check_off(probe(table), GPULOAN_FLOOR_IPC_EVENTS, "cuIpcGetEventHandle");
  }
  SUBCASE("attribute") {
    state().attributes[AttrIpcEvents] = 0;
    check_off(probe(table), GPULOAN_FLOOR_IPC_EVENTS, "125");
  }
  SUBCASE("older driver: unified addressing decides") {
    state().attributes.erase(AttrIpcEvents);
    CHECK(probe(table).has(GPULOAN_FLOOR_IPC_EVENTS));
    state().attributes[AttrUnifiedAddressing] = 0; // legacy handles need it anyway
    const Floors floors = probe(table);
    CHECK(floors.missing == (GPULOAN_FLOOR_IPC_EVENTS | GPULOAN_FLOOR_IPC_MEMORY));
    CHECK(floors.reason.find("unified addressing") != std::string::npos);
  }
}

TEST_CASE("host registration") {
  Table table = recorder::fresh_table();
  SUBCASE("symbol") {
    table.cuMemHostRegister = nullptr;
    check_off(probe(table), GPULOAN_FLOOR_HOST_REGISTER, "cuMemHostRegister");
  }
  SUBCASE("either attribute is enough") {
    state().attributes[AttrHostRegister] = 0;
    CHECK(probe(table).has(GPULOAN_FLOOR_HOST_REGISTER));
    state().attributes.erase(AttrHostPointerForRegistered);
    check_off(probe(table), GPULOAN_FLOOR_HOST_REGISTER, "99 and 91");
  }
}

// J8, K4
TEST_CASE("memory of other allocators") {
  Table table = recorder::fresh_table();
  SUBCASE("VMM") {
    table.cuMemRetainAllocationHandle = nullptr;
    check_off(probe(table), GPULOAN_FLOOR_FOREIGN_VMM, "cuMemRetainAllocationHandle");
  }
  SUBCASE("legacy handles") {
    table.cuIpcOpenMemHandle = nullptr;
    check_off(probe(table), GPULOAN_FLOOR_IPC_MEMORY, "cuIpcOpenMemHandle");
  }
  SUBCASE("legacy handles of an integrated device") {
    state().attributes[AttrIntegrated] = 1;
    check_off(probe(table), GPULOAN_FLOOR_IPC_MEMORY, "integrated");
  }
  SUBCASE("pools") {
    table.cuMemPoolImportPointer = nullptr;
    check_off(probe(table), GPULOAN_FLOOR_POOLS, "cuMemPoolImportPointer");
  }
  SUBCASE("pools without descriptors") {
    state().attributes[AttrPoolHandleTypes] = 0;
    check_off(probe(table), GPULOAN_FLOOR_POOLS, "119");
  }
  SUBCASE("MPS") {
    CHECK_FALSE(probe(table).mps);
    state().attributes[AttrMpsEnabled] = 1;
    CHECK(probe(table).mps);
  }
}

// K2
TEST_CASE("capture queries, and several floors at once") {
  Table table = recorder::fresh_table();
  table.cuStreamIsCapturing = nullptr;
  check_off(probe(table), GPULOAN_FLOOR_CAPTURE_QUERY, "cuStreamIsCapturing");
  state().attributes.clear();
  const Floors floors = probe(table);
  CHECK(floors.bits == GPULOAN_FLOOR_FOREIGN_VMM); // a matter of symbols alone
  CHECK(std::count(floors.reason.begin(), floors.reason.end(), ';') == 6);
}

TEST_CASE("a failing call that is no attribute query is an error") {
  for (const char* name : {"cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid", "cuDeviceTotalMem", "cuDeviceGetName"}) {
    CAPTURE(name);
    const auto driver = Driver::wrap(recorder::fresh_table());
    state().fail[name] = Unknown;
    const auto floors = probe_floors(*driver, 0);
    REQUIRE_FALSE(floors.has_value());
    CHECK(floors.error().status == GPULOAN_ERR_DRIVER);
    CHECK(floors.error().text.find(std::string(name) + ": CUDA_ERROR_UNKNOWN (999)") == 0);
  }
}

// G5, G6
TEST_CASE("neighbours: the other devices that are seen, and whether the device reaches them") {
  Table table = recorder::fresh_table();
  state().device_count = 4;
  table.cuDeviceGetUuid = [](Uuid* out, Device device) -> CuResult {
    if (device == recorder::kDevice + 3) return Unknown; // one that cannot be asked about is not seen
    *out = {{static_cast<unsigned char>(device)}};
    return Success;
  };
  table.cuDeviceCanAccessPeer = [](int* out, Device device, Device peer) -> CuResult {
    *out = 1;
    return device == recorder::kDevice && peer == recorder::kDevice + 1 ? Success : NotSupported;
  };
  const Floors floors = probe(table);
  REQUIRE(floors.neighbours.size() == 2);
  CHECK(floors.neighbours[0].ordinal == 1);
  CHECK(floors.neighbours[0].uuid.bytes[0] == recorder::kDevice + 1);
  CHECK(floors.neighbours[0].reachable);
  CHECK(floors.neighbours[1].ordinal == 2);
  CHECK_FALSE(floors.neighbours[1].reachable); // refused is no access
  CHECK(floors.uuid_text() == "GPU-28000000-0000-0000-0000-000000000000");
  table.cuDeviceGetName = [](char* out, int length, Device) -> CuResult {
    std::snprintf(out, static_cast<std::size_t>(length), "NVIDIA A100 MIG 1g.5gb");
    return Success;
  };
  CHECK(probe(table).uuid_text() == "MIG-28000000-0000-0000-0000-000000000000");
}

TEST_CASE("open: an ordinal that does not exist") {
  for (const int ordinal : {-1, 1, 3}) {
    const auto gpu = Gpu::open(Driver::wrap(recorder::fresh_table()), ordinal);
    REQUIRE_FALSE(gpu.has_value());
    CHECK(gpu.error().status == GPULOAN_ERR_NO_DEVICE);
    CHECK(gpu.error().text.find("device " + std::to_string(ordinal) + " does not exist: the driver shows 1 device(s)") == 0);
  }
}

TEST_CASE("open: by ordinal, the primary context at first use only") {
  auto gpu = Gpu::open(Driver::wrap(recorder::fresh_table()), 0);
  REQUIRE(gpu.has_value());
  CHECK((*gpu)->device() == recorder::kDevice);
  CHECK((*gpu)->ordinal() == 0);
  CHECK_FALSE((*gpu)->context_made());
  CHECK(state().alive.empty());
  {
    const Gpu::Scope scope(**gpu);
    CHECK(scope.ok().has_value());
    CHECK((*gpu)->context_made());
    CHECK(state().capture_mode == CaptureRelaxed);
    { const Gpu::Scope inner(**gpu); }
    CHECK(state().contexts.size() == 1); // the inner one found it current, and left it
    CHECK(state().capture_mode == CaptureRelaxed);
    CHECK(state().count("cuCtxPushCurrent") == 1);
    CHECK(state().count("cuDevicePrimaryCtxRetain") == 1);
  }
  CHECK(state().contexts.empty());
  CHECK(state().capture_mode == CaptureGlobal);
  gpu->reset();
  CHECK(state().count("cuDevicePrimaryCtxRelease") == 1);
  CHECK(state().alive.empty());
}

TEST_CASE("open: the caller's current context comes before the ordinal, and is never released") {
  const auto driver = Driver::wrap(recorder::fresh_table());
  const auto callers = reinterpret_cast<Context>(std::uintptr_t{0x500});
  state().contexts.push_back(callers);
  {
    const auto gpu = Gpu::open(driver, 17);
    REQUIRE(gpu.has_value());
    CHECK((*gpu)->ordinal() == 0);
    CHECK((*gpu)->context_made());
    state().contexts.clear(); // another thread
    const Gpu::Scope scope(**gpu);
    REQUIRE(scope.ok().has_value());
    CHECK(state().contexts.back() == callers);
  }
  CHECK(state().count("cuDevicePrimaryCtxRetain") == 0);
  CHECK(state().count("cuDevicePrimaryCtxRelease") == 0);
}

// G4
TEST_CASE("open: a device that is meant, whatever context is current") {
  const auto driver = Driver::wrap(recorder::fresh_table());
  const auto callers = reinterpret_cast<Context>(std::uintptr_t{0x500});
  state().device_count = 2;
  state().contexts.push_back(callers); // of device 0
  const auto same = Gpu::open(driver, 0, true);
  REQUIRE(same.has_value());
  CHECK((*same)->context_made());
  const auto other = Gpu::open(driver, 1, true);
  REQUIRE(other.has_value());
  CHECK((*other)->ordinal() == 1);
  CHECK((*other)->device() == recorder::kDevice + 1);
  CHECK_FALSE((*other)->context_made());
  {
    const Gpu::Scope scope(**other);
    REQUIRE(scope.ok().has_value());
    CHECK(state().contexts.back() != callers);
  }
  CHECK(state().contexts.back() == callers);
}

TEST_CASE("scope: each call fails in turn, context and mode are put back") {
  const char* const calls[] = {"cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"};
  for (const char* name : calls) {
    CAPTURE(name);
    const auto gpu = Gpu::open(Driver::wrap(recorder::fresh_table()), 0);
    REQUIRE(gpu.has_value());
    state().fail[name] = OutOfMemory;
    {
      const Gpu::Scope scope(**gpu);
      REQUIRE_FALSE(scope.ok().has_value());
      CHECK(scope.ok().error().status == GPULOAN_ERR_DEVICE_MEMORY);
      CHECK(scope.ok().error().text.find(name) == 0);
    }
    CHECK(state().contexts.empty());
    CHECK(state().capture_mode == CaptureGlobal);
  }
}

TEST_CASE("scope without capture functions") {
  Table table = recorder::fresh_table();
  table.cuThreadExchangeStreamCaptureMode = nullptr;
  const auto gpu = Gpu::open(Driver::wrap(table), 0);
  REQUIRE(gpu.has_value());
  const Gpu::Scope scope(**gpu);
  CHECK(scope.ok().has_value());
}

TEST_CASE("statuses of results") {
  const auto driver = Driver::wrap(recorder::fresh_table());
  const auto status = [&](int code) { return driver->error("cuX", code).status; };
  CHECK(status(2) == GPULOAN_ERR_DEVICE_MEMORY);
  for (const int sticky : {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810}) {
    CHECK(status(sticky) == GPULOAN_ERR_DEVICE_LOST);
  }
  for (int code = 900; code <= 908; ++code) CHECK(status(code) == GPULOAN_ERR_CAPTURE);
  for (const int other : {1, 3, 4, 46, 201, 304, 400, 500, 600, 701, 712, 720, 801, 805, 899, 909, 999, 12345}) {
    CHECK(status(other) == GPULOAN_ERR_DRIVER);
  }
  CHECK(driver->error("cuX", 12345).text.find("cuX: CUresult (12345) [driver 13.0 at ") == 0);
  CHECK(driver->check("cuX", 0).has_value());
}
