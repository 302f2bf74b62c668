// SPDX-License-Identifier: MIT
//
// What a Driver says about itself. It is made by Loader (or by wrap) and never changes afterwards, so any thread may
// read it without a lock.
#include <driver/driver.hpp>

#include <driver/loader.hpp>

namespace gpuloan::driver {

const char* group_name(Group group) noexcept {
  switch (group) {
    case Group::Core: return "core";
    case Group::Copy: return "copies";
    case Group::Info: return "pointer information";
    case Group::Capture: return "graph capture queries";
    case Group::Vmm: return "virtual memory management";
    case Group::MemOps: return "stream memory operations";
    case Group::IpcEvents: return "interprocess events";
    case Group::HostRegister: return "host memory registration";
    case Group::ForeignVmm: return "export of VMM memory that others made";
    case Group::IpcMemory: return "legacy memory handles";
    case Group::Pools: return "memory pools";
    case Group::Count: break;
  }
  return "unknown";
}

std::string version_text(int version) {
  if (version <= 0) return "of unknown version";
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string Driver::describe() const {
  return std::string(simulated_ ? "simulated driver " : "driver ") + version_text(version_) + " at " + path_;
}

} // namespace gpuloan::driver
