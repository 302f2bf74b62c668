// SPDX-License-Identifier: MIT
//
// Sequences of events on both tables: one byte is one event. What holds for every pair is in test/unit/loan; here it is what
// holds along every path that a loan can take.
#include "fuzz.hpp"

#include <loan/state.hpp>

using namespace gpuloan;
using namespace gpuloan::loan;

namespace {

// How far the memory has gone on its way back; it never goes back on it (contract rule 10).
int distance(ExportState state) {
  switch (state) {
    case ExportState::Retired:
    case ExportState::Quarantined:
      return 1;
    case ExportState::Surrendered:
      return 2;
    case ExportState::Released:
      return 3;
    default:
      return 0;
  }
}

void check_export(ExportState before, ExportEvent event, ExportStep taken) {
  FUZZ_REQUIRE(static_cast<int>(taken.next) < kExportStates);
  if (taken.verdict != Verdict::Go) FUZZ_REQUIRE(taken.next == before);
  FUZZ_REQUIRE(distance(taken.next) >= distance(before));
  if (ended(before)) FUZZ_REQUIRE(ended(taken.next));
  if (before == ExportState::Released) FUZZ_REQUIRE(taken.next == ExportState::Released);
  FUZZ_REQUIRE(taken.verdict != Verdict::Go || taken.next != ExportState::Preparing); // nobody prepares twice
  // A failure that was published stays one; memory that the importer has comes back on ACK or on its loss alone.
  if (before == ExportState::Failing) FUZZ_REQUIRE(taken.next == ExportState::Failing || ended(taken.next));
  const bool lost = event == ExportEvent::LostRetire || event == ExportEvent::LostRelease || event == ExportEvent::LostQuarantine;
  const bool out = !ended(before) && before != ExportState::Preparing;
  if (out && ended(taken.next)) FUZZ_REQUIRE(event == ExportEvent::Ack || lost);
  if (lost) FUZZ_REQUIRE(ended(taken.next)); // nothing waits for a peer that is gone
  if (out && event == ExportEvent::LostRetire) FUZZ_REQUIRE(taken.next == ExportState::Retired);
  if (out && event == ExportEvent::LostQuarantine) FUZZ_REQUIRE(taken.next == ExportState::Quarantined);
  FUZZ_REQUIRE(step(before, event).next == taken.next); // pure
}

void run_export(std::span<const std::uint8_t> events) {
  ExportState state = ExportState::Preparing;
  bool failed = false;
  for (const std::uint8_t byte : events) {
    const auto event = static_cast<ExportEvent>(byte % kExportEvents);
    const ExportStep taken = step(state, event);
    check_export(state, event, taken);
    if (taken.verdict == Verdict::Go && !ended(state)) failed |= fails(state, event);
    if (failed) FUZZ_REQUIRE(taken.next != ExportState::Home && taken.next != ExportState::Out);
    state = taken.next;
    FUZZ_REQUIRE(*name(state) != '\0' && *name(event) != '\0');
  }
  // From anywhere, loss and proof lead to the end.
  state = step(state, ExportEvent::LostRetire).next;
  FUZZ_REQUIRE(ended(state));
  state = step(step(state, ExportEvent::Drop).next, ExportEvent::Gone).next;
  FUZZ_REQUIRE(state == ExportState::Released);
}

void check_import(ImportState before, ImportEvent event, ImportStep taken) {
  FUZZ_REQUIRE(static_cast<int>(taken.next) < kImportStates);
  if (taken.verdict != Verdict::Go) FUZZ_REQUIRE(taken.next == before);
  if (before == ImportState::Ended) FUZZ_REQUIRE(taken.next == ImportState::Ended && taken.verdict != Verdict::Go);
  if (before == ImportState::Letting) FUZZ_REQUIRE(taken.next == ImportState::Letting || event == ImportEvent::Complete);
  // Only the caller takes a turn, and only a turn that is offered; nothing but its own work's end lets go of one that is held.
  if (before != ImportState::Held && taken.next == ImportState::Held) FUZZ_REQUIRE(before == ImportState::Offered && event == ImportEvent::Acquire);
  if (before == ImportState::Held || before == ImportState::Finishing) FUZZ_REQUIRE(taken.next != ImportState::Ended);
  if (before != ImportState::Requested) FUZZ_REQUIRE(taken.next != ImportState::Requested);
  FUZZ_REQUIRE(step(before, event).next == taken.next);
}

void run_import(std::span<const std::uint8_t> events) {
  ImportState state = ImportState::Requested;
  for (const std::uint8_t byte : events) {
    const auto event = static_cast<ImportEvent>(byte % kImportEvents);
    const ImportStep taken = step(state, event);
    check_import(state, event, taken);
    state = taken.next;
    FUZZ_REQUIRE(*name(state) != '\0' && *name(event) != '\0');
  }
  // Cancelled, let go and complete is over, whatever came before.
  state = step(state, ImportEvent::Cancel).next;
  if (state == ImportState::Held) state = step(state, ImportEvent::Return).next;
  FUZZ_REQUIRE(step(state, ImportEvent::Complete).next == ImportState::Ended);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span events(data, size);
  run_export(events);
  run_import(events);
  return 0;
}
