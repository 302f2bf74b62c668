// SPDX-License-Identifier: MIT
//
// Importer: what the exporter sends, and the tick. A record that breaks the protocol loses the exporter; a loan that cannot be carried on
// this side is answered with an ACK that says why.
#include <loan/importer.hpp>

#include <base/log.hpp>

#include <cstring>

namespace gpuloan::loan {

Result<std::shared_ptr<Importer>> Importer::create(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu) {
  auto boot = channel::read_boot_id();
  if (!boot) return forward(std::move(boot.error()));
  std::shared_ptr<Importer> importer(new Importer(options, std::move(gpu), *boot));
  GPULOAN_TRY(importer->start());
  return importer;
}

Importer::Importer(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu, const channel::BootId& boot)
    : Context(options, std::move(gpu)), boot_(boot), completion_(options.loop_thread, spins()), apart_(true, false), foreign_(true, false) {}

Importer::~Importer() { close(); }

// ---- Records ------------------------------------------------------------------------------------------------------

Result<void> Importer::handle(const std::shared_ptr<Peer>& base, channel::Received& received) {
  const auto peer = std::static_pointer_cast<ImporterPeer>(base);
  using channel::Type;
  const channel::Record& record = *received.record;
  const auto loan_of = [&peer](std::uint64_t id) -> std::shared_ptr<ImportLoan> {
    const auto it = peer->loans.find(id);
    return it == peer->loans.end() ? nullptr : it->second;
  };
  Trash trash;
  switch (received.type()) {
    case Type::Bye:
    case Type::Refused:
      return fail(GPULOAN_ERR_PEER_LOST, "the exporter closed the connection" + (received.tail.empty() ? "" : ": " + channel::readable_text(received)));
    case Type::Chunk:
      return on_chunk(*peer, received);
    case Type::Recall:
      return on_recall(*peer, record.chunk.chunk);
    case Type::Tether:
      return on_tether(*peer, received);
    case Type::Foreign:
      return on_foreign(*peer, received);
    case Type::Pool:
      return on_pool(*peer, received);
    case Type::Piece:
      return on_piece(peer, received);
    case Type::Ring:
      return on_ring(*peer, received);
    case Type::EventHandle:
      return on_event_handle(*peer, record.event_handle);
    case Type::Export:
      return on_export(peer, received);
    case Type::Ready:
      on_ready(*peer, record.turn);
      return {};
    case Type::Cancel: // for a loan that we let go of already, it crossed our ACK
      if (const auto loan = loan_of(record.cancel.loan)) {
        cancel(*loan, outcome_from_wire(record.cancel.status), channel::readable_text(received), trash);
      }
      dispose(std::move(trash));
      return {};
    case Type::Finish:
      if (const auto loan = loan_of(record.cancel.loan)) {
        loan->finish = true;
        if (loan->state == ImportState::Idle && next_ready(*loan)) {
          begin_turn(*loan, loan->next_turn);
          request_tick();
        }
        if (loan->state == ImportState::Idle) end(*loan, trash);
        notify();
      }
      dispose(std::move(trash));
      return {};
    case Type::Denied: {
      const auto it = peer->requests.find(record.denied.request);
      if (it == peer->requests.end()) return fail(GPULOAN_ERR_PROTOCOL, "DENIED names no open request");
      const auto loan = it->second;
      const auto status = record.denied.status == GPULOAN_ERR_LIMIT ? GPULOAN_ERR_LIMIT : GPULOAN_ERR_DENIED;
      cancel(*loan, status, channel::readable_text(received), trash);
      return {};
    }
    case Type::RingFilled:
    case Type::RingDrained:
      GPULOAN_TRY(on_ring_moved(*peer, record, !peer->adopt_error.text.empty()));
      pump(*peer);
      return {};
    default:
      return fail(GPULOAN_ERR_PROTOCOL, "record type " + std::to_string(record.header.type) + " is not an exporter's");
  }
}

Result<void> Importer::on_ring(ImporterPeer& peer, channel::Received& received) {
  const channel::Ring& wire = received.record->ring;
  const bool known = wire.to_importer != 0 ? peer.rings.in != nullptr : peer.rings.out != nullptr;
  if (known || !gpu_) return fail(GPULOAN_ERR_PROTOCOL, "RING came where none can be");
  auto ring = memory::HostRing::adopt(gpu_, received.fds.take(0), wire.slot_bytes, wire.slot_count);
  if (!ring) {
    if (ring.error().status == GPULOAN_ERR_PROTOCOL) return forward(std::move(ring.error()));
    // Loans that need it are answered with this.
    peer.adopt_error = {ring.error().status, "the ring of the host rung cannot be used here: " + ring.error().text + "; free what it names, then connect again"};
    return {};
  }
  if (wire.to_importer != 0) {
    peer.rings.in = std::make_unique<memory::RingSink>(std::move(*ring), true);
  } else {
    peer.rings.out = std::make_unique<memory::RingSource>(std::move(*ring));
  }
  return {};
}

Result<void> Importer::on_event_handle(ImporterPeer& peer, const channel::EventHandle& wire) {
  if (!gpu_ || wire.index != peer.events.size() || peer.events.size() >= 4096) return fail(GPULOAN_ERR_PROTOCOL, "EVENT_HANDLE out of order");
  auto pair = std::make_shared<ImportEvents>();
  auto ours = open_events(*pair, wire);
  if (!ours) GPULOAN_LOG(GPULOAN_LOG_WARNING, "interprocess events do not work here, the exporter is told: " + ours.error().text);
  peer.events.push_back(std::move(pair));
  channel::Record record = channel::make_record(channel::Type::EventHandle);
  record.event_handle.index = wire.index;
  if (ours) std::memcpy(record.event_handle.handle, ours->reserved, sizeof record.event_handle.handle); // else 0: there is none
  send(peer, record);
  return {};
}

Result<cuda::IpcEventHandle> Importer::open_events(ImportEvents& pair, const channel::EventHandle& wire) const {
  cuda::IpcEventHandle handle = {};
  std::memcpy(handle.reserved, wire.handle, sizeof handle.reserved);
  auto ready = driver::OwnedEvent::open_ipc(gpu_, handle);
  if (!ready) return forward(std::move(ready.error()));
  auto done = driver::OwnedEvent::create(gpu_, cuda::EventDisableTiming | cuda::EventInterprocess);
  if (!done) return forward(std::move(done.error()));
  auto ours = done->ipc_handle();
  if (!ours) return ours;
  pair.ready = std::move(*ready);
  pair.done = std::move(*done);
  return ours;
}

Result<void> Importer::on_export(const std::shared_ptr<ImporterPeer>& peer, const channel::Received& received) {
  const channel::Export& wire = received.record->export_;
  // 0 is what a request has for a loan before it is granted: an end of the one would take the other with it.
  if (wire.loan == 0 || peer->loans.contains(wire.loan) || wire.slot >= peer->words.slots()) return fail(GPULOAN_ERR_PROTOCOL, "EXPORT names a loan or slot that is in use");
  if (wire.gate == GPULOAN_GATE_EVENT && wire.event >= peer->events.size()) return fail(GPULOAN_ERR_PROTOCOL, "EXPORT names an event that was not announced");
  std::shared_ptr<Import> import;
  if (wire.chunk != 0) {
    const auto it = peer->imports.find(wire.chunk);
    if (it == peer->imports.end() || wire.offset > it->second->bytes || wire.bytes > it->second->bytes - wire.offset) {
      return fail(GPULOAN_ERR_PROTOCOL, "EXPORT does not lie in an announced chunk");
    }
    if (wire.access == GPULOAN_ACCESS_WRITE && it->second->access != GPULOAN_ACCESS_WRITE) return fail(GPULOAN_ERR_PROTOCOL, "EXPORT for write in a read chunk");
    import = it->second;
    if (import->single_use() && import->holds != 0) return fail(GPULOAN_ERR_PROTOCOL, "EXPORT names foreign memory of another loan");
  }
  std::shared_ptr<ImportLoan> loan;
  if (wire.request != 0) {
    const auto it = peer->requests.find(wire.request);
    if (it == peer->requests.end() || it->second->bytes != wire.bytes) return fail(GPULOAN_ERR_PROTOCOL, "EXPORT answers no open request");
    // A result is written, by the caller and not by the library's own proof of a rung.
    if (wire.access != GPULOAN_ACCESS_WRITE || (wire.flags & channel::ExportCanary) != 0) return fail(GPULOAN_ERR_PROTOCOL, "EXPORT answers a request with what no result can be written into");
    loan = it->second;
  } else {
    loan = std::make_shared<ImportLoan>(peer);
    ++loans_total_;
  }
  loan->id = wire.loan;
  loan->bytes = wire.bytes;
  loan->access = wire.access == GPULOAN_ACCESS_WRITE ? GPULOAN_ACCESS_WRITE : GPULOAN_ACCESS_READ;
  loan->memory = wire.memory == GPULOAN_MEMORY_HOST ? GPULOAN_MEMORY_HOST : GPULOAN_MEMORY_DEVICE;
  switch (wire.rung) {
    case GPULOAN_RUNG_VMM:
    case GPULOAN_RUNG_POOL:
    case GPULOAN_RUNG_IPC:
      loan->rung = static_cast<gpuloan_rung>(wire.rung);
      break;
    default:
      loan->rung = GPULOAN_RUNG_HOST;
  }
  loan->gate = wire.gate == GPULOAN_GATE_MEMOP ? GPULOAN_GATE_MEMOP : wire.gate == GPULOAN_GATE_EVENT ? GPULOAN_GATE_EVENT : GPULOAN_GATE_HOST;
  loan->carrier = import != nullptr || wire.bytes == 0 ? Carrier::Direct : Carrier::Ring;
  loan->slot = wire.slot;
  loan->generation = wire.generation;
  loan->event_index = wire.event;
  if (wire.gate == GPULOAN_GATE_EVENT) loan->events = peer->events[wire.event];
  loan->keep_open = (wire.flags & channel::ExportKeepOpen) != 0;
  loan->finish = !loan->keep_open;
  loan->canary_loan = (wire.flags & channel::ExportCanary) != 0;
  loan->canary = static_cast<gpuloan_canary>(std::min<std::uint32_t>(wire.canary, GPULOAN_CANARY_DEMOTED));
  loan->exposed_bytes = std::uint64_t{wire.exposed_kib} << 10;
  loan->step_ns[GPULOAN_STEP_EXPORT] = wire.export_ns;
  loan->step_ns[GPULOAN_STEP_READY] = wire.ready_ns;
  loan->metadata.assign(received.tail.begin(), received.tail.end());
  peer->loans.emplace(loan->id, loan); // from here on it is cancelled with the peer, should there be no memory for the rest
  peer->requests.erase(wire.request);
  loan->import = import;
  loan->offset = wire.offset;
  loan->turn = 1;
  loan->ready_posted = (wire.flags & channel::ExportReady) != 0;
  loan->state = step(ImportState::Requested, ImportEvent::Export).next;
  if (import != nullptr) ++import->holds;

  Trash trash;
  if (loan->carrier == Carrier::Ring) {
    if (auto buffer = prepare_buffer(*loan); !buffer) {
      cancel(*loan, buffer.error().status, buffer.error().text, trash);
      dispose(std::move(trash));
      return {};
    }
  }
  if (loan->pair() != nullptr && !loan->pair()->done) { // it crossed our refusal
    cancel(*loan, GPULOAN_ERR_UNSUPPORTED, "interprocess events do not work on the importer's side", trash);
    dispose(std::move(trash));
    return {};
  }
  if (loan->let_go) {
    cancel(*loan, GPULOAN_ERR_RETURNED, "returned before it was granted", trash);
    dispose(std::move(trash));
    return {};
  }
  if (loan->canary_loan) {
    completion_.run([self = std::static_pointer_cast<Importer>(shared_from_this()), loan] { self->answer_canary(loan); });
  } else if (wire.request == 0) {
    hold(loan->handle, loan); // the reference that the event brings to the caller
    push_event({GPULOAN_EVENT_LOAN_OFFERED, GPULOAN_OK, peer, loan, nullptr, ""});
  }
  notify();
  request_tick();
  return {};
}

void Importer::on_ready(ImporterPeer& peer, const channel::Turn& turn) {
  const auto it = peer.loans.find(turn.loan);
  if (it == peer.loans.end()) return; // it crossed our ACK
  ImportLoan& loan = *it->second;
  if (loan.ready_posted && turn.turn <= loan.turn) return; // its word was seen before the record
  if (loan.state == ImportState::Offered && turn.turn == loan.turn) { // turn 1, posted after EXPORT
    loan.ready_posted = true;
    loan.step_ns[GPULOAN_STEP_READY] = turn.at_ns;
  } else if (loan.state == ImportState::Idle) {
    loan.step_ns[GPULOAN_STEP_READY] = turn.at_ns;
    begin_turn(loan, turn.turn);
  } else { // the exporter saw our DONE before we did
    loan.next_turn = turn.turn;
    loan.step_ns[GPULOAN_STEP_READY] = turn.at_ns;
  }
  notify();
  request_tick();
}

// ---- Loss, ticks --------------------------------------------------------------------------------------------------

void Importer::on_peer_lost(const std::shared_ptr<Peer>& base) {
  auto& peer = static_cast<ImporterPeer&>(*base);
  Trash trash;
  std::vector<std::shared_ptr<ImportLoan>> loans;
  for (const auto& [id, loan] : peer.loans) loans.push_back(loan);
  for (const auto& [id, loan] : peer.requests) loans.push_back(loan);
  for (const auto& loan : loans) cancel(*loan, GPULOAN_ERR_PEER_LOST, peer.loss.text, trash);
  for (const auto& [id, import] : std::map(peer.imports)) {
    if (import->holds == 0) drop_import(peer, import);
  }
  const bool told = peer.phase == Peer::Phase::Ready && !closed_ && !peer.closed; // not of one whose handle is gone
  if (told) push_event({GPULOAN_EVENT_PEER_LOST, peer.loss.status, base, nullptr, nullptr, peer.loss.text});
  dispose(std::move(trash));
}

std::uint64_t Importer::tick() {
  bool busy = false;
  for (const auto& base : std::vector(remembered_)) {
    ImporterPeer& peer = *base;
    pump(peer);
    Trash trash;
    settle_cancelled(peer, trash);
    busy |= settle_works(peer, trash);
    dispose(std::move(trash));
    busy |= peer.rings.busy();
    for (const auto& [id, loan] : peer.loans) {
      busy |= loan->cancelled && loan->work;
      if (loan->gpu_wait && gate::reached(peer.words.load(loan->slot, gate::Word::Ready), loan->word())) release_wait(*loan);
      busy |= loan->gpu_wait.has_value();
      if (loan->state != ImportState::Offered || loan->ready_reported || loan->canary_loan) continue;
      auto passed = turn_passed(*loan);
      if (!passed || *passed) { // an error shows in acquire
        loan->ready_reported = true;
        push_event({GPULOAN_EVENT_LOAN_READY, GPULOAN_OK, base, loan, nullptr, ""});
      } else {
        busy |= loan->ready_posted;
      }
    }
    if (peer.lost && peer.loans.empty() && peer.limbo.empty() && !busy) std::erase(remembered_, base);
  }
  busy |= !options_.loop_thread && completion_.pending();
  if (!busy) {
    tick_ns_ = kTickFirstNs;
    return kNever;
  }
  const std::uint64_t wait = tick_ns_;
  tick_ns_ = next_tick(tick_ns_);
  return wait;
}

void Importer::fill_stats(gpuloan_stats& stats) const {
  for (const auto& remembered : remembered_) {
    const ImporterPeer& peer = *remembered;
    stats.loans_out += peer.loans.size();
    for (const auto& [id, import] : peer.imports) {
      ++stats.chunks;
      if (import->mapped) stats.imported_bytes += import->bytes;
    }
  }
}

void Importer::fill_peer_info(const Peer& peer, gpuloan_peer_info& info) const { info.loans_out = static_cast<const ImporterPeer&>(peer).loans.size(); }

} // namespace gpuloan::loan
