// SPDX-License-Identifier: MIT
//
// Loan: what both sides know of one. Guarded by the context's lock.
#pragma once

#include <loan/admission.hpp>
#include <loan/context.hpp>
#include <loan/state.hpp>

#include <array>

namespace gpuloan::loan {

// A status that a peer sent as an outcome; FAILED for anything that is none.
[[nodiscard]] gpuloan_status outcome_from_wire(std::int32_t status) noexcept;

class Loan : public std::enable_shared_from_this<Loan> {
 public:
  explicit Loan(std::shared_ptr<Peer> owner) : peer(std::move(owner)) {}
  virtual ~Loan() = default;
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  const std::shared_ptr<Peer> peer;
  Handle handle;
  std::uint64_t id = 0;
  std::uint64_t bytes = 0;
  gpuloan_access access = GPULOAN_ACCESS_READ;
  gpuloan_memory memory = GPULOAN_MEMORY_DEVICE; // as the importer sees it
  gpuloan_rung rung = GPULOAN_RUNG_NONE;
  gpuloan_gate gate = GPULOAN_GATE_HOST;
  Carrier carrier = Carrier::Direct;
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;
  std::uint32_t event_index = 0;
  bool keep_open = false; // more turns may follow
  std::uint32_t turn = 0; // the last one made ready
  std::uint32_t turns_done = 0;
  Patience patience;              // of who waits for the other side's word
  bool spun = false;              // and saw the last one spinning
  std::array<std::uint64_t, 3> events = {}; // that wait and name it: LOAN_OFFERED, one of a turn, LOAN_ENDED
  std::uint32_t events_queued = 0;
  bool turn_event_queued = false; // LOAN_READY or LOAN_DONE waits to be taken: another one would say nothing new
  bool canary_loan = false;
  gpuloan_canary canary = GPULOAN_CANARY_NOT_ATTEMPTED;
  std::uint64_t copied_bytes = 0;
  std::uint64_t exposed_bytes = 0;
  std::array<std::uint64_t, GPULOAN_STEP_COUNT> step_ns = {};
  std::string rung_reason, gate_reason;
  std::string writers; // others that may still write the memory
  std::vector<std::byte> metadata;

  bool ended = false;
  gpuloan_status outcome = GPULOAN_OK;
  std::string outcome_text;

  // The outcome is set once.
  void set_outcome(gpuloan_status status, std::string text) {
    if (outcome != GPULOAN_OK || ended) return;
    outcome = status;
    outcome_text = std::move(text);
  }
  [[nodiscard]] Result<void> outcome_result() const {
    if (outcome == GPULOAN_OK) return {};
    return fail(outcome, outcome_text);
  }
  [[nodiscard]] std::uint64_t word() const noexcept { return gate::word_value(generation, turn); }
  // The other side waits at the word, and finds this turn in it: no record has to tell.
  [[nodiscard]] bool watched(gate::Word which) const;
  void mark(gpuloan_step step) noexcept { step_ns[static_cast<std::size_t>(step)] = now_ns(); }

  [[nodiscard]] virtual gpuloan_memory_state memory_state() const noexcept { return GPULOAN_MEMORY_HELD; }
  void fill_report(gpuloan_loan_report& report) const;
};

} // namespace gpuloan::loan
