// SPDX-License-Identifier: MIT
//
// device_test: the tests of several devices, as a program that runs anywhere with libgpuloan.so.0 and a driver. What asks
// for more devices than the machine has, or for the simulated driver's knobs, is skipped there.
//
//   device_test --driver sim|real|PATH --gate memop|host --engine epoll|io_uring [--only TEXT]
//       as TAP. Exit status 0: passed, 1: failed, 77: nothing could run here.
//   device_test --list
//       the cases
//
// Each case is this program again (--case), and so is its worker (--worker).
#include "../support/cell.hpp"
#include "suite_devices.hpp"

#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sstream>

namespace loan_test {
namespace {

constexpr unsigned kCaseSeconds = 120;

constexpr DeviceCase kCases[] = {
    {"opposite orders", opposite_orders, 2, "0,1"},
    {"subsets", subsets, 2, "1"},
    {"subsets of four", subsets, 0, "1,3", "GPULOAN_SIM_DEVICES=4"},
    {"forms of the variable", forms_of_the_variable, 2, "0"},
    {"slices of one GPU", slices, 0, "MIG-7770756c-6f61-6e00-7369-6d0000000002", "GPULOAN_SIM_MIG=3"},
    {"across devices", across_devices, 2},
    {"across eight devices", across_devices, 0, "6,1,0,2,3,4,5,7", "GPULOAN_SIM_DEVICES=8 GPULOAN_SIM_PEERS=1-6,2>3"},
    {"without peer access", without_peer_access, 0, nullptr, "GPULOAN_SIM_PEERS=none"},
    {"peer access one way", one_way_access, 0, nullptr, "GPULOAN_SIM_PEERS=1>0"},
    {"contexts of the calling thread", callers_contexts, 2},
    {"a context for each device", a_context_per_device, 2},
    {"one process", one_process, 1},
    {"a block that others opened", opened_by_others, 0},
    {"exclusive-process mode", exclusive_process, 0, nullptr, "GPULOAN_SIM_COMPUTE_MODE=exclusive"},
};

struct Arguments {
  Cell cell;
  std::string only, one;
  bool list = false, make_context = false;
  int control = -1, loan_end = -1;
};

Arguments parse_arguments(int count, char** words) {
  Arguments out;
  out.cell.driver = default_driver();
  for (int at = 1; at < count; ++at) {
    const std::string_view word = words[at];
    const int left = count - at - 1;
    if (word == "--list") out.list = true;
    else if (word == "--only" && left >= 1) out.only = words[++at];
    else if (word == "--case" && left >= 1) out.one = words[++at];
    else if (word == "--make-context" && left >= 1) out.cell.driver = words[++at], out.make_context = true;
    else if (word == "--worker" && left >= 2) out.control = std::atoi(words[at + 1]), out.loan_end = std::atoi(words[at + 2]), at += 2;
    else if (word != "--rung" && left >= 1 && take_cell_option(word, words[at + 1], out.cell)) ++at;
    else fail("the argument '" + std::string(word) + "' is not understood; the head of device_main.cpp lists them");
  }
  return out;
}

// The exit status: 0, or the status of gpuloan_context_create without its sign.
int make_context(const Cell& cell) {
  auto options = init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_IMPORTER;
  options.driver = cell.driver.c_str();
  gpuloan_context* context = nullptr;
  const gpuloan_status status = gpuloan_context_create(&options, &context);
  gpuloan_context_destroy(context);
  return -status;
}

// In the process of the case.
int run_case(const Arguments& arguments) {
  for (const DeviceCase& test : kCases) {
    if (arguments.one != test.name) continue;
    watchdog(kCaseSeconds, test.name);
    try {
      test.run(arguments.cell);
      return 0;
    } catch (const Failure& failure) {
      std::printf("  # %s\n", failure.text.c_str());
      return 1;
    } catch (const Skip& skip) {
      std::printf("  # %s\n", skip.reason.c_str());
      return kSkipped;
    }
  }
  fail("there is no such case: " + arguments.one);
}

struct Machine {
  bool simulated = false;
  int devices = 0;
  std::string uuids;
};

Machine look_at_machine(const Cell& cell) {
  Machine machine;
  auto driver = init<gpuloan_driver_info>();
  expect_ok(gpuloan_driver_probe(cell.driver.c_str(), &driver), "gpuloan_driver_probe");
  machine.simulated = driver.simulated != 0;
  machine.devices = static_cast<int>(driver.devices);
  for (int ordinal = 0; ordinal < machine.devices; ++ordinal) machine.uuids += uuid_of(cell.driver.c_str(), ordinal) + " ";
  std::printf("# %s driver %d.%d at %s, %d devices: %s\n", machine.simulated ? "SIMULATED" : "real", driver.version / 1000,
              driver.version % 1000 / 10, driver.path, machine.devices, machine.uuids.c_str());
  return machine;
}

std::string reason_to_skip(const DeviceCase& test, const Machine& machine) {
  if (machine.simulated) return {};
  if (test.real_devices == 0) return "needs a machine that only the simulated driver plays";
  if (test.real_devices > machine.devices) return "needs " + std::to_string(test.real_devices) + " devices";
  return {};
}

int run_apart(const DeviceCase& test, const Cell& cell) {
  const TempFolder folder("gpuloan-devices");
  use_private_sim(folder);
  std::vector<std::string> set = {"CUDA_VISIBLE_DEVICES"};
  if (test.visible != nullptr) ::setenv("CUDA_VISIBLE_DEVICES", test.visible, 1);
  std::istringstream settings(test.machine != nullptr ? test.machine : "");
  for (std::string word; settings >> word;) {
    const std::size_t mark = word.find('=');
    set.push_back(word.substr(0, mark));
    ::setenv(set.back().c_str(), word.substr(mark + 1).c_str(), 1);
  }
  Process process({"--case", test.name, "--driver", cell.driver, "--gate", gpuloan_gate_name(cell.gate), "--engine", gpuloan_engine_name(cell.engine)}, {});
  for (const std::string& variable : set) ::unsetenv(variable.c_str());
  ::setenv("GPULOAN_SIM_DEVICES", "2", 1);
  return process.wait();
}

int run_suite(const Arguments& arguments) {
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  ::setenv("GPULOAN_SIM_DEVICES", "2", 1);
  const Machine machine = look_at_machine(arguments.cell);
  ::setenv(kUuidsVariable, machine.uuids.c_str(), 1);
  int number = 0, passed = 0, failed = 0, skipped = 0;
  for (const DeviceCase& test : kCases) {
    ++number;
    if (std::string_view(test.name).find(arguments.only) == std::string_view::npos) continue;
    std::string reason = reason_to_skip(test, machine);
    const std::uint64_t start = now_ms();
    const int status = reason.empty() ? run_apart(test, arguments.cell) : kSkipped;
    const auto ms = static_cast<unsigned long long>(now_ms() - start);
    if (status == 0) std::printf("ok %d - %s # %llu ms\n", number, test.name, ms), ++passed;
    else if (status == kSkipped) std::printf("ok %d - %s # SKIP %s\n", number, test.name, reason.empty() ? "see above" : reason.c_str()), ++skipped;
    else std::printf("not ok %d - %s # status %d\n", number, test.name, status), ++failed;
    std::fflush(stdout);
  }
  std::printf("1..%d\n# %d passed, %d failed, %d do not apply\n", number, passed, failed, skipped);
  return failed != 0 ? 1 : passed != 0 ? 0 : kSkipped;
}

int run(int count, char** words) {
  const Arguments arguments = parse_arguments(count, words);
  if (arguments.list) {
    for (const DeviceCase& test : kCases) std::printf("%s\n", test.name);
    return 0;
  }
  if (arguments.make_context) return make_context(arguments.cell);
  if (arguments.control < 0 && arguments.one.empty()) return run_suite(arguments);
  die_with_parent();
  if (!arguments.one.empty()) return run_case(arguments);
  for (const int fd : {arguments.control, arguments.loan_end}) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return serve(arguments.control, arguments.loan_end, Habitat::Process);
}

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
