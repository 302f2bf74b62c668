// SPDX-License-Identifier: MIT
//
// What a loan's rung and gate need before its first turn, made once per peer where it can be: control words, event pairs,
// rings, staging regions. Driver calls, so none is made with the context's lock. A floor is a promise and not a proof:
// where the driver refuses the control words or the events after all, the next gate takes their place; where it refuses to
// pin pages, they are used as they are.
#include <loan/exporter.hpp>

#include <algorithm>
#include <cstring>

namespace gpuloan::loan {

Result<GateChoice> Exporter::gate_for(const ExporterPeer& peer, const LendOptions& options) const {
  const bool event_free = peer.events.size() < ExporterPeer::kEventPairsMax ||
                          std::any_of(peer.events.begin(), peer.events.end(), [](const auto& pair) { return !pair->in_use; });
  SideFloors ours = {gpu_ != nullptr, gpu_ ? gpu_->floors().bits : 0};
  if (!peer.words_refusal.empty()) ours.floors &= ~static_cast<std::uint32_t>(GPULOAN_FLOOR_HOST_REGISTER);
  if (!peer.events_refusal.empty()) ours.floors &= ~static_cast<std::uint32_t>(GPULOAN_FLOOR_IPC_EVENTS);
  auto gate = choose_gate(options.gate != GPULOAN_GATE_AUTO ? options.gate : options_.gate, ours, peer.floors, peer.same_device, event_free);
  std::string& text = gate ? gate->reason : gate.error().text;
  if (!peer.words_refusal.empty()) text += "; the control words cannot be pinned: " + peer.words_refusal;
  if (!peer.events_refusal.empty()) text += "; interprocess events fail with this peer: " + peer.events_refusal;
  return gate;
}

// The gate that was chosen turned out not to work: the next one, unless it was asked for by name.
Result<void> Exporter::choose_again(ExportLoan& loan, const LendOptions& options) const {
  auto gate = gate_for(loan.exporter_peer(), options);
  if (!gate) return forward(std::move(gate.error()));
  loan.gate = gate->gate;
  loan.gate_reason = gate->reason;
  return {};
}

Result<void> Exporter::prepare_stream(driver::OwnedStream& stream) {
  if (stream) return {};
  auto made = driver::OwnedStream::create(gpu_);
  if (!made) return forward(std::move(made.error()));
  const Lock lock(mutex_);
  stream = std::move(*made);
  return {};
}

// The first pair of a peer is the proof that both sides can open the other's events: a driver may have the floor and fail the
// calls (WSL2). Its answer is waited for as for a canary, once; what is unanswered proves nothing, so AUTO takes the host gate
// until the answer comes, and who asked for the event gate by name gets it.
Result<void> Exporter::prepare_event(ExportLoan& loan, const LendOptions& options) {
  ExporterPeer& peer = loan.exporter_peer();
  Lock lock(mutex_);
  const auto unused = std::find_if(peer.events.begin(), peer.events.end(), [](const auto& pair) { return !pair->in_use; });
  auto index = static_cast<std::uint32_t>(unused - peer.events.begin());
  if (unused == peer.events.end()) {
    lock.unlock(); // others that make pairs wait for prepare_mutex
    auto pair = std::make_unique<EventPair>();
    auto made = make_event(*pair);
    lock.lock();
    if (!made) {
      peer.events_refusal = made.error().text;
      return choose_again(loan, options);
    }
    index = static_cast<std::uint32_t>(peer.events.size());
    peer.events.push_back(std::move(pair));
    channel::Record record = channel::make_record(channel::Type::EventHandle);
    record.event_handle.index = index;
    std::memcpy(record.event_handle.handle, made->reserved, sizeof record.event_handle.handle);
    send(peer, record);
  }
  const auto known = [&] { return peer.events_proven || !peer.events_refusal.empty() || peer.lost; };
  if (!known() && !peer.events_waited && !silent(peer)) {
    peer.events_waited = !wait(lock, Deadline::after_ms(options_.canary_timeout_ms), false, known);
  }
  if (peer.lost) return fail(GPULOAN_ERR_PEER_LOST, "the peer is gone: " + peer.loss.text);
  if (!peer.events_refusal.empty()) return choose_again(loan, options);
  const gpuloan_gate asked = options.gate != GPULOAN_GATE_AUTO ? options.gate : options_.gate;
  if (!peer.events_proven && asked != GPULOAN_GATE_EVENT) {
    loan.gate = GPULOAN_GATE_HOST;
    loan.gate_reason += std::string(loan.gate_reason.empty() ? "" : "; ") + "event: its first pair is still unanswered by this peer";
    return {};
  }
  EventPair& pair = *peer.events[index];
  pair.in_use = true;
  loan.event = &pair;
  loan.event_index = index;
  return {};
}

Result<cuda::IpcEventHandle> Exporter::make_event(EventPair& pair) const {
  auto event = driver::OwnedEvent::create(gpu_, cuda::EventDisableTiming | cuda::EventInterprocess);
  if (!event) return forward(std::move(event.error()));
  pair.ready = std::move(*event);
  return pair.ready.ipc_handle();
}

Result<void> Exporter::prepare_ring(ExporterPeer& peer, bool to_importer) {
  if (to_importer ? peer.rings.out != nullptr : peer.rings.in != nullptr) return {};
  auto ring = memory::HostRing::create(gpu_, memory::kRingSlotBytes, memory::kRingSlots);
  if (!ring) {
    ring.error().text = "the ring of the host rung cannot be made: " + ring.error().text + "; free what it names, then lend again, or allow another rung";
    return forward(std::move(ring.error()));
  }
  channel::Record record = channel::make_record(channel::Type::Ring);
  record.ring.slot_bytes = ring->slot_bytes();
  record.ring.slot_count = ring->slots();
  record.ring.to_importer = to_importer ? 1 : 0;
  std::vector<UniqueFd> fds;
  fds.push_back(ring->take_fd());
  const Lock lock(mutex_);
  if (to_importer) {
    peer.rings.out = std::make_unique<memory::RingSource>(std::move(*ring));
  } else {
    peer.rings.in = std::make_unique<memory::RingSink>(std::move(*ring), false);
  }
  send(peer, record, {}, std::move(fds));
  return {};
}

// Another gate where the driver will not pin the control words, unless memop was asked for by name.
Result<void> Exporter::prepare_words(ExportLoan& loan, const LendOptions& options) {
  ExporterPeer& peer = loan.exporter_peer();
  auto registered = peer.words.register_with(gpu_);
  if (registered) return {};
  const Lock lock(mutex_);
  peer.words_refusal = registered.error().text;
  return choose_again(loan, options);
}

// In front, where a text that is too long is not cut.
void Exporter::note_unpinned(ExportLoan& loan) const {
  std::string note;
  ExporterPeer& peer = loan.exporter_peer();
  const bool ring = loan.carrier == Carrier::Ring;
  const bool unpinned = ring ? !(loan.access == GPULOAN_ACCESS_READ ? peer.rings.out->ring() : peer.rings.in->ring()).pinned()
                             : loan.carrier == Carrier::Segment && loan.staging->pointer() == 0;
  if (unpinned) note = "host: with memory that is not pinned here: " + gpu_->pin_refusal() + "; ";
  if (ring && (peer.floors.floors & GPULOAN_FLOOR_HOST_REGISTER) == 0) note += "host: with memory that is not pinned at the importer, whose device cannot register it; ";
  loan.rung_reason.insert(0, note);
}

// What the chosen rung and gate need before the first turn; driver calls, made once per peer where they can be.
Result<void> Exporter::prepare(ExportLoan& loan, const LendOptions& options) {
  ExporterPeer& peer = loan.exporter_peer();
  const std::lock_guard serial(peer.prepare_mutex);
  if (loan.gate == GPULOAN_GATE_MEMOP && gpu_) GPULOAN_TRY(prepare_words(loan, options));
  if (loan.gate == GPULOAN_GATE_EVENT) GPULOAN_TRY(prepare_event(loan, options));
  if (loan.bytes == 0) return {};
  if (loan.shares_foreign()) return prepare_foreign(loan);
  if (loan.carrier == Carrier::Ring) {
    GPULOAN_TRY(prepare_ring(peer, loan.access == GPULOAN_ACCESS_READ));
    note_unpinned(loan);
    return {};
  }
  if (!loan.staged()) return {};
  GPULOAN_TRY(prepare_stream(peer.copy_stream));
  const gpuloan_memory memory = loan.carrier == Carrier::Stage ? GPULOAN_MEMORY_DEVICE : GPULOAN_MEMORY_HOST;
  auto staging = loan.arena->create({loan.bytes, 0, options.access, memory, false});
  if (!staging) return forward(std::move(staging.error()));
  loan.staging = *staging;
  note_unpinned(loan);
  if (loan.carrier == Carrier::Segment && loan.staging->pointer() == 0 && !peer.unpinned) {
    auto unpinned = memory::UnpinnedCopies::create(gpu_);
    if (!unpinned) return forward(std::move(unpinned.error()));
    const Lock lock(mutex_);
    peer.unpinned = std::move(*unpinned);
  }
  return {};
}

} // namespace gpuloan::loan
