// SPDX-License-Identifier: MIT
//
// contract_test: the contract suite as a program that runs anywhere with libgpuloan.so.0 and a driver.
//
//   contract_test --driver sim|real|PATH --rung vmm|pool|ipc|host --gate memop|event|host --engine epoll|io_uring [--only TEXT]
//       one cell, as TAP. Exit status 0: passed, 1: failed, 77: this cell cannot run here (the last line says why).
//   contract_test --all --driver sim|real|PATH [--only TEXT]
//       each of the 24 cells in a process of its own, then one table.
//   contract_test --list
//       the cases
//
// --driver is GPULOAN_DRIVER where it is not given. The worker of a cell is this program again (--worker), and so is the
// exporter that has to die (--victim); both inherit their end of a socketpair.
#include "../support/cell.hpp"
#include "suite.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

namespace loan_test {
namespace {

struct Arguments {
  Cell cell;
  std::string only;
  bool all = false, list = false, worker = false, victim = false;
  int control = -1, loan_end = -1;
};

void parse_pair(Arguments& arguments, const char* const* words, bool& role) {
  role = true;
  arguments.control = std::atoi(words[0]);
  arguments.loan_end = std::atoi(words[1]);
}

Arguments parse_arguments(int count, char** words) {
  Arguments out;
  out.cell.driver = default_driver();
  for (int at = 1; at < count; ++at) {
    const std::string_view word = words[at];
    const int left = count - at - 1;
    if (word == "--all") out.all = true;
    else if (word == "--list") out.list = true;
    else if (word == "--worker" && left >= 2) parse_pair(out, words + at + 1, out.worker), at += 2;
    else if (word == "--victim" && left >= 2) parse_pair(out, words + at + 1, out.victim), at += 2;
    else if (word == "--only" && left >= 1) out.only = words[++at];
    else if (left >= 1 && take_cell_option(word, words[at + 1], out.cell)) ++at;
    else fail("the argument '" + std::string(word) + "' is not understood; the head of main.cpp lists them");
  }
  return out;
}

// ---- One cell -----------------------------------------------------------------------------------------------------

int run_cell(const Arguments& arguments) {
  const TempFolder folder("gpuloan-contract");
  use_private_sim(folder);
  const Cell& cell = arguments.cell;
  std::printf("# cell %s, driver %s\n", cell_name(cell).c_str(), cell.driver.c_str());
  if (const std::string why = missing(cell); !why.empty()) {
    std::printf("1..0 # SKIP %s\n", why.c_str());
    return kSkipped;
  }
  Gpu gpu(cell.driver.c_str());
  std::printf("# %s driver %d.%d at %s\n", gpu.simulated() ? "SIMULATED" : "real", gpu.info().version / 1000,
              gpu.info().version % 1000 / 10, gpu.info().path);
  gpu.warm_up();
  return run_cases({cell, gpu}, contract_cases(), arguments.only).exit_status();
}

// ---- All cells ----------------------------------------------------------------------------------------------------

struct Outcome {
  Cell cell;
  int status = 1;
  std::uint64_t ms = 0;
  std::string output;
};

std::string read_all(int fd) {
  std::string text;
  char part[4096];
  for (ssize_t length = 0; (length = ::read(fd, part, sizeof part)) > 0;) text.append(part, static_cast<std::size_t>(length));
  return text;
}

Outcome run_apart(const Cell& cell, const std::string& only) {
  SocketPair pipe = make_socketpair();
  const std::uint64_t start = now_ms();
  std::vector<std::string> words = {"--driver", cell.driver, "--rung", gpuloan_rung_name(cell.rung), "--gate", gpuloan_gate_name(cell.gate),
                                    "--engine", gpuloan_engine_name(cell.engine)};
  if (!only.empty()) words.insert(words.end(), {"--only", only});
  Process process(words, {}, pipe.right.get());
  pipe.right.reset();
  Outcome outcome{cell, 1, 0, read_all(pipe.left.get())};
  outcome.status = process.wait();
  outcome.ms = now_ms() - start;
  return outcome;
}

// What the table says of a cell: how many cases passed, why it was skipped, or what failed first.
std::string summary(const Outcome& outcome) {
  const auto rest_of_line = [&](const char* mark) -> std::string {
    const std::size_t at = outcome.output.find(mark);
    if (at == std::string::npos) return "no output";
    const std::size_t from = at + std::strlen(mark);
    return outcome.output.substr(from, outcome.output.find('\n', from) - from);
  };
  if (outcome.status == 0) return "pass    " + outcome.output.substr(outcome.output.rfind("# ") + 2);
  if (outcome.status == kSkipped) return "skip    " + rest_of_line("# SKIP ");
  return "FAIL    status " + std::to_string(outcome.status) + ", first: " + rest_of_line("not ok ");
}

int run_all(const Arguments& arguments) {
  std::vector<Outcome> outcomes;
  for (const auto& rung : kRungs) {
    for (const auto& gate : kGates) {
      for (const auto& engine : kEngines) {
        outcomes.push_back(run_apart({arguments.cell.driver, rung.value, gate.value, engine.value}, arguments.only));
        std::printf("%s\n", outcomes.back().output.c_str());
        std::fflush(stdout);
      }
    }
  }
  std::printf("%-22s %9s  %s\n", "cell", "ms", "outcome");
  int failed = 0, passed = 0;
  for (const Outcome& outcome : outcomes) {
    std::string text = summary(outcome);
    if (text.ends_with('\n')) text.pop_back();
    std::printf("%-22s %9llu  %s\n", cell_name(outcome.cell).c_str(), static_cast<unsigned long long>(outcome.ms), text.c_str());
    failed += outcome.status != 0 && outcome.status != kSkipped ? 1 : 0;
    passed += outcome.status == 0 ? 1 : 0;
  }
  return failed != 0 ? 1 : passed != 0 ? 0 : kSkipped;
}

int run(int count, char** words) {
  const Arguments arguments = parse_arguments(count, words);
  if (arguments.worker || arguments.victim) {
    die_with_parent();
    for (const int fd : {arguments.control, arguments.loan_end}) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    return arguments.worker ? serve(arguments.control, arguments.loan_end, Habitat::Process)
                            : run_victim(arguments.control, arguments.loan_end, arguments.cell);
  }
  if (arguments.list) {
    for (const Case& test : contract_cases()) std::printf("%s\n", test.name);
    return 0;
  }
  return arguments.all ? run_all(arguments) : run_cell(arguments);
}

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
