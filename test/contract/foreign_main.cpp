// SPDX-License-Identifier: MIT
//
// foreign_test: the tests of memory that gpuloan did not make, as a program that runs anywhere with libgpuloan.so.0 and a
// driver.
//
//   foreign_test --driver sim|real|PATH --gate memop|event|host --engine epoll|io_uring [--only TEXT]
//       as TAP. Exit status 0: passed, 1: failed, 77: this cannot run here (the last line says why).
//   foreign_test --list
//       the cases
//
// The worker is this program again (--worker), and so is the owner of memory that the test only opens (--owner).
#include "../support/cell.hpp"
#include "foreign_memory.hpp"
#include "suite_foreign.hpp"

#include <cstdio>
#include <cstdlib>
#include <fcntl.h>

namespace loan_test {
namespace {

constexpr Case kCases[] = {
    {"cuMemAlloc memory", kind_table<Made::Alloc>, true, under_mps_skip},
    {"shareable pool", kind_table<Made::PoolShareable>, true, under_mps_skip},
    {"private pool", kind_table<Made::PoolPrivate>, true, under_mps_skip},
    {"VMM memory in one chunk", kind_table<Made::VmmOne>, true, under_mps_skip},
    {"VMM memory in 72 chunks", kind_table<Made::VmmMany>, true, under_mps_skip},
    {"memory for PyTorch", kind_table<Made::Torch>, true, under_mps_skip},
    {"memory for PyTorch, one piece", torch_one_piece, true, under_mps_skip},
    {"memory for PyTorch, freed while it is lent", torch_freed_early, true, under_mps_skip},
    {"VMM memory without handles", kind_table<Made::VmmPrivate>, true, under_mps_skip},
    {"managed memory", kind_table<Made::Managed>, true, under_mps_skip},
    {"allocated host memory", kind_table<Made::HostAlloc>, true, under_mps_skip},
    {"registered host memory", kind_table<Made::HostRegistered>, true, under_mps_skip},
    {"another process's memory", kind_table<Made::Opened>, true, under_mps_skip},
    {"unknown memory", kind_table<Made::Unknown>, true, under_mps_skip},
    {"sizes and seams", sizes_and_seams, true, under_mps_skip},
    {"ranges that are refused", ranges_refused, true, under_mps_skip},
    {"views of a block", views_of_a_block, true, under_mps_skip},
    {"an address used again", address_used_again, true, under_mps_skip},
    {"a block of any number", any_buffer_number, true, under_mps_skip},
    {"a block announced, and the exporter lost", announced_and_lost, true, under_mps_skip},
    {"loans of many pieces at once", many_pieces, true, under_mps_skip},
    {"many pieces, cancelled", pieces_cancelled, true, under_mps_skip},
    {"many pieces, worker killed", pieces_killed, true, under_mps_skip},
    {"closing a block is stuck", closing_stuck, true, under_mps_skip},
    {"closing a block waits for stream waits", closing_waits, true, no_stream_wait_skip},
    {"release: loans that end", release_ends, true, under_mps_skip},
    {"release: a granted request", release_grants, true, under_mps_skip},
    {"release: lends again", release_lends_again, true, under_mps_skip},
    {"release: worker killed", release_killed, true, under_mps_skip},
    {"release: worker closed", release_closed, true, under_mps_skip},
    {"release: connection closed", release_peer_closed, true, under_mps_skip},
    {"release: context destroyed", release_context, true, under_mps_skip},
    {"release: lend fails", release_refused, true, under_mps_skip},
    {"quarantine of cuMemAlloc memory", quarantine_alloc, true, under_mps_skip},
    {"quarantine of VMM memory", quarantine_vmm, true, under_mps_skip},
    {"quarantine behind the context's end", quarantine_behind_context, true, under_mps_skip},
    {"surrendered chunks of the arena", surrendered_arena, true},
    {"under MPS", under_mps_copied, true, no_mps_skip},
};

struct Arguments {
  Cell cell;
  std::string only;
  bool list = false;
  int control = -1, loan_end = -1, owner = -1;
};

Arguments parse_arguments(int count, char** words) {
  Arguments out;
  out.cell.driver = default_driver();
  for (int at = 1; at < count; ++at) {
    const std::string_view word = words[at];
    const int left = count - at - 1;
    if (word == "--list") out.list = true;
    else if (word == "--only" && left >= 1) out.only = words[++at];
    else if (word == "--owner" && left >= 1) out.owner = std::atoi(words[++at]);
    else if (word == "--worker" && left >= 2) out.control = std::atoi(words[at + 1]), out.loan_end = std::atoi(words[at + 2]), at += 2;
    else if (word != "--rung" && left >= 1 && take_cell_option(word, words[at + 1], out.cell)) ++at;
    else fail("the argument '" + std::string(word) + "' is not understood; the head of foreign_main.cpp lists them");
  }
  out.cell.rung = GPULOAN_RUNG_NONE; // all are allowed
  return out;
}

int run_suite(const Arguments& arguments) {
  const TempFolder folder("gpuloan-foreign");
  use_private_sim(folder);
  const Cell& cell = arguments.cell;
  ::setenv("GPULOAN_DRIVER", cell.driver.c_str(), 1); // for gpuloan_torch_malloc
  std::printf("# gate %s, engine %s, driver %s\n", gpuloan_gate_name(cell.gate), gpuloan_engine_name(cell.engine), cell.driver.c_str());
  if (const std::string why = missing(cell); !why.empty()) {
    std::printf("1..0 # SKIP %s\n", why.c_str());
    return kSkipped;
  }
  Gpu gpu(cell.driver.c_str());
  std::printf("# %s driver %d.%d at %s\n", gpu.simulated() ? "SIMULATED" : "real", gpu.info().version / 1000,
              gpu.info().version % 1000 / 10, gpu.info().path);
  gpu.warm_up();
  const Bench bench{cell, gpu};
  try { // the first managed memory of a process costs it device memory that it keeps: 124 MiB on an H200
    Foreign(bench, Made::Managed, {.bytes = kChunk}).fill(1);
  } catch (const Skip&) {
  }
  return run_cases(bench, kCases, arguments.only).exit_status();
}

int run(int count, char** words) {
  const Arguments arguments = parse_arguments(count, words);
  if (arguments.list) {
    for (const Case& test : kCases) std::printf("%s\n", test.name);
    return 0;
  }
  if (arguments.control < 0 && arguments.owner < 0) return run_suite(arguments);
  die_with_parent();
  for (const int fd : {arguments.control, arguments.loan_end, arguments.owner}) {
    if (fd >= 0) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
  if (arguments.owner >= 0) return run_owner(arguments.owner, arguments.cell.driver.c_str());
  return serve(arguments.control, arguments.loan_end, Habitat::Process);
}

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
