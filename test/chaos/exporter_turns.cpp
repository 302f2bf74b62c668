// SPDX-License-Identifier: MIT
//
// What comes back to the exporter: turns, ends of loans, and the end of it all.
#include "exporter.hpp"

#include "../support/pattern.hpp"

#include <algorithm>

namespace chaos::exporter {

void ChaosExporter::verify(const Job& job) {
  if (job.bytes == 0) return;
  const std::uint64_t seed = job.order.seed + job.turn - 1;
  std::string wrong;
  if (job.host != nullptr) {
    const std::size_t at = pattern_mismatch({static_cast<const unsigned char*>(job.host), job.bytes}, seed);
    if (at != job.bytes) wrong = "byte " + std::to_string(at);
  } else {
    wrong = gpu_.mismatch(job.pointer, job.bytes, seed, job.order.stream);
  }
  if (wrong.empty()) return;
  auto report = init<gpuloan_loan_report>();
  static_cast<void>(gpuloan_loan_report_get(job.loan, &report));
  fail("turn " + std::to_string(job.turn) + " of a write loan of " + std::to_string(job.bytes) + " bytes over " + gpuloan_rung_name(report.rung) + "/" +
       gpuloan_gate_name(report.gate) + ": " + wrong);
}

void ChaosExporter::turn_done(Job& job) {
  step("checks a turn");
  if (!std::exchange(job.turn_out, false)) fail("a turn was done twice");
  board_.turns.fetch_add(1, std::memory_order_relaxed);
  if (!job.memory->shared) own_again(*job.memory);
  if (job.write && !job.cancelled) verify(job);
  if (job.turn < job.order.turns) next_turn(job);
  else if (job.order.turns > 1) {
    step("reclaims");
    job.asked_back = true;
    const gpuloan_status status = gpuloan_reclaim(job.loan, 0); // its event tells the end
    if (status != GPULOAN_OK && status != GPULOAN_ERR_PEER_LOST && status != GPULOAN_ERR_CANCELLED) {
      expect_status(status, GPULOAN_ERR_TIMEOUT, "gpuloan_reclaim");
    }
  }
}

void ChaosExporter::next_turn(Job& job) {
  ++job.turn;
  const bool wait = random_.chance(50);
  fill(job, wait);
  rights(job, true);
  job.turn_out = true;
  step("makes a turn ready");
  const gpuloan_status status = gpuloan_loan_ready(job.loan, job.host != nullptr ? GPULOAN_STREAM_CPU : static_cast<void*>(stream(job.order.stream)));
  if (status == GPULOAN_OK) {
    if (wait) rights(job, false);
    return;
  }
  job.turn_out = false;
  --job.turn; // it has ended: lost or cancelled, and its event is under way
  if (status != GPULOAN_ERR_PEER_LOST && status != GPULOAN_ERR_CANCELLED) expect_status(status, GPULOAN_ERR_STATE, "gpuloan_loan_ready");
}

void ChaosExporter::judge(const Job& job, gpuloan_status outcome, const char* text) const {
  const bool acted = job.turn >= job.order.act_turn && job.order.act != Act::Done;
  const gpuloan_status planned = !acted ? GPULOAN_OK : job.order.act == Act::Fail ? GPULOAN_ERR_FAILED : GPULOAN_ERR_RETURNED;
  if (outcome == planned || (job.cancelled && outcome == GPULOAN_ERR_CANCELLED)) return;
  if (outcome == GPULOAN_ERR_PEER_LOST) return; // whether it was, the judge knows
  fail(std::string("a loan ended with ") + gpuloan_status_name(outcome) + " where " + gpuloan_status_name(planned) + " was due (turn " +
       std::to_string(job.turn) + " of " + std::to_string(job.order.turns) + (job.cancelled ? ", cancelled" : "") + "): " + text);
}

void ChaosExporter::ended(Job& job, gpuloan_status outcome, const char* text) {
  step("settles a loan");
  judge(job, outcome, text);
  auto report = init<gpuloan_loan_report>();
  expect_ok(gpuloan_loan_report_get(job.loan, &report), "gpuloan_loan_report_get");
  expect(report.ended == 1 && report.outcome == outcome, "the report does not say what the event says");
  Memory& memory = *job.memory;
  if (!job.host) gpu_.sync(job.order.stream); // our own upload
  --memory.out;
  switch (report.memory_state) {
    case GPULOAN_MEMORY_RELEASED:
      if (!memory.shared) own_again(memory);
      if (outcome == GPULOAN_OK && job.write && job.turn_out) verify(job);
      break;
    case GPULOAN_MEMORY_RETIRED:
    case GPULOAN_MEMORY_SURRENDERED:
      expect(!memory.own(), "memory of the caller's was retired");
      if (std::exchange(memory.claimed, false)) unclaim(memory.pointer, memory.bytes);
      memory.spent = true;
      break;
    case GPULOAN_MEMORY_QUARANTINED:
      expect(memory.own(), "a region was quarantined");
      break;
    default:
      fail("a loan has ended and its memory is held");
  }
  gpuloan_loan_unref(job.loan);
  board_.outcomes[-outcome].fetch_add(1, std::memory_order_relaxed);
  slot_.loans.fetch_add(1, std::memory_order_relaxed);
}

// Closes a lost peer once nothing of it is left here.
void ChaosExporter::drop(Link& link) {
  if (link.peer == nullptr) return;
  const bool used = std::any_of(jobs_.begin(), jobs_.end(), [&](const auto& job) { return job->link == &link; }) ||
                    std::any_of(memory_.begin(), memory_.end(), [&](const Memory& memory) { return memory.link == &link; });
  if (used) return;
  step("closes a lost peer");
  gpuloan_peer_close(std::exchange(link.peer, nullptr));
}

void ChaosExporter::finish() {
  const auto empty = [&] {
    turn(1);
    collect();
    for (Link& link : links_) {
      if (link.lost) drop(link);
    }
    auto stats = init<gpuloan_stats>();
    expect_ok(gpuloan_context_stats(context_, &stats), "gpuloan_context_stats");
    if (!memory_.empty() || stats.loans_out != 0) return false;
    return life_.thread || stats.retired_bytes + stats.surrendered_bytes + stats.quarantined_bytes == 0;
  };
  if (becomes(empty, kHangMs)) return;
  auto stats = init<gpuloan_stats>();
  static_cast<void>(gpuloan_context_stats(context_, &stats));
  fail("leak: all importers are gone, and " + std::to_string(memory_.size()) + " pieces of memory were not released; " +
       std::to_string(stats.loans_out) + " loans, " + std::to_string(stats.retired_bytes) + " retired, " + std::to_string(stats.surrendered_bytes) +
       " surrendered and " + std::to_string(stats.quarantined_bytes) + " quarantined bytes are counted");
}

} // namespace chaos::exporter
