// SPDX-License-Identifier: MIT
//
// A loan's way out: where the bytes lie, which rung and gate, the entry in the ledger, then what the driver has to do
// (without the lock, for a caller's stream may block), and last the records, in one piece under the lock.
#include <loan/exporter.hpp>

#include <cstring>

namespace gpuloan::loan {

Result<Exporter::Place> Exporter::locate(ExporterPeer& peer, std::uint64_t pointer, std::uint64_t bytes, const LendOptions& options) {
  if (bytes == 0) return Place{};
  if (pointer + bytes < pointer) return fail(GPULOAN_ERR_INVALID, memory::range_text(pointer, bytes) + " wraps around");
  if (memory::Region* region = peer.arena->find(pointer, bytes)) {
    if (options.access == GPULOAN_ACCESS_WRITE && region->spec().access == GPULOAN_ACCESS_READ) {
      return fail(GPULOAN_ERR_INVALID, "the region was made for read loans; make it with GPULOAN_ACCESS_WRITE to lend it for write");
    }
    return Place{region->spec().memory == GPULOAN_MEMORY_HOST ? Origin::ArenaHost : Origin::ArenaDevice, region, {}, false, nullptr, nullptr, ""};
  }
  Place place;
  place.origin = Origin::Foreign;
  if (options.known != nullptr) {
    place.foreign = *options.known;
    return place;
  }
  {
    const Lock lock(mutex_);
    for (const auto& other : remembered_) { // what lies in a chunk of ours can be lent as part of a region alone
      if (!other->arena || !other->arena->overlaps(pointer, bytes)) continue;
      memory::Region* region = other->arena->find(pointer, bytes);
      if (region != nullptr) {
        place.origin = Origin::OtherArena;
        place.alone = region->alone();
        place.owner = other;
        place.owned = region;
        if (region->spec().access == GPULOAN_ACCESS_WRITE) {
          place.writers = "process " + std::to_string(other->pid) + (other->account.empty() ? "" : " (" + other->account + ")") +
                          ", for which the region was made, may still map it for writing";
        }
      } else {
        return fail(GPULOAN_ERR_INVALID, memory::range_text(pointer, bytes) + " lies in the arena and is no part of one live region");
      }
    }
  }
  if (!gpu_) {
    return fail(GPULOAN_ERR_INVALID, memory::address_text(pointer) + " is in no region of this peer, and the context has no device (without one, lend the address that gpuloan_region_host gives)");
  }
  auto info = memory::classify(*gpu_, pointer, bytes);
  if (!info) return forward(std::move(info.error()));
  if (info->kind == memory::PointerKind::Unknown || info->kind == memory::PointerKind::Imported) {
    return fail(GPULOAN_ERR_INVALID, memory::address_text(pointer) + " is " + memory::pointer_kind_name(info->kind) +
                                         (info->kind == memory::PointerKind::Unknown ? "" : ": only the process that allocated it may lend it"));
  }
  place.foreign = *info;
  return place;
}

// The peer that a region was made for unmaps its chunk, so that nobody writes it during a loan to another. Waits as long as
// for a canary: a peer that holds a loan in the chunk has to give it back first.
Result<void> Exporter::make_exclusive(Place& place) {
  const std::uint64_t chunk = place.owner->arena->begin_unmap(place.owned);
  Lock lock(mutex_);
  if (chunk != 0) {
    channel::Record record = channel::make_record(channel::Type::Recall);
    record.chunk.chunk = chunk;
    send(*place.owner, record);
  }
  const auto unmapped = [&] { return !place.owner->arena->mapped(place.owned); };
  const bool over = wait(lock, Deadline::after_ms(options_.canary_timeout_ms), false, [&] { return unmapped() || place.owner->lost; });
  const char* const untold = unprovable(*place.owner); // where the tether let go, and proves nothing
  if (unmapped() || (place.owner->untethered && *untold == '\0')) {
    place.writers.clear();
    return {};
  }
  if (over) return fail(GPULOAN_ERR_PEER_LOST, "not exclusive: the peer that the region was made for is lost, and may still write it" + (*untold == '\0' ? "" : std::string(": ") + untold));
  return fail(GPULOAN_ERR_TIMEOUT, "not exclusive: the peer that the region was made for did not unmap it within " +
                                       std::to_string(options_.canary_timeout_ms) + " ms; end its loans in it first");
}

// Room for a copy: what the device has, and what lies idle in this peer's arena.
std::uint64_t Exporter::free_bytes(ExporterPeer& peer) {
  std::size_t free = 0, total = 0;
  const driver::Gpu::Scope scope(*gpu_);
  if (!scope.ok() || gpu_->driver().call.cuMemGetInfo(&free, &total) != cuda::Success) return UINT64_MAX; // the allocation will tell
  return free + peer.arena->stats().idle_bytes;
}

Result<Admission> Exporter::admit_to(ExporterPeer& peer, const Place& place, std::uint64_t bytes, const LendOptions& options) {
  AdmissionInput input;
  {
    const Lock lock(mutex_);
    input.origin = bytes == 0 ? Origin::Nothing : place.origin;
    input.kind = place.foreign.kind;
    input.alone = place.alone;
    input.access = options.access;
    input.bytes = bytes;
    input.allocation_bytes = place.foreign.bytes;
    input.allocation_base = place.foreign.base;
    input.import_limit = options_.pool_import_limit.bytes;
    input.import_limit_source = memory::limit_source_text(options_.pool_import_limit.source);
    input.wanted = options.memory;
    input.exporter = {gpu_ != nullptr, gpu_ ? gpu_->floors().bits : 0};
    input.importer = peer.floors;
    input.same_device = peer.same_device;
    input.peer_access = peer.peer_access;
    input.apart = peer.apart.c_str();
    input.same_process = peer.same_process;
    input.exclusive = peer.same_device && !input.same_process && !gpu_->floors().mps && gpu_->floors().compute_mode == cuda::ModeExclusiveProcess;
    if (!options.canary) { // which needs no proof, being one
      input.vmm = peer.canary_of(Trial::Vmm).proof();
      input.foreign_vmm = peer.canary_of(Trial::ForeignVmm).proof();
      input.pool = peer.canary_of(Trial::Pool).proof();
      input.ipc = peer.canary_of(Trial::Ipc).proof();
      input.host = peer.host_canary();
    }
    input.unprovable = unprovable(peer);
    input.rungs = options.rungs != 0 ? (options.rungs & options_.rungs) : options_.rungs;
    input.policy = options.policy;
    if (peer.last_admission && peer.last_input == input) return *peer.last_admission;
  }
  auto admission = admit(input);
  if (admission && (admission->carrier == Carrier::Stage || admission->carrier == Carrier::Ring) && bytes > 0) {
    input.free_bytes = free_bytes(peer);
    return admit(input);
  }
  if (admission) {
    const Lock lock(mutex_);
    peer.last_input = input;
    peer.last_admission = *admission;
  }
  return admission;
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

// READY of the present turn behind `stream`, as far as it can be posted now. Not under the lock: the stream is a caller's.
Result<bool> Exporter::post_turn(ExportLoan& loan, cuda::Stream stream) {
  ExporterPeer& peer = loan.exporter_peer();
  const bool copies = loan.access == GPULOAN_ACCESS_READ && loan.bytes > 0;
  if (!gpu_ || (gate::is_cpu(stream) && loan.carrier == Carrier::Direct)) { // no stream, no copy: no driver
    loan.peer->words.store(loan.slot, gate::Word::Ready, loan.word());
    return true;
  }
  driver::Gpu::Scope scope(*gpu_);
  GPULOAN_TRY(scope.ok());
  if (copies && loan.carrier == Carrier::Ring) { // the ring's stream does it, and READY follows its last copy
    const cuda::Stream ring = peer.to_importer->ring().stream();
    const cuda::Stream streams[] = {stream};
    GPULOAN_TRY(gate::join(gpu_, ring, streams));
    return false;
  }
  if (copies && loan.staged()) {
    if (gate::is_cpu(stream)) stream = peer.copy_stream.get();
    auto event = driver::OwnedEvent::create(gpu_, cuda::EventDisableTiming);
    if (!event) return forward(std::move(event.error()));
    if (loan.carrier == Carrier::Segment && loan.staging->pointer() == 0) {
      // The copy would wait for what is in its stream anyway; the copy stream is idle then. As with the host gate, the call waits
      // for its caller's stream.
      GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuStreamSynchronize, stream));
      stream = peer.copy_stream.get();
    }
    if (loan.carrier == Carrier::Stage) {
      GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuMemcpyAsync, loan.staging->pointer(), loan.pointer, loan.bytes, stream));
    } else {
      GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuMemcpyDtoHAsync, loan.staging->host(), loan.pointer, loan.bytes, stream));
    }
    GPULOAN_TRY(gate::record_or_wait(*gpu_, *event, stream));
    loan.reading = std::move(*event);
  }
  auto posted = gate::post(gpu_, stream, loan.ready_post(), &loan.ready_written);
  if (!posted) return forward(std::move(posted.error()));
  return true;
}

void Exporter::start_turn(ExportLoan& loan) {
  ExporterPeer& peer = loan.exporter_peer();
  loan.gate_passed = false;
  loan.landing = false;
  loan.unpinned_landing.reset();
  loan.step_ns[GPULOAN_STEP_DONE] = 0;
  if (loan.region != nullptr && !gate::is_cpu(loan.stream)) loan.arena->used_on(loan.region, loan.stream);
  if (loan.owned != nullptr) { // not before the loan has ended can it be destroyed
    if (!gate::is_cpu(loan.stream)) loan.owner->arena->used_on(loan.owned, loan.stream);
    if (loan.staging != nullptr) loan.owner->arena->used_on(loan.owned, peer.copy_stream.get());
  }
  if (loan.staging != nullptr) {
    if (!gate::is_cpu(loan.stream)) loan.arena->used_on(loan.staging, loan.stream);
    loan.arena->used_on(loan.staging, peer.copy_stream.get());
    if (loan.region != nullptr) loan.arena->used_on(loan.region, peer.copy_stream.get());
  }
  if (loan.carrier == Carrier::Ring && loan.bytes > 0) {
    if (loan.access == GPULOAN_ACCESS_READ) {
      peer.to_importer->start(loan.id, loan.turn, loan.pointer, loan.bytes);
      if (loan.region != nullptr) loan.arena->used_on(loan.region, peer.to_importer->ring().stream());
    } else {
      peer.from_importer->expect(loan.id, loan.turn, loan.pointer, loan.bytes);
      if (loan.region != nullptr) loan.arena->used_on(loan.region, peer.from_importer->ring().stream());
    }
  }
}

// The records that make the loan's memory known, where it is not known yet.
Result<void> Exporter::announce_memory(ExportLoan& loan, channel::Export& wire) {
  ExporterPeer& peer = loan.exporter_peer();
  if (loan.bytes != 0 && loan.shares_foreign()) {
    announce_foreign(loan, wire);
    return {};
  }
  const memory::Region* shared = loan.staging != nullptr ? loan.staging : loan.carrier == Carrier::Direct ? loan.region : nullptr;
  if (shared == nullptr || shared->chunk_id() == 0) return {};
  auto news = loan.arena->announcement(shared);
  if (!news) return forward(std::move(news.error()));
  if (news->needed) {
    channel::Record record = channel::make_record(channel::Type::Chunk);
    record.chunk.chunk = news->chunk;
    record.chunk.bytes = news->bytes;
    record.chunk.kind = static_cast<std::uint32_t>(news->memory == GPULOAN_MEMORY_HOST ? channel::ChunkKind::HostPages : channel::ChunkKind::Vmm);
    record.chunk.access = news->access;
    if (gpu_) std::memcpy(record.chunk.uuid, gpu_->floors().uuid.bytes, sizeof record.chunk.uuid);
    std::vector<UniqueFd> fds;
    fds.push_back(std::move(news->fd));
    send(peer, record, {}, std::move(fds));
    loan.arena->announced(news->chunk);
    if (peer.lost) return fail(GPULOAN_ERR_PEER_LOST, "the peer is gone: " + peer.loss.text);
  }
  const std::uint64_t base = shared->pointer() != 0 ? shared->pointer() : reinterpret_cast<std::uint64_t>(shared->host());
  wire.chunk = shared->chunk_id();
  wire.offset = shared->chunk_offset() + (shared == loan.staging ? 0 : loan.pointer - base);
  loan.exposed_bytes = shared->chunk_bytes() - loan.bytes;
  return {};
}

Result<void> Exporter::announce(ExportLoan& loan, const LendOptions& options, bool ready) {
  ExporterPeer& peer = loan.exporter_peer();
  if (peer.lost || closed_) return fail(GPULOAN_ERR_PEER_LOST, "the peer is gone: " + peer.loss.text);
  if (loan.carrier == Carrier::Ring && loan.bytes > 0 && peer.copies_broken) { // its rings do not move any more
    return fail(peer.copies_error.status, "a copy of the host rung failed with this peer: " + peer.copies_error.text + "; let it connect again, or allow another rung");
  }
  channel::Record record = channel::make_record(channel::Type::Export);
  channel::Export& wire = record.export_;
  GPULOAN_TRY(announce_memory(loan, wire));
  if (ready) loan.mark(GPULOAN_STEP_READY);
  loan.mark(GPULOAN_STEP_EXPORT);
  if (ready) loan.step_ns[GPULOAN_STEP_READY] = loan.step_ns[GPULOAN_STEP_EXPORT]; // one record carries both
  wire.loan = loan.id;
  wire.request = options.request;
  wire.bytes = loan.bytes;
  wire.export_ns = loan.step_ns[GPULOAN_STEP_EXPORT];
  wire.ready_ns = loan.step_ns[GPULOAN_STEP_READY];
  wire.slot = loan.slot;
  wire.generation = loan.generation;
  wire.access = loan.access;
  wire.rung = loan.rung;
  wire.gate = loan.gate;
  wire.memory = loan.memory;
  wire.flags = (loan.keep_open ? channel::ExportKeepOpen : 0U) | (ready ? channel::ExportReady : 0U) | (loan.canary_loan ? channel::ExportCanary : 0U);
  wire.event = loan.event_index;
  wire.exposed_kib = static_cast<std::uint32_t>(std::min<std::uint64_t>(loan.exposed_bytes >> 10, UINT32_MAX));
  wire.canary = loan.canary;
  loan.stream = options.stream;
  loan.state = step(loan.state, ExportEvent::Send).next;
  start_turn(loan);
  send(peer, record, loan.metadata);
  pump(peer);
  // Where the importer's CPU stores DONE its record follows: no loop has to be woken to look for it.
  const bool stored = loan.gate == GPULOAN_GATE_HOST || !peer.floors.has_device;
  if (loan.carrier != Carrier::Direct || !stored) poll(loan);
  return {};
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

Trial Exporter::trial_of_loan(const Place& place, const Admission& admission, const LendOptions& options) noexcept {
  const bool foreign = place.foreign.bytes != 0 && admission.carrier == Carrier::Direct;
  return trial_of(admission.rung, admission.carrier, foreign, options.access);
}

// Each way is proven before its first loan. Ends: prove() leaves it verified, demoted, or unanswered, which rules out a rung
// without a copy and keeps the host rung.
bool Exporter::needs_proof(ExporterPeer& peer, Trial trial, std::uint64_t bytes, const LendOptions& options) {
  if (bytes == 0 || options.canary) return false;
  const Lock lock(mutex_);
  const Canary& canary = peer.canary_of(trial);
  const bool kept = rung_of(trial) == GPULOAN_RUNG_HOST && canary.running && canary.waited;
  return canary.verdict == GPULOAN_CANARY_NOT_ATTEMPTED && !kept;
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
    request_tick();
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
  return wait_end(loan, timeout_ms);
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

Result<void> Exporter::wait_end(const std::shared_ptr<ExportLoan>& loan, std::uint32_t timeout_ms) {
  Lock lock(mutex_);
  if (!wait(lock, Deadline::after_ms(timeout_ms), false, [&] { return loan->ended; })) {
    return fail(GPULOAN_ERR_TIMEOUT, "the loan did not end within " + std::to_string(timeout_ms) + " ms");
  }
  return loan->outcome_result();
}

} // namespace gpuloan::loan
