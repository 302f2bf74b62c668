// SPDX-License-Identifier: MIT
//
// A loan at the importer: acquire behind READY, return, and the end. ACK is sent from one place,
// end(), and only after our own GPU work on the loan is complete and the hold is dropped.
#include <loan/importer.hpp>

#include <base/log.hpp>

#include <algorithm>
#include <new>

namespace gpuloan::loan {

// ---- The end ------------------------------------------------------------------------------------------------------

// Later than every turn of this loan, so that the exporter does not take it for its own READY.
void Importer::store_release(ImportLoan& loan) {
  if (!loan.gpu_wait) return;
  loan.peer->words.store(loan.slot, gate::Word::Ready, gate::word_value(loan.generation, UINT32_MAX));
  release_wait(loan);
}

// It is over, or will be at once.
void Importer::release_wait(ImportLoan& loan) {
  if (!loan.gpu_wait) return;
  loan.gpu_wait.reset();
  --gpu_waits_;
}

// The loan's GPU work is complete (or there was none): drop the hold, then say so. As complete(), it can be done again when there was
// no memory for it.
void Importer::end(ImportLoan& loan, Trash& trash) {
  if (loan.unmapping) return;
  ImporterPeer& peer = loan.importer_peer();
  if (!loan.done_landed()) { // the exporter gives the slot to another loan, which a late DONE of this one would spoil
    apart_.run([self = std::static_pointer_cast<Importer>(shared_from_this()), loan = std::static_pointer_cast<ImportLoan>(loan.shared_from_this())] {
      self->sync_then_complete(loan);
    });
    loan.following = 0;
    loan.state = ImportState::Letting;
    request_tick();
    return;
  }
  release_wait(loan);
  peer.rings.forget(loan.id); // by now nothing of it is in flight
  if (loan.buffer) {
    const bool in_use = peer.rings.in && peer.rings.in->in_flight(loan.id);
    if (in_use) peer.limbo.emplace_back(loan.id, loan.buffer);
    else trash.push_back(loan.buffer);
    loan.buffer.reset();
  }
  loan.pointer = 0;
  loan.host = nullptr;
  loan.work = {};
  const auto import = loan.import;
  if (import && import->single_use()) { // unmapped first: its owner may free it once the ACK is there
    foreign_.run([self = std::static_pointer_cast<Importer>(shared_from_this()), loan = std::static_pointer_cast<ImportLoan>(loan.shared_from_this()), import] {
      self->unmap(loan->importer_peer(), *import);
      const Lock lock(self->mutex_);
      self->acknowledge(*loan);
    });
    peer.imports.erase(import->id);
    loan.import.reset();
    loan.unmapping = true;
    loan.state = ImportState::Letting;
    return;
  }
  if (import) {
    loan.import.reset();
    --import->holds;
    if (import->holds == 0 && (import->recalled || peer.lost)) drop_import(peer, import);
  }
  acknowledge(loan);
}

void Importer::acknowledge(ImportLoan& loan) {
  const auto self = std::static_pointer_cast<ImportLoan>(loan.shared_from_this());
  ImporterPeer& peer = loan.importer_peer();
  loan.mark(GPULOAN_STEP_UNIMPORT);
  loan.mark(GPULOAN_STEP_ACK);
  if (loan.id != 0) {
    channel::Record record = channel::make_record(channel::Type::Ack);
    record.ack.loan = loan.id;
    record.ack.slot = loan.slot;
    record.ack.generation = loan.generation;
    record.ack.outcome = loan.outcome;
    record.ack.turns_done = loan.turns_done;
    record.ack.import_ns = loan.step_ns[GPULOAN_STEP_IMPORT];
    record.ack.write_ns = loan.step_ns[GPULOAN_STEP_WRITE];
    record.ack.done_ns = loan.step_ns[GPULOAN_STEP_DONE];
    record.ack.unimport_ns = loan.step_ns[GPULOAN_STEP_UNIMPORT];
    record.ack.ack_ns = loan.step_ns[GPULOAN_STEP_ACK];
    record.ack.copied_bytes = loan.copied_bytes;
    send_text(peer, record, loan.outcome_text);
  }
  if (loan.outcome != GPULOAN_OK) ++loans_failed_;
  loan.state = ImportState::Ended;
  loan.ended = true;
  loan.spare.reset();
  peer.loans.erase(loan.id);
  peer.requests.erase(loan.request);
  if (!loan.canary_loan) push_ended(self);
  notify();
}

void Importer::complete(ImportLoan& loan, Trash& trash) {
  const ImportStep next = step(loan.state, ImportEvent::Complete);
  if (next.verdict != Verdict::Go) return;
  if (loan.carrier == Carrier::Ring && loan.bytes > 0) {
    loan.copied_bytes += loan.bytes;
    copied_bytes_ += loan.bytes;
  }
  if (next.next == ImportState::Ended) {
    end(loan, trash);
    return;
  }
  // Under the event gate the word says it too: an exporter that looks only after our death can no longer open our event.
  if (loan.gate == GPULOAN_GATE_EVENT) loan.peer->words.store(loan.slot, gate::Word::Done, loan.word());
  if (loan.cancelled || (loan.finish && !next_ready(loan))) { // ACK says DONE as well
    end(loan, trash);
    return;
  }
  if (!loan.watched(gate::Word::Done)) send_turn(loan, channel::Type::Done, loan.step_ns[GPULOAN_STEP_DONE]);
  loan.state = next.next; // Idle: the loan stays open
  if (next_ready(loan)) begin_turn(loan, loan.next_turn);
  notify();
}

void Importer::begin_turn(ImportLoan& loan, std::uint32_t turn) {
  loan.state = step(loan.state, ImportEvent::Ready).next;
  loan.turn = turn;
  loan.ready_posted = true;
  loan.ready_reported = false;
  loan.streams.clear();
}

// Cancelled by the exporter, or the exporter is lost, or the loan cannot be carried here.
void Importer::cancel(ImportLoan& loan, gpuloan_status status, std::string text, Trash& trash) {
  if (loan.ended) return;
  const ImportStep next = step(loan.state, ImportEvent::Cancel);
  loan.set_outcome(status, std::move(text)); // published first
  loan.cancelled = true;
  store_release(loan); // then a stream that waits for READY is released, also when the caller has let go already
  request_tick();
  if (loan.work) loan.importer_peer().rings.out->forget(loan.id); // settle_cancelled ends it once our own work is over
  if (next.verdict != Verdict::Go) return;
  if (next.next == ImportState::Ended) {
    end(loan, trash);
  } else {
    loan.state = next.next; // Held or Letting: the end follows our own work
  }
  notify();
}

// Cancelled loans whose bytes were on their way into the ring: nothing more is sent, and the end waits for what runs.
void Importer::settle_cancelled(ImporterPeer& peer, Trash& trash) {
  std::vector<std::shared_ptr<ImportLoan>> over;
  for (const auto& [id, loan] : peer.loans) {
    if (!loan->cancelled || !loan->work || loan->state != ImportState::Letting || peer.rings.out->in_flight(id)) continue;
    const auto complete = loan->work.query();
    if (!complete || *complete) over.push_back(loan);
  }
  for (const auto& loan : over) {
    loan->work = {};
    complete(*loan, trash);
  }
}

void Importer::dispose(Trash trash) {
  if (trash.empty()) return;
  completion_.run([kept = std::make_shared<Trash>(std::move(trash))] { kept->clear(); });
}

// ---- Acquire ------------------------------------------------------------------------------------------------------

// Whether a turn follows the present one: its record came, or the word says so and no record was owed.
bool Importer::next_ready(ImportLoan& loan) {
  if (loan.next_turn > loan.turn) return true;
  const gate::Words& words = loan.peer->words;
  if (loan.cancelled || !loan.keep_open || loan.carrier != Carrier::Direct || loan.gate == GPULOAN_GATE_EVENT || !words) return false;
  if (words.load(loan.slot, gate::Word::Ready) != gate::word_value(loan.generation, loan.turn + 1)) return false;
  loan.next_turn = loan.turn + 1;
  loan.mark(GPULOAN_STEP_READY);
  return true;
}

Result<bool> Importer::turn_passed(ImportLoan& loan) {
  ImporterPeer& peer = loan.importer_peer();
  if (loan.state == ImportState::Idle && next_ready(loan)) begin_turn(loan, loan.next_turn);
  if (loan.state != ImportState::Offered || !loan.ready_posted) return false;
  if (loan.import && loan.import->missing > 0) return false;
  auto passed = gate::passed(loan.ready_post(), true);
  if (!passed || !*passed) return passed;
  if (loan.carrier == Carrier::Ring && loan.access == GPULOAN_ACCESS_READ && loan.bytes > 0) return peer.rings.in && peer.rings.in->landed(loan.id, loan.turn);
  return true;
}

Result<void> Importer::acquirable(const ImportLoan& loan) const {
  if (loan.outcome != GPULOAN_OK) return loan.outcome_result();
  if (loan.ended || loan.state == ImportState::Letting) return fail(GPULOAN_ERR_STATE, "the loan has been returned");
  if (loan.state == ImportState::Held) return fail(GPULOAN_ERR_STATE, "turn " + std::to_string(loan.turn) + " was acquired already; say done first");
  if (loan.state == ImportState::Idle && loan.finish) return fail(GPULOAN_ERR_STATE, "no further turn of this loan comes");
  return {};
}

Result<void> Importer::import_memory(Lock& lock, const std::shared_ptr<ImportLoan>& loan) {
  if (loan->buffer) loan->pointer = loan->buffer->pointer();
  const std::shared_ptr<Import> import = loan->import;
  if (!import) return {};
  const gpuloan_access access = loan->access;
  lock.unlock();
  auto address = map(loan->importer_peer(), *import, access);
  lock.lock();
  if (!address) {
    Trash trash;
    cancel(*loan, address.error().status, address.error().text, trash);
    dispose(std::move(trash));
    return forward(std::move(address.error()));
  }
  GPULOAN_TRY(acquirable(*loan)); // it may have ended, or another thread may have been faster
  if (loan->state != ImportState::Offered) return fail(GPULOAN_ERR_STATE, std::string("the loan is ") + name(loan->state));
  if (address->pointer != 0) loan->pointer = address->pointer + loan->offset;
  if (address->host != nullptr) loan->host = address->host + loan->offset;
  if (gpu_ && address->host != nullptr && address->pointer == 0) loan->rung_reason = "host: with memory that is not pinned here: " + gpu_->pin_refusal();
  return {};
}

Result<View> Importer::acquire(const std::shared_ptr<ImportLoan>& loan, bool on_stream, cuda::Stream stream, std::uint32_t timeout_ms) {
  if (on_stream) {
    if (gate::is_cpu(stream)) return fail(GPULOAN_ERR_INVALID, "GPULOAN_STREAM_CPU is no stream that could wait: gpuloan_loan_acquire waits on the CPU");
    if (!gpu_ || !options_.loop_thread) return fail(GPULOAN_ERR_UNSUPPORTED, "a stream can wait for READY only in a context with a device and a loop thread, which releases it when the exporter is lost");
    driver::Gpu::Scope scope(*gpu_);
    GPULOAN_TRY(scope.ok());
    GPULOAN_TRY(gate::refuse_capture(*gpu_, stream));
  }
  Trash trash;
  Lock lock(mutex_);
  Result<void> refused;
  Result<bool> passed = false;
  std::optional<driver::StreamWait> on_device;
  const auto may_wait = [&] { // else on the host, until it may
    if (!on_device) on_device = driver::StreamWait::begin();
    return on_device.has_value();
  };
  const bool over = wait_turn(lock, Deadline::after_ms(timeout_ms), *loan, gate::Word::Ready, [&] {
    look_at_work(*loan, trash);
    refused = acquirable(*loan);
    passed = refused ? turn_passed(*loan) : Result<bool>(false);
    return !refused || !passed || *passed || (on_stream && loan->state == ImportState::Offered && loan->ready_posted && may_wait());
  });
  dispose(std::move(trash));
  if (!refused) return forward(std::move(refused.error()));
  if (!passed) return forward(std::move(passed.error()));
  if (!over) {
    if (loan->state == ImportState::Offered) request_tick(); // LOAN_READY is the tick's to report
    const char* what = loan->state == ImportState::Requested ? "the request was not answered" : "the turn was not ready";
    return fail(GPULOAN_ERR_TIMEOUT, std::string(what) + " within " + std::to_string(timeout_ms) + " ms");
  }
  const bool must_wait = !*passed;
  if (must_wait) {
    if (loan->gate != GPULOAN_GATE_MEMOP || loan->carrier == Carrier::Ring) return fail(GPULOAN_ERR_UNSUPPORTED, "a stream can wait for READY only under the memop gate, on a rung that does not copy on this side");
    if (loan->import && loan->import->single_use()) return fail(GPULOAN_ERR_UNSUPPORTED, "a stream cannot wait for READY of memory that is unmapped with the loan: that would stand behind the wait (S10)");
    if (gpu_waits_ >= options_.gpu_wait_limit) {
      return fail(GPULOAN_ERR_WAIT_LIMIT, std::to_string(gpu_waits_) + " streams wait on the device already: acquire on the host, or raise the option gpu_wait_limit (more than 7 stop a context)");
    }
  }
  if (auto imported = import_memory(lock, loan); !imported) return forward(std::move(imported.error()));
  loan->mark(GPULOAN_STEP_IMPORT);
  loan->state = step(loan->state, ImportEvent::Acquire).next;
  loan->streams.clear();
  View view{loan->pointer, loan->host, loan->turn};
  if (must_wait) {
    loan->gpu_wait = std::move(on_device);
    ++gpu_waits_;
    lock.unlock();
    Result<void> waits;
    {
      driver::Gpu::Scope scope(*gpu_);
      const std::lock_guard serial(loan->peer->words_mutex);
      waits = scope.ok();
      if (waits) waits = loan->peer->words.register_with(gpu_);
      if (waits) waits = gate::wait_on_stream(*gpu_, stream, loan->ready_post());
    }
    lock.lock();
    if (!waits) {
      release_wait(*loan);
      if (loan->state == ImportState::Held) loan->state = ImportState::Offered; // as if it had not been acquired
      trash = {};
      if (loan->cancelled && loan->state == ImportState::Offered) end(*loan, trash);
      dispose(std::move(trash));
      return forward(std::move(waits.error()));
    }
    if (loan->cancelled) store_release(*loan);
    request_tick();
  }
  loan->mark(GPULOAN_STEP_WRITE);
  return view;
}

Result<void> Importer::used_on(const std::shared_ptr<ImportLoan>& loan, cuda::Stream stream) {
  const Lock lock(mutex_);
  if (loan->state != ImportState::Held || loan->posting) return fail(GPULOAN_ERR_STATE, std::string("the loan is not acquired, it is ") + name(loan->state));
  if (stream == cuda::per_thread_stream()) {
    return fail(GPULOAN_ERR_INVALID, "the per-thread stream cannot be named for another call: it is a different one in every thread; name a stream of your own");
  }
  if (!gate::is_cpu(stream) && std::find(loan->streams.begin(), loan->streams.end(), stream) == loan->streams.end()) loan->streams.push_back(stream);
  return {};
}

// ---- Return -------------------------------------------------------------------------------------------------------

void Importer::sync_then_complete(const std::shared_ptr<ImportLoan>& loan) {
  Result<void> result;
  if (gpu_) {
    driver::Gpu::Scope scope(*gpu_);
    result = scope.ok();
    if (result) result = GPULOAN_CU(gpu_->driver(), cuCtxSynchronize);
  }
  Trash trash;
  const Lock lock(mutex_);
  if (!result) loan->set_outcome(result.error().status, result.error().text);
  complete(*loan, trash);
}

Result<void> Importer::give_back(const std::shared_ptr<ImportLoan>& loan, gpuloan_status status, std::string_view reason) {
  Trash trash;
  const Lock lock(mutex_);
  if (loan->ended) return {};
  if (loan->posting) return fail(GPULOAN_ERR_BUSY, "another thread is in gpuloan_loan_done of this loan");
  const ImportState before = loan->state;
  const ImportStep next = step(before, ImportEvent::Return);
  if (next.verdict != Verdict::Go) return {};
  if (status != GPULOAN_OK) {
    loan->set_outcome(status, reason.empty() ? "the importer's work failed" : std::string(reason));
  } else if (before == ImportState::Offered || before == ImportState::Held) {
    loan->set_outcome(GPULOAN_ERR_RETURNED, "let go of without done: turn " + std::to_string(loan->turn) + " was not finished");
  }
  if (before == ImportState::Requested) { // the answer is still to come
    loan->let_go = true;
    return {};
  }
  if (next.next == ImportState::Ended) {
    end(*loan, trash);
  } else {
    loan->state = next.next;
    // Nobody said which streams worked on it, so all work of the context is waited for.
    if (before == ImportState::Held) {
      apart_.run([self = std::static_pointer_cast<Importer>(shared_from_this()), loan] { self->sync_then_complete(loan); });
      request_tick();
    }
  }
  dispose(std::move(trash));
  return {};
}

Result<void> Importer::wait_done(const std::shared_ptr<ImportLoan>& loan, std::uint32_t timeout_ms) {
  Trash trash;
  Lock lock(mutex_);
  const auto working = [&] { return loan->state == ImportState::Finishing || loan->state == ImportState::Letting; };
  if (loan->turns_done == 0 && !working()) {
    return loan->outcome != GPULOAN_OK ? loan->outcome_result() : fail(GPULOAN_ERR_STATE, "no turn of the loan was done");
  }
  const bool over = wait(lock, Deadline::after_ms(timeout_ms), true, [&] {
    look_at_work(*loan, trash);
    return !working();
  });
  dispose(std::move(trash));
  if (!over) {
    return fail(GPULOAN_ERR_TIMEOUT, "the work was not complete within " + std::to_string(timeout_ms) + " ms");
  }
  return loan->outcome_result();
}

} // namespace gpuloan::loan
