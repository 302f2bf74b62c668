// SPDX-License-Identifier: MIT
//
// The cases of several devices. Each runs in a process of its own, since what a process sees of a machine is fixed at its
// first driver call; device_main.cpp starts them.
#pragma once

#include "../support/bench.hpp"

namespace loan_test {

struct DeviceCase {
  const char* name;
  void (*run)(const Cell& cell);
  int real_devices = 0;           // that a real machine needs; 0: the simulated one alone
  const char* visible = nullptr;  // CUDA_VISIBLE_DEVICES of the exporter
  const char* machine = nullptr;  // of the simulated one: "VARIABLE=value VARIABLE=value"
};

// The UUIDs of the machine's devices, in the order of a process that sees all.
inline constexpr char kUuidsVariable[] = "GPULOAN_TEST_UUIDS";
[[nodiscard]] std::vector<std::string> machine_uuids();

void opposite_orders(const Cell& cell);
void subsets(const Cell& cell);
void forms_of_the_variable(const Cell& cell);
void slices(const Cell& cell);
void across_devices(const Cell& cell);
void without_peer_access(const Cell& cell);
void one_way_access(const Cell& cell);
void callers_contexts(const Cell& cell);
void a_context_per_device(const Cell& cell);
void one_process(const Cell& cell);
void opened_by_others(const Cell& cell);
void exclusive_process(const Cell& cell);

} // namespace loan_test
