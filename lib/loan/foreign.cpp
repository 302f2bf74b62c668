// SPDX-License-Identifier: MIT
//
// Memory that is not the arena's on its way out: what the driver has to export for the importer to map it, and the records
// that hand it over. It serves one loan; a cached handle could name something else by the next (P14).
#include <loan/exporter.hpp>

#include <cstring>

namespace gpuloan::loan {
namespace {

constexpr std::uint64_t kForeignChunk = std::uint64_t{1} << 63; // above all numbers of the arena's chunks

} // namespace

// How the importer gets at memory that is not the arena's.
Result<void> Exporter::prepare_foreign(ExportLoan& loan) {
  if (loan.rung == GPULOAN_RUNG_POOL) return prepare_pool(loan);
  if (loan.rung == GPULOAN_RUNG_IPC) {
    auto handle = driver::IpcMapping::handle_of(*gpu_, loan.foreign.base);
    if (!handle) return forward(std::move(handle.error()));
    loan.legacy = *handle;
    return {};
  }
  auto pieces = memory::retain_chunks(gpu_, loan.pointer, loan.bytes);
  if (!pieces) return forward(std::move(pieces.error()));
  if (auto probe = pieces->front().export_fd(); !probe) { // what another process made can be mapped here, and not be handed on
    return fail(GPULOAN_ERR_INVALID, memory::address_text(loan.pointer) + " cannot be exported: only the process that allocated it may lend it: " + probe.error().text);
  }
  loan.pieces = std::make_shared<const std::vector<driver::VmmHandle>>(std::move(*pieces));
  return {};
}

// The pool's descriptor crosses once for a peer and is closed again; the pointer's data is kept by buffer (P1, P4, P14).
Result<void> Exporter::prepare_pool(ExportLoan& loan) {
  ExporterPeer& peer = loan.exporter_peer();
  const auto known = peer.pools.find(loan.foreign.pool);
  if (known == peer.pools.end()) {
    auto fd = driver::export_pool(*gpu_, loan.foreign.pool);
    if (!fd) return forward(std::move(fd.error()));
    std::vector<UniqueFd> fds;
    fds.push_back(std::move(*fd));
    const Lock lock(mutex_);
    loan.pool = peer.pools.size() + 1;
    peer.pools.emplace(loan.foreign.pool, loan.pool);
    channel::Record record = channel::make_record(channel::Type::Pool);
    record.pool.pool = loan.pool;
    std::memcpy(record.pool.uuid, gpu_->floors().uuid.bytes, sizeof record.pool.uuid);
    send(peer, record, {}, std::move(fds));
  } else {
    loan.pool = known->second;
  }
  {
    const Lock lock(mutex_);
    if (const auto it = pool_pointers_.find(loan.foreign.buffer_id); it != pool_pointers_.end()) {
      loan.pool_pointer = it->second;
      return {};
    }
  }
  auto pointer = driver::export_pool_pointer(*gpu_, loan.foreign.base);
  if (!pointer) return forward(std::move(pointer.error()));
  loan.pool_pointer = *pointer;
  const Lock lock(mutex_);
  if (pool_pointers_.size() >= kPoolPointersMax) pool_pointers_.erase(pool_pointers_.begin()); // the oldest buffer
  if (pool_pointers_.emplace(loan.foreign.buffer_id, *pointer).second) pool_exported_bytes_ += loan.foreign.bytes;
  return {};
}

// The records that make it known, for this loan alone.
void Exporter::announce_foreign(ExportLoan& loan, channel::Export& wire) {
  ExporterPeer& peer = loan.exporter_peer();
  channel::Record record = channel::make_record(channel::Type::Foreign);
  record.foreign.chunk = wire.chunk = kForeignChunk | ++peer.foreign_chunks;
  record.foreign.bytes = loan.foreign.bytes;
  record.foreign.buffer = loan.foreign.buffer_id;
  record.foreign.access = loan.access;
  std::memcpy(record.foreign.uuid, gpu_->floors().uuid.bytes, sizeof record.foreign.uuid);
  if (loan.rung == GPULOAN_RUNG_POOL) {
    record.foreign.kind = static_cast<std::uint32_t>(channel::ForeignKind::Pool);
    record.foreign.pool = loan.pool;
    send(peer, record, std::as_bytes(std::span(loan.pool_pointer.reserved)));
  } else if (loan.rung == GPULOAN_RUNG_IPC) {
    record.foreign.kind = static_cast<std::uint32_t>(channel::ForeignKind::Legacy);
    send(peer, record, std::as_bytes(std::span(loan.legacy.reserved)));
  } else {
    record.foreign.kind = static_cast<std::uint32_t>(channel::ForeignKind::Vmm);
    record.foreign.pieces = static_cast<std::uint32_t>(loan.pieces->size());
    send(peer, record);
    peer.feeds.push_back({std::static_pointer_cast<ExportLoan>(loan.shared_from_this()), loan.pieces, wire.chunk, 0});
    feed_pieces(std::static_pointer_cast<ExporterPeer>(peer.shared_from_this()));
  }
  wire.offset = loan.pointer - loan.foreign.base;
  loan.exposed_bytes = loan.foreign.bytes - loan.bytes;
}

// Making a descriptor takes the driver some 50 us, and there may be thousands: on the thread apart, as far as the importer
// has closed those that it got.
void Exporter::feed_pieces(const std::shared_ptr<ExporterPeer>& peer) {
  if (peer->feeding || peer->feeds.empty() || peer->piece_credit == 0 || peer->lost) return;
  peer->feeding = true;
  apart_.run([this, peer] {
    while (feed_piece(*peer)) {
    }
  });
}

bool Exporter::feed_piece(ExporterPeer& peer) {
  PieceFeed feed;
  {
    const Lock lock(mutex_);
    const auto over = [](const PieceFeed& at) { return at.loan->ended || at.next == at.pieces->size(); };
    while (!peer.feeds.empty() && over(peer.feeds.front())) peer.feeds.pop_front();
    peer.feeding = !peer.feeds.empty() && peer.piece_credit > 0 && !peer.lost && !closed_;
    if (!peer.feeding) return false;
    feed = peer.feeds.front();
  }
  const driver::VmmHandle& piece = (*feed.pieces)[feed.next];
  auto fd = piece.export_fd();
  const Lock lock(mutex_);
  if (peer.feeds.empty() || peer.feeds.front().chunk != feed.chunk) return true;
  if (!fd) {
    fail_loan(*feed.loan, fd.error().status, fd.error().text);
    peer.feeds.pop_front();
    return true;
  }
  channel::Record record = channel::make_record(channel::Type::Piece);
  record.piece.chunk = feed.chunk;
  record.piece.bytes = piece.bytes();
  record.piece.index = static_cast<std::uint32_t>(feed.next);
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(*fd));
  send(peer, record, {}, std::move(fds));
  ++peer.feeds.front().next;
  --peer.piece_credit;
  return true;
}

} // namespace gpuloan::loan
