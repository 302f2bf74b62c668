// SPDX-License-Identifier: MIT
//
// The caller's work of a turn at the importer: done() posts DONE behind it, and then somebody looks until it is over: the caller
// itself while turns are short, else the completion thread, or the ring that carries the bytes home.
#include <loan/importer.hpp>

#include <base/log.hpp>

#include <new>

namespace gpuloan::loan {
namespace {

constexpr std::uint64_t kHandOverNs = 100'000;
constexpr std::uint64_t kLookNs = 100'000, kLandNs = 1'000'000;

Result<void> make_event(const std::shared_ptr<driver::Gpu>& gpu, bool blocking, driver::OwnedEvent& event) {
  if (event && event.blocking() == blocking) return {};
  auto made = driver::OwnedEvent::create(gpu, cuda::EventDisableTiming | (blocking ? cuda::EventBlockingSync : 0U));
  if (!made) return forward(std::move(made.error()));
  event = std::move(*made);
  return {};
}

} // namespace

// ---- Done ---------------------------------------------------------------------------------------------------------

// Where the driver refuses, the turn is done as under the host gate.
void Importer::pin_words(ImportLoan& loan) {
  std::string& refusal = loan.importer_peer().words_refusal;
  const std::lock_guard serial(loan.peer->words_mutex);
  if (refusal.empty()) {
    if (auto registered = loan.peer->words.register_with(gpu_); !registered) refusal = registered.error().text;
  }
  if (refusal.empty()) return;
  const Lock lock(mutex_);
  loan.gate_reason = "memop: the control words cannot be pinned here: " + refusal;
}

// Enqueues DONE behind the work in `stream`. true: it has passed already; else done.behind is recorded behind the work, or
// the ring carries on.
Result<bool> Importer::post_done(Posted& done, cuda::Stream stream) {
  const std::shared_ptr<ImportLoan>& loan = done.loan;
  driver::OwnedEvent& behind = *done.behind;
  const bool ring = loan->carrier == Carrier::Ring && loan->access == GPULOAN_ACCESS_WRITE && loan->bytes > 0;
  if (!gpu_) {
    loan->peer->words.store(loan->slot, gate::Word::Done, loan->word());
    return true;
  }
  driver::Gpu::Scope scope(*gpu_);
  GPULOAN_TRY(scope.ok());
  if (gate::is_cpu(stream) && !loan->streams.empty()) stream = loan->streams.front();
  if (!gate::is_cpu(stream)) GPULOAN_TRY(gate::join(gpu_, stream, loan->streams));
  if (ring) {
    const cuda::Stream streams[] = {stream};
    const cuda::Stream through = loan->importer_peer().rings.out->ring().stream();
    GPULOAN_TRY(gate::join(gpu_, through, streams));
    auto event = driver::OwnedEvent::create(gpu_, cuda::EventDisableTiming);
    if (!event) return forward(std::move(event.error()));
    GPULOAN_TRY(event->record(through));
    behind = std::move(*event);
    return false;
  }
  if (loan->gate == GPULOAN_GATE_MEMOP) pin_words(*loan);
  gate::Post target = loan->done_post();
  const bool ahead = target.gate == GPULOAN_GATE_MEMOP && loan->goes_ahead(options_.loop_thread);
  if (ahead) {
    GPULOAN_TRY(make_event(gpu_, false, behind));
    target.ahead = &behind;
  }
  auto posted = gate::post(gpu_, stream, target);
  if (!posted) return forward(std::move(posted.error()));
  loan->busy = *posted == gate::Posted::Queued;
  if (!loan->busy) return true;
  if (ahead) {
    done.following = target.value;
    return false;
  }
  Result<void> recorded = make_event(gpu_, true, behind);
  if (recorded) recorded = behind.record(stream);
  if (recorded) return false;
  // DONE is posted, the exporter may have seen it: the turn cannot go back to the caller, so what has no event is waited for here.
  GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuStreamSynchronize, stream));
  return true;
}

Result<Importer::Posted> Importer::begin_done(const std::shared_ptr<ImportLoan>& loan, cuda::Stream stream) {
  std::optional<driver::Gpu::Scope> scope; // for all the calls that follow
  if (gpu_ && !gate::is_cpu(stream)) {
    scope.emplace(*gpu_);
    GPULOAN_TRY(scope->ok());
    GPULOAN_TRY(gate::refuse_capture(*gpu_, stream));
  }
  // Now: nothing may fail for want of it once DONE is posted.
  Posted out{loan, std::make_shared<driver::OwnedEvent>()};
  {
    const Lock lock(mutex_);
    if (loan->state != ImportState::Held || loan->posting) {
      if (loan->outcome != GPULOAN_OK) return forward(std::move(loan->outcome_result().error()));
      return fail(GPULOAN_ERR_STATE, std::string("no turn of the loan is acquired, it is ") + name(loan->state));
    }
    loan->posting = true;
    if (loan->spare) out.behind = std::move(loan->spare);
  }
  Result<bool> posted = false;
  try {
    posted = post_done(out, stream);
  } catch (const std::bad_alloc&) {
    posted = forward(out_of_memory());
  }
  if (posted) {
    out.passed = *posted;
    return out;
  }
  const Lock lock(mutex_);
  loan->posting = false; // the turn is still the caller's: done can be tried again, or the loan returned
  return forward(std::move(posted.error()));
}

Result<void> Importer::settle_done(Posted& posted, Trash& trash) {
  const std::shared_ptr<ImportLoan>& loan = posted.loan;
  loan->posting = false;
  const bool ring = loan->carrier == Carrier::Ring && loan->access == GPULOAN_ACCESS_WRITE && loan->bytes > 0;
  loan->state = step(loan->state, ImportEvent::Done).next;
  loan->following = posted.following;
  if (loan->cancelled || (loan->finish && !next_ready(*loan))) loan->state = step(loan->state, ImportEvent::Return).next;
  if (posted.passed) {
    loan->mark(GPULOAN_STEP_DONE);
    loan->turns_done = loan->turn;
    complete(*loan, trash);
  } else if (ring) {
    ImporterPeer& peer = loan->importer_peer();
    loan->work = std::move(*posted.behind);
    if (!loan->cancelled) peer.rings.out->start(loan->id, loan->turn, loan->pointer, loan->bytes);
    pump(peer);
    request_tick();
  } else {
    if (loan->gate == GPULOAN_GATE_EVENT) send_turn(*loan, channel::Type::Done, 0); // RECORDED: the exporter may query from now on
    loan->behind = std::move(posted.behind);
    loan->behind_watched = false;
    loan->behind_ns = now_ns();
    loan->look_ns = loan->behind_ns + kLookNs;
    loan->over_ns = 0;
    if (!options_.loop_thread && spins()) hot_until_ns_ = loan->behind_ns + work_patience_.spin_ns();
    // It watches the work too, should there be no memory for that now.
    request_tick(loan->following != 0 && loan->spun ? kTickMaxNs : kTickFirstNs);
    if (loan->following == 0 && (loan->state != ImportState::Finishing || !loan->keep_open)) {
      try {
        watch_work(loan);
      } catch (const std::bad_alloc&) {
      }
    }
  }
  return loan->outcome_result();
}

Result<void> Importer::done(const std::shared_ptr<ImportLoan>& loan, cuda::Stream stream) {
  auto posted = begin_done(loan, stream);
  if (!posted) return forward(std::move(posted.error()));
  Trash trash;
  const Lock lock(mutex_);
  return settle_done(*posted, trash);
}

Result<void> Importer::done_many(std::span<const std::shared_ptr<ImportLoan>> loans, cuda::Stream stream, std::uint32_t& count) {
  std::vector<Posted> posted;
  posted.reserve(loans.size());
  Result<void> refused;
  for (const auto& loan : loans) { // what throws must not leave the others half done
    try {
      auto begun = begin_done(loan, stream);
      if (begun) posted.push_back(std::move(*begun));
      else refused = forward(std::move(begun.error()));
    } catch (const std::bad_alloc&) {
      refused = forward(out_of_memory());
    }
    if (!refused) break;
  }
  Trash trash;
  const Lock lock(mutex_);
  for (count = 0; count < posted.size();) { // peer by peer, in the order given
    Peer& peer = *posted[count].loan->peer;
    const Bundling records(*this, peer);
    for (; count < posted.size() && posted[count].loan->peer.get() == &peer; ++count) {
      try {
        auto settled = settle_done(posted[count], trash);
        if (!settled && refused) refused = std::move(settled);
      } catch (const std::bad_alloc&) {
        if (refused) refused = forward(out_of_memory());
      }
    }
  }
  return refused;
}

void Importer::pump(ImporterPeer& peer) try {
  memory::RingSource::Progress source;
  memory::RingSink::Progress sink;
  Trash trash;
  Result<void> moved = move_rings(peer, source, sink);
  const auto loan_of = [&peer](const memory::Piece& piece) -> std::shared_ptr<ImportLoan> {
    const auto it = peer.loans.find(piece.loan);
    return it == peer.loans.end() ? nullptr : it->second;
  };
  // Under every gate the word is stored here: one that the device wrote behind the last copy could come after the ACK, or, when
  // this process is killed, never.
  for (const memory::Piece& piece : source.complete) {
    const auto loan = loan_of(piece);
    if (!loan) continue;
    peer.words.store(loan->slot, gate::Word::Done, loan->word());
    loan->mark(GPULOAN_STEP_DONE);
    loan->turns_done = loan->turn;
    complete(*loan, trash);
  }
  std::erase_if(peer.limbo, [&](auto& entry) {
    if (peer.rings.in && peer.rings.in->in_flight(entry.first)) return false;
    trash.push_back(std::move(entry.second));
    return true;
  });
  if (!sink.landed.empty()) notify();
  dispose(std::move(trash));
  if (!moved && !peer.lost) { // without a working device the connection is worth nothing
    const auto it = peers_.find(peer.tag);
    if (it != peers_.end()) lose(it->second, std::move(moved.error()));
  }
} catch (const std::bad_alloc&) { // what has landed and was not told would be waited for
  lose(peer.shared_from_this(), out_of_memory());
}

// ---- Until it is over ---------------------------------------------------------------------------------------------

void Importer::on_complete(ImportLoan& loan, Result<void> result, Trash& trash) {
  loan.mark(GPULOAN_STEP_DONE);
  work_patience_.waited(loan.step_ns[GPULOAN_STEP_DONE] - loan.behind_ns);
  loan.caller_looks = loan.peer->words && loan.peer->words.watched(loan.slot, gate::Word::Ready);
  hot_until_ns_ = 0;
  if (result) {
    if (loan.state == ImportState::Finishing || loan.state == ImportState::Letting) loan.turns_done = loan.turn;
  } else {
    loan.set_outcome(result.error().status, "the work on the loan failed: " + result.error().text);
    if (loan.state == ImportState::Finishing) loan.state = ImportState::Letting;
  }
  complete(loan, trash);
}

// Where DONE follows the event it is looked at first, which is no call of the driver's. The event alone counts: an exporter that spoils
// the word costs itself a moment.
void Importer::look_at_work(ImportLoan& loan, Trash& trash) {
  if (!loan.behind) return;
  const bool landed = loan.done_landed();
  const std::uint64_t now = landed ? 0 : now_ns();
  if (!landed && now < loan.look_ns) return;
  auto over = loan.behind->query();
  if (over && !*over) {
    loan.look_ns = now + kLookNs;
    return;
  }
  if (over && !landed) {
    if (loan.over_ns == 0) loan.over_ns = now;
    if (now - loan.over_ns < kLandNs) return;
  }
  on_complete(loan, over ? Result<void>() : Result<void>(forward(std::move(over.error()))), trash);
  if (over && !loan.behind_watched && !loan.ended) loan.spare = std::move(loan.behind);
  loan.behind.reset(); // last: until then it is looked at again, should there have been no memory
}

void Importer::watch_work(const std::shared_ptr<ImportLoan>& loan) {
  completion_.watch(loan->behind, [self = std::static_pointer_cast<Importer>(shared_from_this()), loan, event = loan->behind](Result<void> result) {
    Trash trash;
    const Lock lock(self->mutex_);
    if (loan->behind != event) return; // a caller who spins saw it first
    self->on_complete(*loan, std::move(result), trash);
    loan->behind.reset();
    if (loan->state == ImportState::Offered) self->request_tick(); // the next turn began: LOAN_READY is the tick's to report
  });
  loan->behind_watched = true;
}

bool Importer::watch_works() noexcept {
  try {
    for (const auto& peer : remembered_) {
      for (const auto& [id, loan] : peer->loans) {
        if (loan->behind && !loan->behind_watched) watch_work(loan);
      }
    }
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// While turns follow each other closely the caller is back in acquire() and looks at its work itself; waking a thread for it
// would take longer than such a turn. What goes on for longer is handed to that thread.
bool Importer::settle_works(ImporterPeer& peer, Trash& trash) {
  std::vector<std::shared_ptr<ImportLoan>> works;
  for (const auto& [id, loan] : peer.loans) {
    if (loan->behind && !loan->behind_watched) works.push_back(loan);
  }
  bool busy = false;
  for (const auto& loan : works) {
    look_at_work(*loan, trash);
    if (!loan->behind) continue;
    if (now_ns() - loan->behind_ns < kHandOverNs || !loan->behind->blocking()) busy = true;
    else watch_work(loan);
  }
  return busy;
}

} // namespace gpuloan::loan
