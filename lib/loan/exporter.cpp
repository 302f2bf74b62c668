// SPDX-License-Identifier: MIT
//
// Exporter: what importers send, and the tick. A peer that breaks the protocol is dropped; nothing it sends makes the exporter wait, fail
// or grow without bound.
#include <loan/exporter.hpp>

#include <base/log.hpp>

#include <algorithm>
#include <cstring>

namespace gpuloan::loan {
namespace {

constexpr std::uint64_t kHandshakeNs = 10'000'000'000; // a connection that has not finished by then is closed
constexpr std::uint64_t kHandshakeTickNs = 1'000'000'000;
constexpr std::uint64_t kLingerNs = 50'000'000; // the loop keeps ticking this long after the last loan

} // namespace

gpuloan_memory_state ExportLoan::memory_state() const noexcept {
  switch (state) {
    case ExportState::Released:
      return GPULOAN_MEMORY_RELEASED;
    case ExportState::Retired:
      return GPULOAN_MEMORY_RETIRED;
    case ExportState::Surrendered:
      return GPULOAN_MEMORY_SURRENDERED;
    case ExportState::Quarantined:
      return GPULOAN_MEMORY_QUARANTINED;
    default:
      return GPULOAN_MEMORY_HELD;
  }
}

Result<std::shared_ptr<Exporter>> Exporter::create(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu) {
  auto boot = channel::read_boot_id();
  if (!boot) return forward(std::move(boot.error()));
  std::shared_ptr<Exporter> exporter(new Exporter(options, std::move(gpu), *boot));
  GPULOAN_TRY(exporter->start());
  return exporter;
}

Exporter::Exporter(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu, const channel::BootId& boot)
    : Context(options, std::move(gpu)), boot_(boot), accounts_(options.account_bytes) {}

Exporter::~Exporter() { close(); }

// ---- Records ------------------------------------------------------------------------------------------------------

Result<void> Exporter::handle(const std::shared_ptr<Peer>& base, channel::Received& received) {
  const auto peer = std::static_pointer_cast<ExporterPeer>(base);
  using channel::Type;
  const channel::Record& record = *received.record;
  switch (received.type()) {
    case Type::Bye:
      return fail(GPULOAN_ERR_PEER_LOST, "the peer closed the connection");
    case Type::Request:
      return on_request(peer, received);
    case Type::Done:
      return on_done(*peer, record.turn);
    case Type::Ack:
      return on_ack(*peer, received);
    case Type::EventHandle:
      return on_event_handle(*peer, record.event_handle);
    case Type::Unmapped:
      if (!peer->arena->unmapped(record.chunk.chunk)) return fail(GPULOAN_ERR_PROTOCOL, "UNMAPPED names a chunk that was not recalled");
      notify();
      return {};
    case Type::PiecesTaken:
      peer->piece_credit = std::min(ExporterPeer::kPiecesMax, peer->piece_credit + std::min(record.pieces_taken.count, ExporterPeer::kPiecesMax));
      feed_pieces(peer);
      return {};
    case Type::RingFilled:
    case Type::RingDrained:
      GPULOAN_TRY(on_ring_moved(*peer, record, false));
      pump(*peer);
      return {};
    default:
      return fail(GPULOAN_ERR_PROTOCOL, "record type " + std::to_string(record.header.type) + " is not an importer's");
  }
}

ExportLoan* Exporter::find_loan(ExporterPeer& peer, std::uint64_t id, std::uint32_t slot, std::uint32_t generation) const {
  const auto it = peer.loans.find(id);
  if (it == peer.loans.end() || it->second->slot != slot || it->second->generation != generation) return nullptr;
  return it->second.get();
}

Result<void> Exporter::on_event_handle(ExporterPeer& peer, const channel::EventHandle& wire) {
  if (!gpu_ || wire.index >= peer.events.size() || peer.events[wire.index]->done) {
    return fail(GPULOAN_ERR_PROTOCOL, "EVENT_HANDLE names no event pair that waits for one");
  }
  cuda::IpcEventHandle handle = {};
  std::memcpy(handle.reserved, wire.handle, sizeof handle.reserved);
  const bool refused = std::all_of(std::begin(wire.handle), std::end(wire.handle), [](auto byte) { return byte == 0; });
  auto event = driver::OwnedEvent::open_ipc(gpu_, handle);
  if (!event && !peer.events_proven) {
    if (peer.events_refusal.empty()) peer.events_refusal = refused ? "the importer's driver refuses them" : event.error().text;
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "the event gate is off with this peer: " + peer.events_refusal);
    notify();
    return {};
  }
  if (!event) { // its maker may be dead already; what it sent after this still counts, and an ACK needs no event
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "a DONE event cannot be opened, its loans are done with their ACK: " + event.error().text);
    return {};
  }
  peer.events[wire.index]->done = std::move(*event);
  peer.events_proven = true;
  notify();
  for (const auto& [id, loan] : std::unordered_map(peer.loans)) advance(*loan);
  return {};
}

Result<void> Exporter::on_done(ExporterPeer& peer, const channel::Turn& turn) {
  ExportLoan* found = find_loan(peer, turn.loan, turn.slot, turn.generation);
  const auto loan = found != nullptr ? std::static_pointer_cast<ExportLoan>(found->shared_from_this()) : nullptr;
  if (loan == nullptr || turn.turn == 0 || turn.turn > loan->turn) return fail(GPULOAN_ERR_PROTOCOL, "DONE names no turn that is out");
  loan->recorded_turn = std::max(loan->recorded_turn, turn.turn);
  if (turn.at_ns != 0 && turn.turn == loan->turn) loan->step_ns[GPULOAN_STEP_DONE] = turn.at_ns;
  advance(*loan);
  if (loan->state == ExportState::Out) poll(*loan); // recorded, not complete
  return {};
}

// From now on to its end the tick looks how far it is.
void Exporter::poll(ExportLoan& loan) {
  if (!std::exchange(loan.polled, true)) ++loan.exporter_peer().polled_loans;
  request_tick();
}

Result<void> Exporter::on_ack(ExporterPeer& peer, const channel::Received& received) {
  const channel::Ack& ack = received.record->ack;
  ExportLoan* found = find_loan(peer, ack.loan, ack.slot, ack.generation);
  if (found == nullptr || found->acked || found->state == ExportState::Preparing) return fail(GPULOAN_ERR_PROTOCOL, "ACK names no loan that is out");
  const auto loan = std::static_pointer_cast<ExportLoan>(found->shared_from_this());
  loan->acked = true;
  if (peer.rings.out) peer.rings.out->forget(loan->id); // nothing more of it is sent
  loan->step_ns[GPULOAN_STEP_IMPORT] = ack.import_ns;
  loan->step_ns[GPULOAN_STEP_WRITE] = ack.write_ns;
  loan->step_ns[GPULOAN_STEP_DONE] = ack.done_ns;
  loan->step_ns[GPULOAN_STEP_UNIMPORT] = ack.unimport_ns;
  loan->step_ns[GPULOAN_STEP_ACK] = ack.ack_ns;
  if (ack.outcome != GPULOAN_OK) {
    gpuloan_status outcome = outcome_from_wire(ack.outcome);
    if (outcome == GPULOAN_ERR_CANCELLED) outcome = GPULOAN_ERR_FAILED; // cancelling is for this side, and has set the outcome then
    std::string why = channel::readable_text(received);
    fail_loan(*loan, outcome, why.empty() ? "the importer gave no reason" : std::move(why));
  } else if (loan->state == ExportState::Out && ack.turns_done != loan->turn) {
    fail_loan(*loan, GPULOAN_ERR_RETURNED, "the importer returned the loan without finishing its turn");
  } else if (loan->state == ExportState::Out) {
    loan->gate_passed = true; // ACK implies DONE; our own copies may still be on their way
  }
  advance(*loan);
  if (!loan->ended) poll(*loan);
  return {};
}

// ---- Ticks, numbers -----------------------------------------------------------------------------------------------

std::uint64_t Exporter::tick() {
  bool busy = false, sweeping = false;
  std::uint64_t proof_ns = kNever; // when to ask again for a proof
  // An exporter that stood still itself may not have read yet what came meanwhile: that time is not the peers'.
  const std::uint64_t start = now_ns(), since = start - std::exchange(ticked_ns_, start);
  const std::uint64_t stood_ns = since - std::min(since, 2 * kHandshakeTickNs);
  const auto peers = remembered_;
  for (const auto& peer : peers) {
    if (!peer->lost && peer->phase != Peer::Phase::Ready) {
      peer->connected_ns = std::min(peer->connected_ns + stood_ns, start);
      if (start - peer->connected_ns > kHandshakeNs) refuse(peer, Error{GPULOAN_ERR_TIMEOUT, "the handshake was not complete after 10 s"});
    }
    pump(*peer);
    std::erase_if(peer->late_slots, [&](const auto& late) {
      const auto written = late.second.query();
      if (written && !*written) return false;
      peer->free_slots.push_back(late.first);
      return true;
    });
    sweeping |= !peer->late_slots.empty();
    if (peer->lost) settle_peer(peer);
    if (peer->polled_loans > 0 || peer->lost) {
      for (const auto& [id, loan] : peer->loans) {
        if (due(*loan)) due_.push_back(loan);
        busy |= (loan->polled && loan->state == ExportState::Out) || loan->settling || loan->acked;
      }
    }
    std::ranges::sort(due_, {}, [](const auto& loan) { return loan->id; }); // what was done at once is told in the order of lending
    for (const auto& loan : due_) advance(*loan); // may end it, and others if the peer is lost over it
    due_.clear();
    judge_late_canaries(peer);
    seek_proof(peer);
    if (peer->lost && peer->dead && !peer->untethered && awaits_death(*peer)) proof_ns = std::min(proof_ns, std::max(peer->seal_at_ns, now_ns() + kTickMaxNs));
    busy |= peer->rings.busy();
    if (peer->arena && peer->arena->sweep()) sweeping = peer->sweeping = true;
    else if (std::exchange(peer->sweeping, false) && !peer->lost) recall_idle(*peer);
    const bool counted = peer->arena && (peer->arena->stats().chunks > 0 || peer->arena->stats().surrendered_bytes > 0);
    if (peer->memory_released && !counted && peer->quarantined.empty()) std::erase(remembered_, peer);
  }
  const std::uint64_t now = now_ns();
  if (busy) {
    active_until_ns_ = now + kLingerNs;
    const std::uint64_t wait = tick_ns_;
    tick_ns_ = next_tick(tick_ns_);
    return wait;
  }
  tick_ns_ = kTickFirstNs;
  if (listener_back_ns_ != 0 && now >= listener_back_ns_) watch_listener();
  const bool shaking = std::any_of(remembered_.begin(), remembered_.end(), [](const auto& peer) { return peer->phase != Peer::Phase::Ready && !peer->lost; });
  if (sweeping || now < active_until_ns_) return kTickMaxNs;
  if (proof_ns != kNever) return proof_ns - now;
  if (listener_back_ns_ != 0) return listener_back_ns_ - now;
  return shaking ? kHandshakeTickNs : kNever;
}

void Exporter::fill_stats(gpuloan_stats& stats) const {
  stats.pool_exported_bytes = pool_exported_bytes_;
  for (const auto& peer : remembered_) {
    stats.loans_out += peer->loans.size();
    for (const auto& loan : peer->quarantined) stats.quarantined_bytes += loan->bytes;
    if (!peer->arena) continue;
    const memory::ArenaStats arena = peer->arena->stats();
    stats.chunks += arena.chunks;
    stats.live_bytes += arena.live_bytes;
    stats.idle_bytes += arena.idle_bytes;
    stats.retired_bytes += arena.retired_bytes;
    stats.surrendered_bytes += arena.surrendered_bytes;
  }
}

void Exporter::fill_peer_info(const Peer& base, gpuloan_peer_info& info) const {
  const auto& peer = static_cast<const ExporterPeer&>(base);
  info.vmm_canary = peer.canary_of(Trial::Vmm).verdict;
  info.foreign_vmm_canary = peer.canary_of(Trial::ForeignVmm).verdict;
  info.pool_canary = peer.canary_of(Trial::Pool).verdict;
  info.ipc_canary = peer.canary_of(Trial::Ipc).verdict;
  info.host_canary = peer.host_canary();
  std::string text; // of each way that was demoted
  for (std::size_t index = 0; index < kTrials; ++index) {
    if (peer.canaries[index].verdict != GPULOAN_CANARY_DEMOTED) continue;
    text += (text.empty() ? "" : "; ") + std::string(name_of(static_cast<Trial>(index))) + ": " + peer.canaries[index].text;
  }
  text.copy(info.canary_text, sizeof info.canary_text - 1);
  info.loans_out = peer.loans.size();
  peer.account.copy(info.account, sizeof info.account - 1);
}

} // namespace gpuloan::loan
