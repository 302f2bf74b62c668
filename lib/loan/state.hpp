// SPDX-License-Identifier: MIT
//
// The life of a loan as two pure functions with tables: one for the exporter's side, one for the importer's. They know
// no driver, no socket and no clock; every (state, event) pair has an answer and is tested.
#pragma once

#include <cstdint>

namespace gpuloan::loan {

// What a table says of a pair.
enum class Verdict : std::uint8_t {
  Go,      // take the next state
  Ignore,  // too late to matter (a record that crossed ours on the wire): nothing changes
  Illegal, // our caller may not do this now, or the peer broke the protocol: nothing changes
};

// ---- Exporter -----------------------------------------------------------------------------------------------------

enum class ExportState : std::uint8_t {
  Preparing,   // lend() is at work; nothing was sent
  Out,         // a turn is out: READY posted, DONE not seen
  Home,        // every turn is done; the importer still holds the memory
  Failing,     // failed, published; the importer still holds the memory
  Released,    // ours again
  Retired,     // the peer was lost with it: its chunk takes no new region and goes with its last one
  Surrendered, // our handle is dropped; counted until the peer's holders are gone
  Quarantined, // kept referenced until the peer's holders are gone
};
inline constexpr int kExportStates = 8;

enum class ExportEvent : std::uint8_t {
  Send,       // EXPORT is sent, turn 1 is out
  Ready,      // the next turn is out
  Done,       // DONE was seen
  Fail,       // cancelled, or the importer reported a failure
  Ack,        // the importer let go
  LostRetire, // the peer is lost; vmm, arena
  LostRelease, // the peer is lost; host rung: the lent memory itself was never exposed
  LostQuarantine, // the peer is lost; memory that is not ours to retire
  Drop,       // the retired chunk was dropped
  Gone,       // the lost peer's holders are proven gone
};
inline constexpr int kExportEvents = 10;

struct ExportStep {
  Verdict verdict;
  ExportState next;
};
[[nodiscard]] ExportStep step(ExportState state, ExportEvent event) noexcept;

// Out of the importer's reach: the outcome is final.
[[nodiscard]] constexpr bool ended(ExportState state) noexcept { return state >= ExportState::Released; }
// What `event` makes of an outcome that is still open: a loan whose every turn was done has succeeded, whatever
// happens to the peer afterwards (contract rule 8).
[[nodiscard]] constexpr bool fails(ExportState state, ExportEvent event) noexcept {
  const bool lost = event == ExportEvent::LostRetire || event == ExportEvent::LostRelease || event == ExportEvent::LostQuarantine;
  return event == ExportEvent::Fail || (lost && state != ExportState::Home);
}

// ---- Importer -----------------------------------------------------------------------------------------------------

enum class ImportState : std::uint8_t {
  Requested, // asked for, not answered
  Offered,   // a turn is due: its READY may or may not have passed
  Held,      // acquired: the caller works on it
  Finishing, // DONE posted, the GPU work is not complete
  Idle,      // the turn is complete; the next one, or the end, has not come
  Letting,   // let go by the caller with work still pending
  Ended,     // ACK sent, or denied, or the exporter is lost and our work complete
};
inline constexpr int kImportStates = 7;

enum class ImportEvent : std::uint8_t {
  Export,   // the loan arrived
  Deny,     // the request was denied
  Ready,    // the next turn's READY record arrived
  Acquire,  // the caller got the view
  Done,     // the caller posted DONE, work pending
  Complete, // the GPU work is complete
  Return,   // the caller lets go (also: nothing more will come)
  Cancel,   // cancelled by the exporter, or the exporter is lost
};
inline constexpr int kImportEvents = 8;

struct ImportStep {
  Verdict verdict;
  ImportState next;
};
[[nodiscard]] ImportStep step(ImportState state, ImportEvent event) noexcept;

[[nodiscard]] const char* name(ExportState state) noexcept;
[[nodiscard]] const char* name(ExportEvent event) noexcept;
[[nodiscard]] const char* name(ImportState state) noexcept;
[[nodiscard]] const char* name(ImportEvent event) noexcept;

} // namespace gpuloan::loan
