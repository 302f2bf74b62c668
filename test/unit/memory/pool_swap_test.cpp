// SPDX-License-Identifier: MIT
//
// The pool swap, on the simulated driver. Each case is a process of its own, with its own driver, devices and faults.
#include <doctest/doctest.h>

#include <base/log.hpp>
#include <driver/gpu.hpp>
#include <memory/pool_swap.hpp>

#include "../../sim/child.hpp"

#include <dlfcn.h>
#include <unistd.h>
#include <vector>

using namespace gpuloan;
using namespace gpuloan::memory;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
std::vector<std::string> lines; // of the log

struct Machine {
  Machine() : driver(*driver::Driver::open(nullptr)), library(::dlopen(driver->path().c_str(), RTLD_NOW)) {
    log_set([](void*, gpuloan_log_level, const char* line) { lines.emplace_back(line); }, nullptr, GPULOAN_LOG_WARNING);
    find("cuMemAllocAsync", alloc);
    find("gpuloan_sim_live", live);
  }
  template <typename Function>
  void find(const char* name, Function& out) {
    out = reinterpret_cast<Function>(::dlsym(library, name));
    REQUIRE((out != nullptr));
  }
  // Makes a context current, as a framework would.
  void start(int device = 0) {
    cuda::Context context = nullptr;
    REQUIRE(driver->call.cuDevicePrimaryCtxRetain(&context, device) == cuda::Success);
    REQUIRE(driver->call.cuCtxPushCurrent(context) == cuda::Success);
  }
  [[nodiscard]] cuda::Context context() const {
    cuda::Context current = nullptr;
    REQUIRE(driver->call.cuCtxGetCurrent(&current) == cuda::Success);
    return current;
  }
  [[nodiscard]] cuda::Pool pool(int device = 0) const {
    cuda::Pool current = nullptr;
    REQUIRE(driver->call.cuDeviceGetMemPool(&current, device) == cuda::Success);
    return current;
  }
  [[nodiscard]] cuda::DevicePtr allocate(std::size_t bytes) const {
    cuda::DevicePtr pointer = 0;
    REQUIRE(alloc(&pointer, bytes, nullptr) == cuda::Success);
    return pointer;
  }
  void free(cuda::DevicePtr pointer) const {
    REQUIRE(driver->call.cuMemFreeAsync(pointer, nullptr) == cuda::Success);
    REQUIRE(driver->call.cuStreamSynchronize(nullptr) == cuda::Success);
  }
  [[nodiscard]] std::uint64_t attribute(cuda::Pool which, int name) const {
    std::uint64_t value = 0;
    REQUIRE(driver->call.cuMemPoolGetAttribute(which, name, &value) == cuda::Success);
    return value;
  }
  [[nodiscard]] std::size_t free_bytes() const {
    std::size_t bytes = 0, total = 0;
    REQUIRE(driver->call.cuMemGetInfo(&bytes, &total) == cuda::Success);
    return bytes;
  }

  std::shared_ptr<const driver::Driver> driver;
  void* library;
  cuda::CuResult (*alloc)(cuda::DevicePtr*, std::size_t, cuda::Stream) = nullptr;
  std::int64_t (*live)(const char*) = nullptr;
};

} // namespace

TEST_CASE("the device's pool is ours until it is uninstalled") {
  sim_test::Machine environment;
  sim_test::in_child([] {
    Machine machine;
    const cuda::Pool before = machine.pool();
    CHECK(machine.context() == nullptr);
    REQUIRE(install_pool(machine.driver, 0));
    CHECK(machine.context() == nullptr); // made, but not left current
    const cuda::Pool ours = machine.pool();
    CHECK(ours != before);
    CHECK(machine.attribute(ours, cuda::PoolReleaseThreshold) == UINT64_MAX);
    REQUIRE(lines.size() == 1);
    CHECK(lines[0].find("EXPERIMENTAL") != std::string::npos);
    CHECK(lines[0].find("TOO LATE") == std::string::npos);
    machine.start();
    const std::size_t free = machine.free_bytes();
    const cuda::DevicePtr memory = machine.allocate(8 * kMiB);
    CHECK(machine.attribute(ours, cuda::PoolUsedBytes) == 8 * kMiB);
    int fd = -1;
    REQUIRE(machine.driver->call.cuMemPoolExportToShareableHandle(&fd, ours, cuda::HandlePosixFd, 0) == cuda::Success);
    cuda::PoolPointer shared = {};
    CHECK(machine.driver->call.cuMemPoolExportPointer(&shared, memory) == cuda::Success);
    ::close(fd);
    machine.free(memory);
    CHECK(machine.free_bytes() == free - 8 * kMiB); // kept for the next allocation
    REQUIRE(uninstall_pool(machine.driver, 0));
    CHECK(machine.pool() == before);
    CHECK(machine.live("pools") == 0);
    CHECK(machine.free_bytes() == free);
    CHECK(machine.context() != nullptr);
    CHECK(lines.size() == 1);
  });
}

TEST_CASE("memory from before is counted in the warning, and stays where it was") {
  sim_test::Machine environment;
  sim_test::in_child([] {
    Machine machine;
    machine.start();
    const cuda::Pool before = machine.pool();
    const cuda::DevicePtr early = machine.allocate(5 * kMiB);
    REQUIRE(install_pool(machine.driver, 0));
    REQUIRE(lines.size() == 1);
    CHECK(lines[0].find("TOO LATE for " + std::to_string(5 * kMiB) + " bytes") != std::string::npos);
    CHECK(machine.attribute(before, cuda::PoolUsedBytes) == 5 * kMiB);
    CHECK(machine.attribute(machine.pool(), cuda::PoolUsedBytes) == 0);
    machine.free(early);
    REQUIRE(uninstall_pool(machine.driver, 0));
  });
}

TEST_CASE("what is asked for twice, too early, or of nothing") {
  sim_test::Machine environment;
  sim_test::in_child([] {
    Machine machine;
    CHECK(uninstall_pool(machine.driver, 0).error().status == GPULOAN_ERR_STATE);
    for (const int device : {-1, 1, 99}) {
      CHECK(install_pool(machine.driver, device).error().status == GPULOAN_ERR_NO_DEVICE);
      CHECK(uninstall_pool(machine.driver, device).error().status == GPULOAN_ERR_STATE);
    }
    REQUIRE(install_pool(machine.driver, 0));
    const cuda::Pool ours = machine.pool();
    const auto twice = install_pool(machine.driver, 0);
    CHECK(twice.error().status == GPULOAN_ERR_STATE);
    CHECK(twice.error().text.find("gpuloan_pool_uninstall") != std::string::npos);
    CHECK(machine.pool() == ours);
    CHECK(machine.live("pools") == 1);
    REQUIRE(uninstall_pool(machine.driver, 0));
    CHECK(uninstall_pool(machine.driver, 0).error().status == GPULOAN_ERR_STATE);
    REQUIRE(install_pool(machine.driver, 0)); // again
    REQUIRE(uninstall_pool(machine.driver, 0));
    CHECK(machine.live("pools") == 0);
  });
}

TEST_CASE("a forked child is told so, and changes nothing") {
  sim_test::Machine environment;
  sim_test::in_child([] {
    Machine machine;
    REQUIRE(install_pool(machine.driver, 0));
    const cuda::Pool ours = machine.pool();
    sim_test::in_child([&] {
      CHECK(install_pool(machine.driver, 0).error().status == GPULOAN_ERR_FORKED);
      CHECK(uninstall_pool(machine.driver, 0).error().status == GPULOAN_ERR_FORKED);
    });
    CHECK(machine.pool() == ours);
    REQUIRE(uninstall_pool(machine.driver, 0));
  });
}

TEST_CASE("the ordinal says which device, not the current context") {
  sim_test::Machine environment;
  environment.set("GPULOAN_SIM_DEVICES", "2");
  sim_test::in_child([] {
    Machine machine;
    machine.start(0);
    const cuda::Context current = machine.context();
    const cuda::Pool first = machine.pool(0), second = machine.pool(1);
    REQUIRE(install_pool(machine.driver, 1));
    CHECK(machine.pool(0) == first);
    CHECK(machine.pool(1) != second);
    CHECK(machine.context() == current);
    CHECK(uninstall_pool(machine.driver, 0).error().status == GPULOAN_ERR_STATE);
    REQUIRE(install_pool(machine.driver, 0));
    REQUIRE(uninstall_pool(machine.driver, 1));
    CHECK(machine.pool(0) != first);
    CHECK(machine.pool(1) == second);
    REQUIRE(uninstall_pool(machine.driver, 0));
    CHECK(machine.pool(0) == first);
  });
}

TEST_CASE("uninstalled with memory in use, the pool is kept until that is freed") {
  sim_test::Machine environment;
  environment.set("GPULOAN_SIM_QUIRKS", "strands-exports");
  sim_test::in_child([] {
    Machine machine;
    machine.start();
    const cuda::Pool before = machine.pool();
    const std::size_t free = machine.free_bytes();
    REQUIRE(install_pool(machine.driver, 0));
    const cuda::Pool ours = machine.pool();
    const cuda::DevicePtr memory = machine.allocate(4 * kMiB), freed = machine.allocate(2 * kMiB);
    machine.free(freed);
    REQUIRE(uninstall_pool(machine.driver, 0));
    CHECK(machine.pool() == before);
    REQUIRE(lines.size() == 2);
    CHECK(lines[1].find(std::to_string(4 * kMiB) + " bytes in use") != std::string::npos);
    int fd = -1;
    REQUIRE(machine.driver->call.cuMemPoolExportToShareableHandle(&fd, ours, cuda::HandlePosixFd, 0) == cuda::Success);
    ::close(fd);
    cuda::PoolPointer shared = {};
    CHECK(machine.driver->call.cuMemPoolExportPointer(&shared, memory) == cuda::Success); // it may still be lent
    machine.free(memory);
    CHECK(machine.free_bytes() == free - 4 * kMiB); // what was exported comes back with the pool alone (P8), the rest by itself
    CHECK(machine.live("pools") == 1);
    REQUIRE(install_pool(machine.driver, 0));
    CHECK(machine.live("pools") == 1); // the new one
    CHECK(machine.free_bytes() == free);
    REQUIRE(uninstall_pool(machine.driver, 0));
    CHECK(machine.live("pools") == 0);
  });
}

TEST_CASE("a pool that others made current stays so") {
  sim_test::Machine environment;
  sim_test::in_child([] {
    Machine machine;
    REQUIRE(install_pool(machine.driver, 0));
    cuda::PoolProps props = {};
    props.type = cuda::AllocationPinned;
    props.location = {cuda::LocationDevice, 0};
    cuda::Pool theirs = nullptr;
    REQUIRE(machine.driver->call.cuMemPoolCreate(&theirs, &props) == cuda::Success);
    REQUIRE(machine.driver->call.cuDeviceSetMemPool(0, theirs) == cuda::Success);
    REQUIRE(uninstall_pool(machine.driver, 0));
    CHECK(machine.pool() == theirs);
    CHECK(machine.live("pools") == 1);
  });
}

TEST_CASE("a driver without pools") {
  sim_test::Machine environment;
  environment.set("GPULOAN_SIM_WITHOUT", "pools");
  sim_test::in_child([] {
    auto driver = *driver::Driver::open(nullptr);
    const auto refused = install_pool(driver, 0);
    REQUIRE(!refused);
    CHECK(refused.error().status == GPULOAN_ERR_UNSUPPORTED);
    CHECK(refused.error().text.find("no memory pools that can be shared") != std::string::npos);
    CHECK(uninstall_pool(driver, 0).error().status == GPULOAN_ERR_STATE);
  });
}

TEST_CASE("a call of the driver that fails leaves everything as it was") {
  struct {
    const char* fault;
    bool installs; // the fault comes later
  } const rows[] = {{"cuDevicePrimaryCtxRetain:1:999", false}, {"cuCtxPushCurrent:1:999", false}, {"cuDeviceGetMemPool:2:999", false},
                    {"cuMemPoolGetAttribute:1:999", false},    {"cuMemPoolCreate:1:999", false},  {"cuMemPoolSetAttribute:1:999", false},
                    {"cuDeviceSetMemPool:1:999", false},       {"cuDevicePrimaryCtxRetain:2:999", true}, {"cuMemPoolGetAttribute:2:999", true},
                    {"cuDeviceSetMemPool:2:999", true},        {"cuDeviceGetMemPool:4:999", true}};
  for (const auto& row : rows) {
    CAPTURE(row.fault);
    sim_test::Machine environment;
    environment.set("GPULOAN_SIM_FAIL", row.fault);
    sim_test::in_child([&] {
      Machine machine;
      const cuda::Pool before = machine.pool(); // cuDeviceGetMemPool: 1
      const auto installed = install_pool(machine.driver, 0);
      CHECK(installed.has_value() == row.installs);
      if (!installed) {
        CHECK(installed.error().status == GPULOAN_ERR_DRIVER);
        CHECK(machine.pool() == before);
        CHECK(machine.live("pools") == 0);
        CHECK(machine.live("contexts") == 0);
        REQUIRE(install_pool(machine.driver, 0));
      }
      const cuda::Pool ours = machine.pool(); // 3 where nothing failed before
      if (row.installs) {
        CHECK(uninstall_pool(machine.driver, 0).error().status == GPULOAN_ERR_DRIVER);
        CHECK(machine.pool() == ours);
      }
      REQUIRE(uninstall_pool(machine.driver, 0));
      CHECK(machine.pool() == before);
      CHECK(machine.live("pools") == 0);
      CHECK(machine.live("contexts") == 0);
    });
  }
}
