// SPDX-License-Identifier: MIT
//
// The contract suite with both sides in one process: the exporter in the main thread, the worker in another, each with
// its library threads. For tools that see one process only (TSan, ASan, valgrind). What needs a process to die is left out.
//
//   one_process_test --rung vmm|host --gate memop|event|host --engine epoll|io_uring [--only TEXT]
#include "../contract/suite.hpp"

#include <cstdio>

namespace loan_test {
namespace {

int run(int count, char** words) {
  const TempFolder folder("gpuloan-one-process");
  use_private_sim(folder);
  Cell cell;
  std::string only;
  for (int at = 1; at + 1 < count; at += 2) {
    const std::string_view word = words[at];
    const std::string_view value = words[at + 1];
    if (word == "--rung") cell.rung = value == "host" ? GPULOAN_RUNG_HOST : GPULOAN_RUNG_VMM;
    else if (word == "--gate") cell.gate = value == "host" ? GPULOAN_GATE_HOST : value == "event" ? GPULOAN_GATE_EVENT : GPULOAN_GATE_MEMOP;
    else if (word == "--engine") cell.engine = value == "io_uring" ? GPULOAN_ENGINE_IO_URING : GPULOAN_ENGINE_EPOLL;
    else if (word == "--only") only = value;
    else fail("the argument '" + std::string(word) + "' is not understood");
  }
  Gpu gpu(cell.driver.c_str());
  gpu.warm_up();
  auto options = init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_EXPORTER;
  options.engine = cell.engine;
  options.driver = cell.driver.c_str();
  gpuloan_context* context = nullptr;
  if (gpuloan_context_create(&options, &context) == GPULOAN_ERR_UNSUPPORTED) {
    std::printf("1..0 # SKIP %s\n", gpuloan_error_text());
    return 77;
  }
  gpuloan_context_destroy(context);
  std::printf("# cell %s in one process\n", cell_name(cell).c_str());
  return run_cases({cell, gpu, Habitat::Thread}, contract_cases(), only).exit_status();
}

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
