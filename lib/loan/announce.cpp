// SPDX-License-Identifier: MIT
//
// What the importer is told of a turn: READY, behind the caller's stream, and the first time EXPORT, behind the records that make the
// memory known.
#include <loan/exporter.hpp>

#include <cstring>

namespace gpuloan::loan {

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
    const cuda::Stream ring = peer.rings.out->ring().stream();
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
      peer.rings.out->start(loan.id, loan.turn, loan.pointer, loan.bytes);
      if (loan.region != nullptr) loan.arena->used_on(loan.region, peer.rings.out->ring().stream());
    } else {
      peer.rings.in->expect(loan.id, loan.turn, loan.pointer, loan.bytes);
      if (loan.region != nullptr) loan.arena->used_on(loan.region, peer.rings.in->ring().stream());
    }
  }
}

void Exporter::announce_ready(ExportLoan& loan) {
  loan.mark(GPULOAN_STEP_READY);
  if (!loan.watched(gate::Word::Ready)) send_turn(loan, channel::Type::Ready, loan.step_ns[GPULOAN_STEP_READY]);
}

} // namespace gpuloan::loan
