// SPDX-License-Identifier: MIT
//
// One cell of the kill matrix: who dies, and where in the life of a loan. A point lies after the step it is named for and
// before the next.
#pragma once

#include "../support/bench.hpp"

namespace loan_test {

enum class Victim { Exporter, Importer, ImporterWithChild }; // the child sleeps with all that its parent had mapped
enum class Point {
  Connected, // before EXPORT
  Exported,  // READY is queued behind a producer that does not go on
  Ready,     // before IMPORT
  Imported,  // acquired, nothing enqueued
  Writing,   // the work is enqueued and does not go on
  Written,   // the work is complete, DONE not said
  Posted,    // DONE is queued behind work that does not go on
  Done,      // the turn is complete, the loan is open: before UNIMPORT
  Released,  // ACK was sent and handled
};
inline constexpr const char* kVictimNames[] = {"exporter", "importer", "importer+child"};
inline constexpr const char* kPointNames[] = {"connected", "exported", "ready", "imported", "writing", "written", "posted", "done", "released"};

// Why the cell cannot be; null when it can.
[[nodiscard]] const char* no_such_cell(const Bench& bench, Point point);

struct Times {
  std::uint64_t noticed_ms = 0; // from the end of the process to the typed end of the loan, or of the connection
  std::uint64_t back_ms = 0;    // from then, or from the child's end, to everything being back
};
// Throws Failure.
[[nodiscard]] Times run_cell(const Bench& bench, Victim victim, Point point);

// The exporter that dies, as a process of its own: goes to `point` as far as it is the exporter's, says the loan's number
// (0 for none), and waits to be killed.
int run_kill_victim(int control, int loan_end, const Cell& cell, Point point);

} // namespace loan_test
