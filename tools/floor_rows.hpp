// SPDX-License-Identifier: MIT
//
// The floors by name, and what is lost without each.
#pragma once

#include <gpuloan/gpuloan.h>

#include <string>

namespace gpuloan::tool {

struct FloorRow {
  std::uint32_t bit;
  const char* name;
  const char* gives;
  const char* lost;
  bool needs_proof = false; // of a peer's death, which MPS takes away
};
inline constexpr FloorRow kFloors[] = {
    {GPULOAN_FLOOR_VMM, "vmm", "the vmm rung: zero-copy loans of the arena", "zero-copy loans of the arena: the host rung copies them", false},
    {GPULOAN_FLOOR_MEMOPS, "memops", "the memop gate: the fastest READY and DONE",
     "the memop gate: loans use the event or host gate", false},
    {GPULOAN_FLOOR_IPC_EVENTS, "ipc-events", "the event gate", "the event gate: loans use the memop or host gate", false},
    {GPULOAN_FLOOR_HOST_REGISTER, "host-register", "the host rung's pinned ring, control words",
     "pinned memory: the host rung is slower; and the memop gate", false},
    {GPULOAN_FLOOR_CAPTURE_QUERY, "capture-query", "refusing streams in graph capture",
     "refusing streams in capture: do not pass one", false},
    {GPULOAN_FLOOR_FOREIGN_VMM, "foreign-vmm", "finding out what VMM memory of other allocators is",
     "nothing else: such memory is copied by the host rung", true},
    {GPULOAN_FLOOR_IPC_MEMORY, "ipc-memory", "the ipc rung: cuMemAlloc memory without a copy",
     "the ipc rung: cuMemAlloc memory is copied by the host rung", true},
    {GPULOAN_FLOOR_POOLS, "pools", "memory pools that can be shared", "sharing memory pools", true},
};
inline constexpr char kMpsLost[] =
    "the ipc and pool rungs, and VMM memory of other allocators without a copy: nothing tells when a dead client's work has ended";

// Whether loans can rest on the floor: it is there, and MPS does not stand against it.
[[nodiscard]] inline bool usable(const gpuloan_device_info& device, const FloorRow& floor) {
  return (device.floors & floor.bit) != 0 && !(device.mps != 0 && floor.needs_proof);
}
// Why the device lacks `floors`: of those alone, from its floor_reason.
[[nodiscard]] std::string missing_text(const gpuloan_device_info& device, std::uint32_t floors);

} // namespace gpuloan::tool
