// SPDX-License-Identifier: MIT
#include <loan/loan.hpp>

namespace gpuloan::loan {

gpuloan_status outcome_from_wire(std::int32_t status) noexcept {
  switch (status) {
    case GPULOAN_ERR_LIMIT:
    case GPULOAN_ERR_UNSUPPORTED:
    case GPULOAN_ERR_NO_MEMORY:
    case GPULOAN_ERR_FD_LIMIT:
    case GPULOAN_ERR_SYSTEM:
    case GPULOAN_ERR_CANCELLED:
    case GPULOAN_ERR_DENIED:
    case GPULOAN_ERR_RETURNED:
    case GPULOAN_ERR_PEER_LOST:
    case GPULOAN_ERR_PROTOCOL:
    case GPULOAN_ERR_NO_DEVICE:
    case GPULOAN_ERR_DEVICE_MEMORY:
    case GPULOAN_ERR_DRIVER:
    case GPULOAN_ERR_DEVICE_LOST:
    case GPULOAN_ERR_INTERNAL:
      return static_cast<gpuloan_status>(status);
    default:
      return GPULOAN_ERR_FAILED;
  }
}

bool Loan::watched(gate::Word which) const {
  const gate::Words& words = peer->words;
  const bool stored = carrier == Carrier::Direct && gate != GPULOAN_GATE_EVENT && words && words.load(slot, which) == word();
  return stored && words.watched(slot, which);
}

void Loan::fill_report(gpuloan_loan_report& report) const {
  report.id = id;
  report.bytes = bytes;
  report.access = access;
  report.memory = memory;
  report.rung = rung;
  report.gate = gate;
  report.turns = turn;
  report.turns_done = turns_done;
  report.ended = ended ? 1 : 0;
  report.outcome = outcome;
  report.memory_state = memory_state();
  report.canary = canary;
  report.copied_bytes = copied_bytes;
  report.exposed_bytes = exposed_bytes;
  for (std::size_t step = 0; step < step_ns.size(); ++step) report.step_ns[step] = step_ns[step];
  rung_reason.copy(report.rung_reason, GPULOAN_TEXT_MAX - 1);
  gate_reason.copy(report.gate_reason, GPULOAN_TEXT_MAX - 1);
  writers.copy(report.writers, GPULOAN_TEXT_MAX - 1);
  outcome_text.copy(report.outcome_text, GPULOAN_TEXT_MAX - 1);
}

} // namespace gpuloan::loan
