// SPDX-License-Identifier: MIT
//
// Every function that this driver exports, as one enum and one table. The rows come from the project's own symbol table
// (driver/symbols.inc) and from extra_symbols.inc, so a function that the loader looks for cannot be missing here.
#pragma once

#include <driver/types.hpp>

#include <string_view>

namespace gpuloan::sim {

using namespace gpuloan::cuda;

enum class Group { Core, Vmm, MemOps, IpcEvents, HostRegister, Capture, Info, Copy, ForeignVmm, IpcMemory, Pools };

#define GPULOAN_CUDA(need, since, group, name, exported, params) name,
enum class Row : int {
#include <driver/symbols.inc>
#include <sim/extra_symbols.inc>
  Count
};
#undef GPULOAN_CUDA

inline constexpr int kRows = static_cast<int>(Row::Count);

struct RowInfo {
  const char* name;
  int since; // 1000 * major + 10 * minor
  Group group;
};

[[nodiscard]] const RowInfo& row_info(Row row) noexcept;
// Row::Count when no function has this base name.
[[nodiscard]] Row row_by_name(std::string_view name) noexcept;

} // namespace gpuloan::sim
