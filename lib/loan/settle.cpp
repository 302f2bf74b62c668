// SPDX-License-Identifier: MIT
//
// A loan's way back. Everything that may end one meets in advance(): the DONE gate, our own copies on the host rung, the
// ACK, the loss of the peer. A loan ends only when nobody, we ourselves included, may still touch the lent memory, or when
// its chunk is retired so that it is never handed out again.
#include <loan/exporter.hpp>
#include <loan/trace.hpp>

#include <base/log.hpp>

#include <algorithm>

namespace gpuloan::loan {

bool Exporter::copies_pending(ExportLoan& loan) {
  ExporterPeer& peer = loan.exporter_peer();
  if (loan.unpinned_landing) {
    const auto over = loan.unpinned_landing->query();
    return over && !*over;
  }
  if (loan.staged()) {
    const driver::OwnedEvent& copy = loan.landing ? loan.landed : loan.reading;
    if (!copy && !loan.landing) return false;
    const auto over = copy ? copy.query() : peer.copy_stream.query();
    return over && !*over;
  }
  if (loan.carrier != Carrier::Ring) return false;
  return peer.rings.in_flight(loan.id);
}

// Whether the bytes of a turn whose DONE gate passed are where the exporter's consumers look for them.
Result<bool> Exporter::landed(ExportLoan& loan) {
  ExporterPeer& peer = loan.exporter_peer();
  if (loan.access == GPULOAN_ACCESS_READ || loan.bytes == 0 || loan.carrier == Carrier::Direct) return true;
  if (loan.carrier == Carrier::Ring) return peer.rings.in && peer.rings.in->landed(loan.id, loan.turn);
  if (loan.carrier == Carrier::Segment && loan.staging->pointer() == 0) {
    if (!loan.unpinned_landing) {
      auto copy = peer.unpinned->to_device(loan.pointer, loan.staging->host(), loan.bytes, peer.copy_stream.get());
      if (!copy) return forward(std::move(copy.error()));
      loan.unpinned_landing = std::move(*copy);
      request_tick();
    }
    return loan.unpinned_landing->query();
  }
  if (!loan.landing) {
    driver::Gpu::Scope scope(*gpu_);
    if (!scope.ok()) return forward(Error(scope.ok().error()));
    auto event = driver::OwnedEvent::create(gpu_, cuda::EventDisableTiming);
    if (!event) return forward(std::move(event.error()));
    const cuda::Stream stream = peer.copy_stream.get();
    if (loan.carrier == Carrier::Stage) {
      GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuMemcpyAsync, loan.pointer, loan.staging->pointer(), loan.bytes, stream));
    } else {
      GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuMemcpyHtoDAsync, loan.pointer, loan.staging->host(), loan.bytes, stream));
    }
    loan.landing = true;
    request_tick();
    GPULOAN_TRY(event->record(stream));
    loan.landed = std::move(*event);
  }
  return loan.landed.query();
}

void Exporter::turn_done(ExportLoan& loan) {
  loan.state = step(loan.state, ExportEvent::Done).next;
  loan.turns_done = loan.turn;
  if (loan.step_ns[GPULOAN_STEP_DONE] == 0) loan.mark(GPULOAN_STEP_DONE);
  if (loan.staged() || loan.carrier == Carrier::Ring) {
    loan.copied_bytes += loan.bytes;
    copied_bytes_ += loan.bytes;
  }
  if (!loan.canary_loan) push_event({GPULOAN_EVENT_LOAN_DONE, GPULOAN_OK, loan.peer, loan.shared_from_this(), nullptr, ""});
  notify();
}

void Exporter::advance_turn(ExportLoan& loan) {
  if (!loan.gate_passed) {
    auto passed = gate::passed(loan.done_post(), loan.recorded_turn == loan.turn);
    if (!passed) {
      fail_loan(loan, passed.error().status, passed.error().text);
      return;
    }
    loan.gate_passed = *passed;
  }
  if (!loan.gate_passed) {
    if (loan.settling) fail_loan(loan, GPULOAN_ERR_PEER_LOST, loan.peer->loss.text);
    return;
  }
  auto in_place = landed(loan);
  if (!in_place) {
    fail_loan(loan, in_place.error().status, in_place.error().text);
  } else if (*in_place) {
    turn_done(loan);
  }
}

bool Exporter::due(const ExportLoan& loan) noexcept {
  if (loan.settling || loan.acked) return true;
  if (loan.state != ExportState::Out) return false;
  const bool recorded = loan.gate == GPULOAN_GATE_EVENT && loan.recorded_turn == loan.turn;
  return loan.gate_passed || recorded || gate::reached(loan.peer->words.load(loan.slot, gate::Word::Done), loan.word());
}

void Exporter::advance(ExportLoan& loan) {
  if (loan.ended || loan.posting || loan.state == ExportState::Preparing) return;
  if (loan.state == ExportState::Out) advance_turn(loan);
  if ((!loan.acked && !loan.settling) || copies_pending(loan)) return;
  if (loan.state == ExportState::Out) advance_turn(loan); // a copy may have ended since we looked
  if (loan.state == ExportState::Out) { // nothing is under way any more, and it did not arrive
    const bool lost = loan.settling;
    fail_loan(loan, lost ? GPULOAN_ERR_PEER_LOST : GPULOAN_ERR_FAILED,
              lost ? loan.peer->loss.text : "the importer acknowledged bytes that it never sent");
  }
  ExportEvent event = ExportEvent::Ack;
  if (loan.settling) {
    const bool exposed = loan.carrier == Carrier::Direct && loan.region != nullptr && loan.bytes > 0;
    event = loan.shares_foreign() ? ExportEvent::LostQuarantine : exposed ? ExportEvent::LostRetire : ExportEvent::LostRelease;
  }
  finish(loan, event);
}

void Exporter::fail_loan(ExportLoan& loan, gpuloan_status status, std::string text) {
  const ExportStep next = step(loan.state, ExportEvent::Fail);
  if (next.verdict != Verdict::Go) return;
  loan.set_outcome(status, std::move(text));
  loan.state = next.next;
  ExporterPeer& peer = loan.exporter_peer();
  peer.rings.forget(loan.id);
  if (!loan.acked && !peer.lost) { // it must not go on waiting for, or working on, a loan that has failed
    channel::Record record = channel::make_record(channel::Type::Cancel);
    record.cancel.loan = loan.id;
    record.cancel.status = loan.outcome;
    send_text(peer, record, loan.outcome_text);
  }
  notify();
}

namespace {

template <typename Kept>
void make_room(std::vector<Kept>& list) {
  if (list.size() == list.capacity()) list.reserve(std::max<std::size_t>(8, list.size() * 2));
}

} // namespace

// The one place where a loan ends at the exporter. It is done whole or, where there is no memory, not at all; the next tick tries again.
void Exporter::finish(ExportLoan& loan, ExportEvent event) {
  const ExportStep next = step(loan.state, event);
  if (next.verdict != Verdict::Go) return;
  const auto self = std::static_pointer_cast<ExportLoan>(loan.shared_from_this());
  ExporterPeer& peer = loan.exporter_peer();
  const bool clean = event == ExportEvent::Ack || event == ExportEvent::Fail; // Fail: lend() itself gave up
  if (loan.staging != nullptr) make_room(finished_staging_);
  make_room(peer.late_slots);
  make_room(peer.retired);
  make_room(peer.quarantined);
  loan.state = next.next;
  loan.mark(GPULOAN_STEP_RELEASE);
  loan.ended = true;
  if (loan.outcome != GPULOAN_OK) ++loans_failed_;
  peer.rings.forget(loan.id);
  if (loan.staging != nullptr) {
    if (loan.landing) loan.arena->used_on(loan.staging, peer.copy_stream.get());
    finished_staging_.emplace_back(loan.arena, std::exchange(loan.staging, nullptr));
    request_tick();
  }
  if (loan.event != nullptr && clean) loan.event->in_use = false; // after a loss it may be pending for ever (S5): never again
  free_slot(peer, loan, clean);
  if (loan.state == ExportState::Retired) peer.retired.push_back(self);
  if (loan.state == ExportState::Quarantined) {
    peer.quarantined.push_back(self);
  } else { // the arena's region is the caller's to destroy, also in a retired chunk
    release(loan);
  }
  loan.arena.reset();
  loan.reading = {};
  loan.landed = {};
  loan.unpinned_landing.reset();
  loan.ready_written = {};
  if (const Trace* trace = Trace::get(); trace != nullptr) trace->ended(loan, peer.pid);
  peer.loans.erase(loan.id);
  if (loan.polled) --peer.polled_loans;
  if (loan.canary_loan) request_tick(); // where nobody waits for it, the tick judges it
  else push_ended(self);
  report_lost(peer);
  notify();
}

// A READY that is still queued on a stream (the loan was cancelled before its producer was through) would overwrite the
// word of the slot's next loan: such a slot waits until it has landed.
void Exporter::free_slot(ExporterPeer& peer, ExportLoan& loan, bool clean) {
  const auto written = loan.ready_written ? loan.ready_written.query() : Result<bool>(true);
  if (written && !*written) {
    peer.late_slots.emplace_back(loan.slot, std::move(loan.ready_written));
    request_tick();
  } else if (clean) {
    peer.free_slots.push_back(loan.slot);
  }
}

// Staging pages go back without the lock: their streams may be a caller's.
void Exporter::after_turn() {
  std::vector<std::pair<std::shared_ptr<memory::Arena>, memory::Region*>> finished;
  {
    const Lock lock(mutex_);
    finished.swap(finished_staging_);
  }
  for (const auto& [arena, region] : finished) arena->destroy(region);
  static_cast<void>(apart_.poll());
  static_cast<void>(releases_.poll());
}

// ---- Rings --------------------------------------------------------------------------------------------------------

void Exporter::fail_rings(ExporterPeer& peer) {
  for (const auto& [id, loan] : std::unordered_map(peer.loans)) {
    if (loan->carrier == Carrier::Ring && loan->state == ExportState::Out) fail_loan(*loan, peer.copies_error.status, peer.copies_error.text);
  }
}

void Exporter::pump(ExporterPeer& peer) try {
  if (peer.copies_broken) fail_rings(peer); // one may have been on its way out when they broke
  if (!peer.rings.busy()) return;
  memory::RingSource::Progress source;
  memory::RingSink::Progress sink;
  if (auto moved = move_rings(peer, source, sink); !moved) {
    peer.copies_broken = true;
    peer.copies_error = std::move(moved.error());
    GPULOAN_LOG(GPULOAN_LOG_ERROR, "the host rung's copies failed: " + peer.copies_error.text);
    fail_rings(peer);
    return;
  }
  const auto loan_of = [&peer](const memory::Piece& piece) -> ExportLoan* {
    const auto it = peer.loans.find(piece.loan);
    return it == peer.loans.end() ? nullptr : it->second.get();
  };
  for (const memory::Piece& piece : source.complete) {
    ExportLoan* loan = loan_of(piece);
    if (loan == nullptr) continue;
    peer.words.store(loan->slot, gate::Word::Ready, loan->word());
    announce_ready(*loan);
  }
  for (const memory::Piece& piece : sink.landed) {
    if (ExportLoan* loan = loan_of(piece)) advance(*loan);
  }
} catch (const std::bad_alloc&) { // as in the importer's
  lose(peer.shared_from_this(), out_of_memory());
}

void Exporter::recall_idle(ExporterPeer& peer) {
  for (const std::uint64_t chunk : peer.arena->recall(false)) {
    channel::Record record = channel::make_record(channel::Type::Recall);
    record.chunk.chunk = chunk;
    send(peer, record);
  }
}

} // namespace gpuloan::loan
