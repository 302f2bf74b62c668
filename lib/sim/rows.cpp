// SPDX-License-Identifier: MIT
//
// The table behind rows.hpp, in the order of its enum because both include the same files.
#include <sim/rows.hpp>

namespace gpuloan::sim {
namespace {

#define GPULOAN_CUDA(need, since, group, name, exported, params) {#name, since, Group::group},
constexpr RowInfo kInfo[] = {
#include <driver/symbols.inc>
#include <sim/extra_symbols.inc>
};
#undef GPULOAN_CUDA

} // namespace

const RowInfo& row_info(Row row) noexcept { return kInfo[static_cast<int>(row)]; }

Row row_by_name(std::string_view name) noexcept {
  for (int index = 0; index < kRows; ++index) {
    if (name == kInfo[index].name) return static_cast<Row>(index);
  }
  return Row::Count;
}

} // namespace gpuloan::sim
