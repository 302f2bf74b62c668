// SPDX-License-Identifier: MIT
//
// A cell of the matrix {rung} x {gate} x {engine} on the command line of a test program, and whether it can run here.
#pragma once

#include "bench.hpp"

namespace loan_test {

inline constexpr int kSkipped = 77; // exit status

template <typename Value>
struct Choice {
  const char* name;
  Value value;
};
inline constexpr Choice<gpuloan_rung> kRungs[] = {
    {"vmm", GPULOAN_RUNG_VMM}, {"pool", GPULOAN_RUNG_POOL}, {"ipc", GPULOAN_RUNG_IPC}, {"host", GPULOAN_RUNG_HOST}};
inline constexpr Choice<gpuloan_gate> kGates[] = {
    {"memop", GPULOAN_GATE_MEMOP}, {"event", GPULOAN_GATE_EVENT}, {"host", GPULOAN_GATE_HOST}};
inline constexpr Choice<gpuloan_engine> kEngines[] = {{"epoll", GPULOAN_ENGINE_EPOLL}, {"io_uring", GPULOAN_ENGINE_IO_URING}};

// What GPULOAN_DRIVER says, else the simulated one.
[[nodiscard]] std::string default_driver();
// Takes --driver, --rung, --gate and --engine; false for another word.
[[nodiscard]] bool take_cell_option(std::string_view word, const char* value, Cell& cell);
// Why the cell cannot run here; "" when it can.
[[nodiscard]] std::string missing(const Cell& cell);

} // namespace loan_test
