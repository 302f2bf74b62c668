// SPDX-License-Identifier: MIT
//
// One counter per function, and the rules of GPULOAN_SIM_FAIL looked up at every call: there are few of either.
#include <sim/config.hpp>
#include <sim/faults.hpp>

#include <atomic>

namespace gpuloan::sim {
namespace {

std::atomic<std::uint64_t> calls[kRows];

} // namespace

std::optional<CuResult> count_call(Row row) noexcept {
  const std::uint64_t number = calls[static_cast<int>(row)].fetch_add(1, std::memory_order_relaxed) + 1;
  for (const FaultRule& rule : config().faults) {
    if (rule.row == row && (number == rule.first || (rule.onwards && number > rule.first))) return rule.code;
  }
  return std::nullopt;
}

std::uint64_t calls_so_far(Row row) noexcept { return calls[static_cast<int>(row)].load(std::memory_order_relaxed); }

} // namespace gpuloan::sim
