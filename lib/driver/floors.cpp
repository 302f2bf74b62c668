// SPDX-License-Identifier: MIT
//
// The floors of one device. A floor is on when the symbols are there, the device's attributes say so and, for VMM, a
// trial query succeeds: vGPUs of new drivers report VMM and refuse its granularity (R21). Version numbers decide
// nothing. No context is made.
#include <driver/gpu.hpp>

#include <cstdio>
#include <cstdlib>
#include <unistd.h>

namespace gpuloan::driver {
namespace {

constexpr std::uint32_t kAll = GPULOAN_FLOOR_VMM | GPULOAN_FLOOR_MEMOPS | GPULOAN_FLOOR_IPC_EVENTS |
                               GPULOAN_FLOOR_HOST_REGISTER | GPULOAN_FLOOR_CAPTURE_QUERY |
                               GPULOAN_FLOOR_FOREIGN_VMM | GPULOAN_FLOOR_IPC_MEMORY | GPULOAN_FLOOR_POOLS;

class Prober {
 public:
  Prober(const Driver& driver, Device device) : driver_(driver), device_(device) {}

  // A query that fails counts as 0 (K2: WSL2 answers INVALID_VALUE for attributes it does not know).
  [[nodiscard]] int attribute(DeviceAttribute which) const {
    int value = 0;
    return query(which, value) ? value : 0;
  }
  [[nodiscard]] bool query(DeviceAttribute which, int& value) const {
    return driver_.call.cuDeviceGetAttribute(&value, which, device_) == Success;
  }

  // "" when the floor is there, else why not.
  [[nodiscard]] std::string vmm(std::size_t& granularity) const;
  [[nodiscard]] std::string memops() const;
  [[nodiscard]] std::string ipc_events() const;
  [[nodiscard]] std::string host_register() const;
  [[nodiscard]] std::string ipc_memory() const;
  [[nodiscard]] std::string pools() const;
  [[nodiscard]] bool mps() const;
  [[nodiscard]] std::string lacks(Group group) const {
    return driver_.has(group) ? std::string() : "the driver lacks " + driver_.missing(group);
  }

 private:
  const Driver& driver_;
  Device device_;
};

std::string Prober::vmm(std::size_t& granularity) const {
  if (auto why = lacks(Group::Vmm); !why.empty()) return why;
  if (attribute(AttrVmm) == 0) return "device attribute 102 (virtual memory management) is off";
  if (attribute(AttrVmmPosixFd) == 0) return "device attribute 103 (memory handles as file descriptors) is off";
  AllocationProp prop = {};
  prop.type = AllocationPinned;
  prop.requested_handle_types = HandlePosixFd;
  prop.location = {LocationDevice, device_};
  std::size_t bytes = 0;
  const CuResult code = driver_.call.cuMemGetAllocationGranularity(&bytes, &prop, GranularityMinimum);
  if (code != Success) return driver_.error("cuMemGetAllocationGranularity", code).text;
  if (bytes == 0) return "cuMemGetAllocationGranularity says 0";
  granularity = bytes;
  return {};
}

std::string Prober::memops() const {
  if (auto why = lacks(Group::MemOps); !why.empty()) return why;
  return attribute(AttrMemOps64) != 0 ? "" : "device attribute 122 (64-bit stream memory operations) is off";
}

std::string Prober::ipc_events() const {
  if (auto why = lacks(Group::IpcEvents); !why.empty()) return why;
  int value = 0;
  if (query(AttrIpcEvents, value)) return value != 0 ? "" : "device attribute 125 (interprocess events) is off";
  // Drivers before 12.x do not know the attribute; there the documented condition was unified addressing.
  return attribute(AttrUnifiedAddressing) != 0 ? "" : "device attribute 41 (unified addressing) is off";
}

std::string Prober::host_register() const {
  if (auto why = lacks(Group::HostRegister); !why.empty()) return why;
  if (attribute(AttrHostRegister) != 0 || attribute(AttrHostPointerForRegistered) != 0) return {};
  return "device attributes 99 and 91 (registering host memory) are off";
}

std::string Prober::ipc_memory() const {
  if (auto why = lacks(Group::IpcMemory); !why.empty()) return why;
  if (attribute(AttrIntegrated) != 0) return "the device is integrated: it has no legacy memory handles (K4)";
  return attribute(AttrUnifiedAddressing) != 0 ? "" : "device attribute 41 (unified addressing) is off";
}

std::string Prober::pools() const {
  if (auto why = lacks(Group::Pools); !why.empty()) return why;
  if (attribute(AttrMemoryPools) == 0) return "device attribute 115 (memory pools) is off";
  return (attribute(AttrPoolHandleTypes) & HandlePosixFd) != 0 ? "" : "device attribute 119 (pool handles) lacks file descriptors";
}

// Older drivers do not know the attribute; there the control daemon's pipe tells.
bool Prober::mps() const {
  int value = 0;
  if (query(AttrMpsEnabled, value)) return value != 0;
  const char* folder = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  const std::string pipe = std::string(folder != nullptr && *folder != '\0' ? folder : "/tmp/nvidia-mps") + "/control";
  return ::access(pipe.c_str(), F_OK) == 0;
}

// The text names the floor first, as gpuloan probe does, so that it can be found in it.
void settle(Floors& floors, gpuloan_floor floor, const char* name, const char* lost, const std::string& why) {
  if (why.empty()) {
    floors.bits |= static_cast<std::uint32_t>(floor);
    return;
  }
  floors.reason += (floors.reason.empty() ? "" : "; ") + std::string(name) + ": " + lost + ": " + why;
}

// One that cannot be asked about is taken for one that is not seen.
std::vector<Neighbour> find_neighbours(const Driver& driver, int count, int own, Device device) {
  std::vector<Neighbour> found;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Neighbour other;
    Device handle = 0;
    int can = 0;
    if (ordinal == own || driver.call.cuDeviceGet(&handle, ordinal) != Success) continue;
    if (driver.call.cuDeviceGetUuid(&other.uuid, handle) != Success) continue;
    other.ordinal = ordinal;
    other.reachable = driver.call.cuDeviceCanAccessPeer(&can, device, handle) == Success && can != 0;
    found.push_back(other);
  }
  return found;
}

} // namespace

std::string Floors::uuid_text() const {
  std::string text = name.find(" MIG ") == std::string::npos ? "GPU" : "MIG";
  for (int index = 0; index < 16; ++index) {
    char digits[4];
    std::snprintf(digits, sizeof digits, "%s%02x", index == 0 || index == 4 || index == 6 || index == 8 || index == 10 ? "-" : "", static_cast<unsigned>(uuid.bytes[index]));
    text += digits;
  }
  return text;
}

Result<Floors> probe_floors(const Driver& driver, int ordinal) {
  int count = 0;
  GPULOAN_TRY(GPULOAN_CU(driver, cuDeviceGetCount, &count));
  if (ordinal < 0 || ordinal >= count) {
    return fail(GPULOAN_ERR_NO_DEVICE, "device " + std::to_string(ordinal) + " does not exist: the driver shows " +
                                           std::to_string(count) + " device(s) [" + driver.describe() + "]");
  }
  Device device = 0;
  GPULOAN_TRY(GPULOAN_CU(driver, cuDeviceGet, &device, ordinal));
  Floors floors;
  GPULOAN_TRY(GPULOAN_CU(driver, cuDeviceGetUuid, &floors.uuid, device));
  GPULOAN_TRY(GPULOAN_CU(driver, cuDeviceTotalMem, &floors.total_bytes, device));
  char name[128] = {};
  GPULOAN_TRY(GPULOAN_CU(driver, cuDeviceGetName, name, static_cast<int>(sizeof name) - 1, device));
  floors.name = name;

  const Prober probe(driver, device);
  floors.compute_mode = probe.attribute(AttrComputeMode);
  floors.integrated = probe.attribute(AttrIntegrated);
  settle(floors, GPULOAN_FLOOR_VMM, "vmm", "the arena is not lent without a copy (vmm rung)", probe.vmm(floors.granularity));
  settle(floors, GPULOAN_FLOOR_MEMOPS, "memops", "no ordering by the GPU's own writes (memop gate)", probe.memops());
  settle(floors, GPULOAN_FLOOR_IPC_EVENTS, "ipc-events", "no interprocess events (event gate)", probe.ipc_events());
  settle(floors, GPULOAN_FLOOR_HOST_REGISTER, "host-register", "no pinned rings and control words (host rung at full speed, memop gate)",
         probe.host_register());
  settle(floors, GPULOAN_FLOOR_CAPTURE_QUERY, "capture-query", "streams in graph capture are not recognised, do not pass any",
         probe.lacks(Group::Capture));
  settle(floors, GPULOAN_FLOOR_FOREIGN_VMM, "foreign-vmm", "VMM memory of other allocators is copied", probe.lacks(Group::ForeignVmm));
  settle(floors, GPULOAN_FLOOR_IPC_MEMORY, "ipc-memory", "cuMemAlloc memory is copied (no ipc rung)", probe.ipc_memory());
  settle(floors, GPULOAN_FLOOR_POOLS, "pools", "pool memory is copied (no pool rung)", probe.pools());
  floors.mps = probe.mps();
  floors.neighbours = find_neighbours(driver, count, ordinal, device);
  floors.missing = kAll & ~floors.bits;
  return floors;
}

} // namespace gpuloan::driver
