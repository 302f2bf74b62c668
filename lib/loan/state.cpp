// SPDX-License-Identifier: MIT
//
// The tables. Rows are states, columns events; a state's name is where the pair leads, ig means Ignore, xx Illegal.
#include <loan/state.hpp>

namespace gpuloan::loan {
namespace {

using E = ExportState;
using I = ImportState;

constexpr std::uint8_t ig = 0xFE;
constexpr std::uint8_t xx = 0xFF;
constexpr std::uint8_t e(E state) { return static_cast<std::uint8_t>(state); }
constexpr std::uint8_t i(I state) { return static_cast<std::uint8_t>(state); }

constexpr std::uint8_t Out = e(E::Out), Home = e(E::Home), Failing = e(E::Failing), Released = e(E::Released),
                       Retired = e(E::Retired), Surrendered = e(E::Surrendered), Quarantined = e(E::Quarantined);

constexpr std::uint8_t kExport[kExportStates][kExportEvents] = {
    //              Send Ready Done  Fail      Ack       LostRetire LostRelease LostQuarantine Drop         Gone
    /* Preparing */ {Out, xx, xx, Released, xx, Released, Released, Released, xx, xx},
    /* Out       */ {xx, xx, Home, Failing, Released, Retired, Released, Quarantined, xx, xx},
    /* Home      */ {xx, Out, ig, Failing, Released, Retired, Released, Quarantined, xx, xx},
    /* Failing   */ {xx, xx, ig, ig, Released, Retired, Released, Quarantined, xx, xx},
    /* Released  */ {xx, xx, ig, ig, xx, ig, ig, ig, ig, ig},
    /* Retired   */ {xx, xx, ig, ig, xx, ig, ig, ig, Surrendered, ig},
    /* Surrender */ {xx, xx, ig, ig, xx, ig, ig, ig, ig, Released},
    /* Quarantin */ {xx, xx, ig, ig, xx, ig, ig, ig, xx, Released},
};

constexpr std::uint8_t Requested = i(I::Requested), Offered = i(I::Offered), Held = i(I::Held),
                       Finishing = i(I::Finishing), Idle = i(I::Idle), Letting = i(I::Letting), Ended = i(I::Ended);

constexpr std::uint8_t kImport[kImportStates][kImportEvents] = {
    //              Export   Deny   Ready    Acquire Done       Complete Return   Cancel
    /* Requested */ {Offered, Ended, xx, xx, xx, xx, Requested, Ended},
    /* Offered   */ {xx, xx, xx, Held, xx, ig, Ended, Ended},
    /* Held      */ {xx, xx, xx, xx, Finishing, ig, Letting, Held},
    /* Finishing */ {xx, xx, xx, xx, xx, Idle, Letting, Letting},
    /* Idle      */ {xx, xx, Offered, xx, xx, ig, Ended, Ended},
    /* Letting   */ {xx, xx, xx, xx, xx, Ended, ig, ig},
    /* Ended     */ {xx, ig, ig, xx, xx, ig, ig, ig},
};
static_assert(Requested == 0);

template <typename Step, typename State>
Step verdict(std::uint8_t cell, State state) {
  if (cell == xx) return {Verdict::Illegal, state};
  if (cell == ig) return {Verdict::Ignore, state};
  return {Verdict::Go, static_cast<State>(cell)};
}

} // namespace

ExportStep step(ExportState state, ExportEvent event) noexcept {
  return verdict<ExportStep>(kExport[static_cast<int>(state)][static_cast<int>(event)], state);
}

ImportStep step(ImportState state, ImportEvent event) noexcept {
  return verdict<ImportStep>(kImport[static_cast<int>(state)][static_cast<int>(event)], state);
}

const char* name(ExportState state) noexcept {
  constexpr const char* kNames[kExportStates] = {"preparing", "out",     "home",        "failing",
                                                 "released",  "retired", "surrendered", "quarantined"};
  return kNames[static_cast<int>(state)];
}

const char* name(ExportEvent event) noexcept {
  constexpr const char* kNames[kExportEvents] = {"send",        "ready",        "done",            "fail", "ack",
                                                 "lost/retire", "lost/release", "lost/quarantine", "drop", "gone"};
  return kNames[static_cast<int>(event)];
}

const char* name(ImportState state) noexcept {
  constexpr const char* kNames[kImportStates] = {"requested", "offered", "held", "finishing", "idle", "letting", "ended"};
  return kNames[static_cast<int>(state)];
}

const char* name(ImportEvent event) noexcept {
  constexpr const char* kNames[kImportEvents] = {"export", "deny", "ready", "acquire", "done", "complete", "return", "cancel"};
  return kNames[static_cast<int>(event)];
}

} // namespace gpuloan::loan
