// SPDX-License-Identifier: MIT
//
// One cell of the table: where the script runs, and the one call that fails.
#pragma once

#include "../support/bench.hpp"

#include <optional>
#include <string>
#include <vector>

namespace fault {

enum class Side { Exporter, Importer };
enum class Kind { None, Driver, Call }; // Call: one of kCalls, operator new included

struct Plan {
  gpuloan_rung rung = GPULOAN_RUNG_VMM;
  gpuloan_gate gate = GPULOAN_GATE_MEMOP;
  bool fresh = false; // the second round has contexts of its own; else the contexts of the first
  Side side = Side::Exporter;
  Kind kind = Kind::None;
  std::string function;
  std::uint64_t n = 0; // of a driver function: counted from the start of the process
  int code = 0;        // CUresult or errno
  std::string state;   // of the simulated machine

  [[nodiscard]] std::string name() const;
  // The words of a command line, and back.
  [[nodiscard]] std::vector<std::string> words() const;
  static Plan parse(const char* const* words);
  static constexpr int kWords = 9;

  // Giving back fails: what the driver refused to take stays with it.
  [[nodiscard]] bool keeps_something() const;
};

// The base names of all driver functions that the library uses.
[[nodiscard]] const std::vector<std::string>& driver_functions();

// Each plays its side of the script twice and prints what it saw: "count ...", "note ..." and, at the end,
// "end <side> <first round> <second round> <fired>".
int run_exporter(const Plan& plan);
int run_importer(const Plan& plan, const int (&ends)[2]);

} // namespace fault
