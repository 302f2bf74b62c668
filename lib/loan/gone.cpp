// SPDX-License-Identifier: MIT
//
// What a lost peer leaves behind (contract rule 5). Its loans end at once. Memory of the arena is retired, which is safe
// whoever lives on. Memory of the caller's own, which we cannot retire, stays quarantined until the peer's process is dead
// and its tether was let go; only then is it released.
#include <loan/exporter.hpp>

#include <base/log.hpp>
#include <base/reaper.hpp>

#include <algorithm>
#include <cstring>
#include <new>

namespace gpuloan::loan {
namespace {

constexpr std::uint64_t kSealFirstNs = std::chrono::nanoseconds(kTetherFirstPause).count(), kSealLongestNs = std::chrono::nanoseconds(kTetherLongestPause).count();

} // namespace

void Exporter::on_peer_lost(const std::shared_ptr<Peer>& base) {
  const auto peer = std::static_pointer_cast<ExporterPeer>(base);
  if (peer->key_claimed) keys_.give_back(peer->key);
  peer->key_claimed = false;
  ::explicit_bzero(peer->key, sizeof peer->key);
  const auto loans = peer->loans;
  for (const auto& [id, loan] : loans) settle_lost(*loan);
  // Nothing more is sent; a feed would keep its chunks, and through its loan the peer. Releasing them is the driver's work.
  if (!peer->feeds.empty()) apart_.run([feeds = std::exchange(peer->feeds, {})]() mutable { feeds.clear(); });
  if (peer->arena) peer->arena->retire();
  settle_gone(*peer);
  // A path may be looked at and left again (that is how a second listener finds out that it is live); a socketpair's other
  // end was meant for one worker.
  const bool silent = peer->loss.status == GPULOAN_ERR_PEER_LOST && peer->needs_key;
  if (peer->phase != Peer::Phase::Ready && !peer->refused && !silent && !closed_) {
    push_event({GPULOAN_EVENT_PEER_REFUSED, peer->loss.status, nullptr, nullptr, nullptr, peer->loss.text});
  }
  report_lost(*peer);
  request_tick();
}

void Exporter::settle_lost(ExportLoan& loan) {
  if (loan.ended || loan.state == ExportState::Preparing) return; // lend() itself sees that the peer is lost
  ExporterPeer& peer = loan.exporter_peer();
  if (peer.rings.out) peer.rings.out->forget(loan.id);
  loan.settling = true;
  advance(loan); // reads the word once more: what was done before the death counts
}

// PEER_LOST says that all loans have ended, so it waits for our own copies of the last ones.
void Exporter::report_lost(ExporterPeer& peer) {
  if (!peer.lost || peer.closed || peer.loss_reported || !peer.loans.empty() || peer.phase != Peer::Phase::Ready || closed_) return;
  peer.loss_reported = true;
  push_event({GPULOAN_EVENT_PEER_LOST, peer.loss.status, peer.shared_from_this(), nullptr, nullptr, peer.loss.text});
}

// Once nothing of ours is under way with a lost peer, all but its arena goes; and its pidfd once nothing is counted by it.
void Exporter::settle_peer(const std::shared_ptr<ExporterPeer>& peer) {
  const bool canary = std::any_of(peer->canaries.begin(), peer->canaries.end(), [](const Canary& one) { return one.out(); });
  if (!peer->memory_released && peer->loans.empty() && !peer->rings.busy() && peer->late_slots.empty() && !canary && !peer->in_loop) {
    peer->release_memory(false);
  }
  if (peer->memory_released && peer->pidfd_in_loop && !awaits_death(*peer)) {
    engine_->remove(peer->pidfd.get());
    peer->pidfd_in_loop = false;
    peer->pidfd.reset();
    peers_.erase(peer->tag);
  }
}

bool Exporter::awaits_death(const Peer& base) const {
  const auto& peer = static_cast<const ExporterPeer&>(base);
  if (!peer.quarantined.empty()) return true;
  if (!peer.arena) return false;
  const memory::ArenaStats stats = peer.arena->stats();
  return stats.retired_bytes + stats.surrendered_bytes > 0;
}

// ---- The proof ----------------------------------------------------------------------------------------------------

const char* Exporter::unprovable(const ExporterPeer& peer) const noexcept {
  if ((gpu_ && gpu_->floors().mps) || (peer.floors.floors & channel::kDeviceMps) != 0) return "under MPS nothing tells when a dead client's work has ended";
  if (!peer.pidfd && !peer.untethered) return "there is no pidfd of it (Linux 5.3 and newer have them)";
  if ((peer.floors.floors & GPULOAN_FLOOR_HOST_REGISTER) == 0) return "its device cannot register the page that would tell";
  return "";
}

void Exporter::on_peer_dead(const std::shared_ptr<Peer>& base) {
  const auto peer = std::static_pointer_cast<ExporterPeer>(base);
  peer->dead = true;
  request_tick();
}

// Each tick: asks for the proof as long as something waits for it.
void Exporter::seek_proof(const std::shared_ptr<ExporterPeer>& peer) {
  if (!peer->lost || !peer->dead || peer->untethered || peer->sealing || now_ns() < peer->seal_at_ns || !awaits_death(*peer)) return;
  peer->sealing = true;
  apart_.run([this, peer, tether = peer->tether] { try_seal(peer, *tether); });
}

void Exporter::try_seal(const std::shared_ptr<ExporterPeer>& peer, const Tether& tether) {
  const bool let_go = tether.let_go();
  const Lock lock(mutex_);
  peer->sealing = false;
  if (let_go) {
    peer->untethered = true;
    settle_gone(*peer);
  } else { // a forked child, or work that still runs
    peer->seal_pause_ns = std::clamp(peer->seal_pause_ns * 2, kSealFirstNs, kSealLongestNs);
    peer->seal_at_ns = now_ns() + peer->seal_pause_ns;
  }
  request_tick();
}

void Exporter::settle_gone(ExporterPeer& peer) {
  if (!peer.lost || !peer.dead || !peer.untethered) return;
  if (peer.arena) peer.arena->holders_gone();
  for (const auto& weak : peer.retired) {
    if (const auto loan = weak.lock()) loan->state = step(loan->state, ExportEvent::Gone).next;
  }
  for (const auto& loan : std::exchange(peer.quarantined, {})) {
    loan->state = step(loan->state, ExportEvent::Gone).next;
    release(*loan);
  }
  notify();
}

void Exporter::release(ExportLoan& loan) {
  ledger_.leave(loan.pointer, loan.bytes, loan.access);
  if (!loan.release_call && !loan.pieces) return;
  struct Released {
    std::shared_ptr<ReleaseCall> call;
    std::shared_ptr<const std::vector<driver::VmmHandle>> pieces; // goes first
  };
  std::shared_ptr<Released> released;
  try {
    released = std::make_shared<Released>(loan.release_call, loan.pieces);
    loan.release_call.reset();
    loan.pieces.reset();
    releases_.run([released] { // there, whoever else has it still
      released->pieces.reset();
      released->call.reset();
    });
  } catch (const std::bad_alloc&) { // not here: the lock is held
    if (released) dispose(std::move(released));
    else dispose(std::exchange(loan.release_call, nullptr));
  }
}

} // namespace gpuloan::loan
