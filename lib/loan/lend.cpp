// SPDX-License-Identifier: MIT
//
// A loan's way out: the way it takes, the entry in the ledger, then what the driver has to do (without the lock, for a caller's stream may
// block), and last the records, in one piece under the lock. And what the caller can do with a loan that is out.
#include <loan/exporter.hpp>

#include <new>

namespace gpuloan::loan {

Result<std::shared_ptr<ExportLoan>> Exporter::lend(const std::shared_ptr<ExporterPeer>& peer, std::uint64_t pointer, std::uint64_t bytes,
                                                   const LendOptions& options) {
  auto prepared = prepare_loan(peer, pointer, bytes, options);
  if (!prepared) return forward(std::move(prepared.error()));
  Result<void> done;
  try {
    const Lock lock(mutex_);
    done = announce(*prepared->loan, options, prepared->ready);
  } catch (const std::bad_alloc&) {
    done = forward(out_of_memory());
  }
  if (done) return std::move(prepared->loan);
  abandon(prepared->loan, done.error());
  return forward(std::move(done.error()));
}

Exporter::Lent Exporter::lend_many(const std::shared_ptr<ExporterPeer>& peer, std::span<const gpuloan_range> ranges, const LendOptions& options) {
  Lent out;
  std::vector<Prepared> prepared;
  out.loans.reserve(ranges.size());
  prepared.reserve(ranges.size());
  const auto prepare_one = [&](const gpuloan_range& range) -> Result<void> { // what throws must not take the others with it
    try {
      auto loan = prepare_loan(peer, range.pointer, range.bytes, options);
      if (!loan) return forward(std::move(loan.error()));
      prepared.push_back(std::move(*loan));
      return {};
    } catch (const std::bad_alloc&) {
      return forward(out_of_memory());
    }
  };
  for (const gpuloan_range& range : ranges) {
    auto one = prepare_one(range);
    if (one) continue;
    out.refusal = std::move(one.error());
    break;
  }
  {
    const Lock lock(mutex_);
    const Bundling records(*this, *peer);
    for (const Prepared& loan : prepared) {
      Result<void> done;
      try {
        done = announce(*loan.loan, options, loan.ready);
      } catch (const std::bad_alloc&) {
        done = forward(out_of_memory());
      }
      if (!done) {
        out.refusal = std::move(done.error());
        break;
      }
      out.loans.push_back(loan.loan);
    }
  }
  for (std::size_t at = out.loans.size(); at < prepared.size(); ++at) abandon(prepared[at].loan, *out.refusal);
  return out;
}

// All but the records.
Result<Exporter::Prepared> Exporter::prepare_loan(const std::shared_ptr<ExporterPeer>& peer, std::uint64_t pointer, std::uint64_t bytes,
                                                  const LendOptions& options) {
  {
    const Lock lock(mutex_);
    if (peer->lost) return fail(GPULOAN_ERR_PEER_LOST, "the peer is gone: " + peer->loss.text);
    if (peer->phase != Peer::Phase::Ready) return fail(GPULOAN_ERR_STATE, "the handshake with this peer is not complete");
  }
  auto place = locate(*peer, pointer, bytes, options);
  if (!place) return forward(std::move(place.error()));
  if (gpu_ && !gate::is_cpu(options.stream)) {
    driver::Gpu::Scope scope(*gpu_);
    GPULOAN_TRY(scope.ok());
    GPULOAN_TRY(gate::refuse_capture(*gpu_, options.stream));
  }
  auto admission = admit_to(*peer, *place, bytes, options);
  while (admission) {
    const Trial trial = trial_of_loan(*place, *admission, options);
    if (!needs_proof(*peer, trial, bytes, options)) break;
    GPULOAN_TRY(prove(peer, trial, place->foreign.pool));
    admission = admit_to(*peer, *place, bytes, options);
  }
  if (!admission) return forward(std::move(admission.error()));
  if (options.exclusive && place->origin == Origin::OtherArena && admission->carrier == Carrier::Direct) GPULOAN_TRY(make_exclusive(*place));
  auto loan = enter(peer, *place, pointer, bytes, options, *admission);
  if (!loan) return forward(std::move(loan.error()));
  (*loan)->stream = options.stream;
  Result<bool> posted = false;
  try {
    auto prepared = prepare(**loan, options);
    posted = prepared ? post_turn(**loan, options.stream) : forward(std::move(prepared.error()));
  } catch (const std::bad_alloc&) {
    posted = forward(out_of_memory());
  }
  if (posted) return Prepared{std::move(*loan), *posted};
  abandon(*loan, posted.error());
  return forward(std::move(posted.error()));
}

Result<std::shared_ptr<ExportLoan>> Exporter::enter(const std::shared_ptr<ExporterPeer>& peer, const Place& place, std::uint64_t pointer,
                                                    std::uint64_t bytes, const LendOptions& options, const Admission& admission) {
  const Lock lock(mutex_);
  if (peer->lost || closed_) return fail(GPULOAN_ERR_PEER_LOST, "the peer is gone: " + peer->loss.text);
  auto gate = gate_for(*peer, options);
  if (!gate) return forward(std::move(gate.error()));
  if (peer->free_slots.empty()) {
    return fail(GPULOAN_ERR_LIMIT, "all " + std::to_string(options_.slots) + " slots of this peer are in use: end some loans, or raise the option `slots`");
  }
  auto loan = std::make_shared<ExportLoan>(peer);
  loan->id = peer->next_loan++;
  loan->bytes = bytes;
  loan->access = options.access;
  loan->memory = admission.memory;
  loan->rung = admission.rung;
  loan->carrier = admission.carrier;
  loan->rung_reason = admission.reason;
  loan->gate = gate->gate;
  loan->gate_reason = gate->reason;
  loan->keep_open = options.keep_open;
  loan->pointer = pointer;
  loan->arena = peer->arena;
  loan->region = place.region;
  loan->canary_loan = options.canary;
  loan->canary = peer->canary_of(trial_of_loan(place, admission, options)).verdict;
  loan->foreign = place.foreign;
  loan->owner = place.owner;
  loan->owned = place.owned;
  if (loan->shares_foreign()) loan->writers = place.writers;
  if (options.release) loan->release_call = std::make_shared<ReleaseCall>(options.release);
  loan->metadata.assign(options.metadata.begin(), options.metadata.end());
  loan->turn = 1;
  const auto known = peer->loans.emplace(loan->id, loan).first;
  bool entered = false;
  try {
    auto free = ledger_.enter(pointer, bytes, options.access);
    entered = free.has_value();
    if (entered && !loan->canary_loan) hold(loan->handle, loan); // before anybody can hear of it
    if (!entered) {
      peer->loans.erase(known);
      if (loan->release_call) loan->release_call->disarm();
      return forward(std::move(free.error()));
    }
  } catch (...) {
    peer->loans.erase(known);
    if (entered) ledger_.leave(pointer, bytes, options.access);
    if (loan->release_call) loan->release_call->disarm();
    throw;
  }
  loan->slot = peer->free_slots.back();
  peer->free_slots.pop_back();
  loan->generation = ++peer->generations[loan->slot];
  ++loans_total_;
  return loan;
}

void Exporter::abandon(const std::shared_ptr<ExportLoan>& loan, const Error& why) {
  std::shared_ptr<void> last;
  const Lock lock(mutex_);
  if (loan->ended) return;
  loan->set_outcome(why.status, why.text);
  if (loan->release_call) loan->release_call->disarm(); // the caller learns from lend() that nothing was lent
  ExporterPeer& peer = loan->exporter_peer();
  // A copy may be queued, and start_turn has not told the arena of the streams.
  for (memory::Region* region : {loan->region, loan->staging}) {
    if (region == nullptr) continue;
    if (!gate::is_cpu(loan->stream)) loan->arena->used_on(region, loan->stream);
    if (peer.copy_stream) loan->arena->used_on(region, peer.copy_stream.get());
  }
  last = drop(loan->handle);
  finish(*loan, ExportEvent::Fail);
}

// ---- A loan that is out -------------------------------------------------------------------------------------------

Result<void> Exporter::ready(const std::shared_ptr<ExportLoan>& loan, cuda::Stream stream) {
  if (gpu_ && !gate::is_cpu(stream)) {
    driver::Gpu::Scope scope(*gpu_);
    GPULOAN_TRY(scope.ok());
    GPULOAN_TRY(gate::refuse_capture(*gpu_, stream));
  }
  {
    const Lock lock(mutex_);
    if (loan->ended) return fail(GPULOAN_ERR_STATE, "the loan has ended" + (loan->outcome_text.empty() ? "" : ": " + loan->outcome_text));
    if (!loan->keep_open) return fail(GPULOAN_ERR_STATE, "the loan was lent without keep_open: it has one turn");
    if (loan->finish_sent) return fail(GPULOAN_ERR_STATE, "the loan was asked back: no further turn can begin");
    if (loan->state != ExportState::Home || loan->acked || loan->settling) return fail(GPULOAN_ERR_STATE, std::string("no turn can begin while the loan is ") + name(loan->state));
    if (loan->turn == UINT32_MAX - 1) return fail(GPULOAN_ERR_LIMIT, "the loan has had all the turns that a control word can count");
    loan->state = step(loan->state, ExportEvent::Ready).next;
    ++loan->turn;
    loan->gate_passed = false;
    loan->stream = stream;
    loan->posting = true;
  }
  auto posted = post_turn(*loan, stream);
  const Lock lock(mutex_);
  loan->posting = false;
  if (!posted) {
    fail_loan(*loan, posted.error().status, posted.error().text);
  } else if (loan->outcome == GPULOAN_OK) {
    start_turn(*loan);
    if (*posted) announce_ready(*loan);
    pump(loan->exporter_peer());
    request_tick(std::exchange(loan->spun, false) ? kTickMaxNs : kTickFirstNs);
  }
  advance(*loan); // what came while the lock was dropped
  return loan->outcome_result();
}

Result<void> Exporter::cancel(const std::shared_ptr<ExportLoan>& loan, std::string_view reason) {
  const Lock lock(mutex_);
  if (loan->ended) return fail(GPULOAN_ERR_STATE, "the loan has ended");
  if (loan->state == ExportState::Failing) return {};
  const std::string text = reason.empty() ? "cancelled by the exporter" : "cancelled by the exporter: " + std::string(reason);
  fail_loan(*loan, GPULOAN_ERR_CANCELLED, text);
  return {};
}

Result<void> Exporter::reclaim(const std::shared_ptr<ExportLoan>& loan, std::uint32_t timeout_ms) {
  {
    const Lock lock(mutex_);
    if (!loan->ended && loan->keep_open && !loan->finish_sent) {
      channel::Record record = channel::make_record(channel::Type::Finish);
      record.cancel.loan = loan->id;
      loan->finish_sent = true;
      send(loan->exporter_peer(), record);
    }
  }
  return wait_end(*loan, timeout_ms);
}

Result<void> Exporter::wait_done(const std::shared_ptr<ExportLoan>& loan, std::uint32_t timeout_ms) {
  Lock lock(mutex_);
  const bool over = wait_turn(lock, Deadline::after_ms(timeout_ms), *loan, gate::Word::Done, [&] {
    advance(*loan);
    return loan->outcome != GPULOAN_OK || loan->ended || loan->state == ExportState::Home;
  });
  if (!over) return fail(GPULOAN_ERR_TIMEOUT, "the turn was not done within " + std::to_string(timeout_ms) + " ms");
  return loan->outcome_result();
}

} // namespace gpuloan::loan
