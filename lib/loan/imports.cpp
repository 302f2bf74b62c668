// SPDX-License-Identifier: MIT
//
// Chunks at the importer. A chunk's descriptor is kept until the first loan maps it, then closed; the mapping stays until
// the exporter recalls the chunk or is gone. Holds are counted per loan, so that UNMAPPED is only said when none is left.
#include <loan/importer.hpp>
#include <loan/tether.hpp>

#include <base/reaper.hpp>

#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>

namespace gpuloan::loan {
namespace {

constexpr std::uint32_t kPiecesMax = 1U << 20; // 2 TiB in the smallest chunks
constexpr std::size_t kPoolsMax = 1024;

} // namespace

Result<void> Importer::on_chunk(ImporterPeer& peer, channel::Received& received) {
  const channel::Chunk& wire = received.record->chunk;
  if (wire.chunk == 0 || wire.bytes == 0 || peer.imports.contains(wire.chunk)) return fail(GPULOAN_ERR_PROTOCOL, "CHUNK names a chunk that is known already");
  if (peer.imports.size() >= ImporterPeer::kImportsMax) return fail(GPULOAN_ERR_PROTOCOL, "the exporter sent more than " + std::to_string(ImporterPeer::kImportsMax) + " chunks");
  auto import = std::make_shared<Import>();
  import->id = wire.chunk;
  import->bytes = wire.bytes;
  import->kind = wire.kind == static_cast<std::uint32_t>(channel::ChunkKind::HostPages) ? ImportKind::HostPages : ImportKind::Vmm;
  import->access = wire.access == GPULOAN_ACCESS_WRITE ? GPULOAN_ACCESS_WRITE : GPULOAN_ACCESS_READ;
  import->fd = received.fds.take(0);
  peer.imports.emplace(wire.chunk, std::move(import));
  return {};
}

Result<void> Importer::on_foreign(ImporterPeer& peer, channel::Received& received) {
  const channel::Foreign& wire = received.record->foreign;
  if (wire.chunk == 0 || wire.bytes == 0 || peer.imports.contains(wire.chunk)) return fail(GPULOAN_ERR_PROTOCOL, "FOREIGN names a chunk that is known already");
  if (peer.imports.size() >= ImporterPeer::kImportsMax) return fail(GPULOAN_ERR_PROTOCOL, "the exporter sent more than " + std::to_string(ImporterPeer::kImportsMax) + " chunks");
  auto import = std::make_shared<Import>();
  import->id = wire.chunk;
  import->bytes = wire.bytes;
  import->access = wire.access == GPULOAN_ACCESS_WRITE ? GPULOAN_ACCESS_WRITE : GPULOAN_ACCESS_READ;
  const auto kind = static_cast<channel::ForeignKind>(wire.kind);
  const auto pool = kind == channel::ForeignKind::Pool ? peer.pools.find(wire.pool) : peer.pools.end();
  const bool handle = received.tail.size() == sizeof import->legacy_handle.reserved;
  if (handle && (kind == channel::ForeignKind::Legacy || pool != peer.pools.end())) {
    import->kind = kind == channel::ForeignKind::Legacy ? ImportKind::Legacy : ImportKind::Pool;
    std::memcpy(import->legacy_handle.reserved, received.tail.data(), received.tail.size());
    std::memcpy(import->pool_pointer.reserved, received.tail.data(), received.tail.size());
    const std::shared_ptr<ImportPool> of = pool != peer.pools.end() ? pool->second : nullptr;
    std::shared_ptr<ForeignMapping>& known = peer.foreign[wire.buffer];
    if (!known) known = std::make_shared<ForeignMapping>(of);
    if (known->pool != of) return fail(GPULOAN_ERR_PROTOCOL, "FOREIGN names a buffer that is known already as memory of another pool, or of none");
    ++known->uses;
    import->buffer = wire.buffer;
    import->foreign = known;
  } else if (kind == channel::ForeignKind::Vmm && wire.pieces > 0 && wire.pieces <= kPiecesMax) {
    import->kind = ImportKind::Pieces;
    import->missing = wire.pieces;
    import->foreign = std::make_shared<ForeignMapping>(nullptr);
  } else {
    return fail(GPULOAN_ERR_PROTOCOL, "FOREIGN is of no kind that is known here, without its handle, or of too many pieces");
  }
  peer.imports.emplace(wire.chunk, std::move(import));
  return {};
}

Result<void> Importer::on_pool(ImporterPeer& peer, channel::Received& received) {
  const std::uint64_t number = received.record->pool.pool;
  if (number == 0 || peer.pools.contains(number) || peer.pools.size() >= kPoolsMax) return fail(GPULOAN_ERR_PROTOCOL, "POOL names a pool that is known already, or one too many");
  auto pool = std::make_shared<ImportPool>();
  pool->fd = received.fds.take(0);
  peer.pools.emplace(number, std::move(pool));
  return {};
}

Result<void> Importer::on_piece(const std::shared_ptr<ImporterPeer>& peer, channel::Received& received) {
  const channel::Piece& wire = received.record->piece;
  const auto it = peer->imports.find(wire.chunk);
  std::shared_ptr<Import> import = it != peer->imports.end() ? it->second : nullptr; // none: its loan has ended, they crossed
  if (import && (import->kind != ImportKind::Pieces || import->missing == 0)) return fail(GPULOAN_ERR_PROTOCOL, "PIECE belongs to no memory that waits for one");
  foreign_.run([self = std::static_pointer_cast<Importer>(shared_from_this()), peer, import, wire, fd = std::make_shared<UniqueFd>(received.fds.take(0))] {
    self->take_piece(peer, import, wire, std::move(*fd));
  });
  return {};
}

// Off the loop: each takes the driver some 60 us, and there may be thousands.
void Importer::take_piece(const std::shared_ptr<ImporterPeer>& peer, const std::shared_ptr<Import>& import, const channel::Piece& piece, UniqueFd fd) {
  Result<driver::VmmHandle> handle = driver::VmmHandle();
  if (import && gpu_) handle = driver::VmmHandle::import_fd(gpu_, fd.get(), piece.bytes);
  fd.reset();
  Trash trash;
  const Lock lock(mutex_);
  channel::Record record = channel::make_record(channel::Type::PiecesTaken);
  record.pieces_taken.chunk = piece.chunk;
  record.pieces_taken.count = 1;
  send(*peer, record);
  if (!import || !import->foreign || import->missing == 0) return; // unmapped before this was done again, for want of memory
  if (handle && piece.index != import->foreign->pieces.size()) handle = fail(GPULOAN_ERR_PROTOCOL, "the pieces of the memory came out of order");
  if (handle) {
    import->foreign->pieces.push_back(std::move(*handle));
    --import->missing;
  } else {
    for (const auto& [id, loan] : std::unordered_map(peer->loans)) {
      if (loan->import == import) cancel(*loan, handle.error().status, handle.error().text, trash);
    }
  }
  dispose(std::move(trash));
  notify();
  request_tick();
}

Result<void> Importer::on_tether(ImporterPeer& peer, channel::Received& received) {
  if (peer.tether) return fail(GPULOAN_ERR_PROTOCOL, "TETHER came twice");
  auto mapping = Mapping::map_shared(received.fds.take(0).get(), kTetherBytes);
  if (!mapping) return forward(std::move(mapping.error()));
  peer.tether = std::move(*mapping);
  return {};
}

// Before any device memory of the exporter's is mapped: from here on the tether shows as long as this process, a child of it
// or its work on the device may touch that memory.
Result<void> Importer::tie(ImporterPeer& peer) {
  const std::lock_guard serial(peer.tether_mutex);
  if (peer.tether_registration) return {};
  if (!peer.tether) return fail(GPULOAN_ERR_PROTOCOL, "the exporter sent no tether");
  if (!gpu_->floors().has(GPULOAN_FLOOR_HOST_REGISTER)) return {}; // the exporter knows
  auto registration = driver::HostRegistration::create(gpu_, peer.tether.bytes());
  if (!registration) { // not for want of memory: a limit on locked memory stays, so the exporter takes another rung for good
    return fail(GPULOAN_ERR_UNSUPPORTED, "the page that tells of the importer's end cannot be pinned: " + registration.error().text);
  }
  peer.tether_registration = std::move(*registration);
  return {};
}

Result<void> Importer::on_recall(ImporterPeer& peer, std::uint64_t chunk) {
  const auto it = peer.imports.find(chunk);
  if (it == peer.imports.end()) return fail(GPULOAN_ERR_PROTOCOL, "RECALL names an unknown chunk");
  if (it->second->single_use()) return fail(GPULOAN_ERR_PROTOCOL, "RECALL names foreign memory, which goes with its loan");
  it->second->recalled = true;
  if (it->second->holds == 0) drop_import(peer, it->second);
  return {};
}

// A chunk; or, when the peer is lost, foreign memory whose loan never came.
void Importer::drop_import(ImporterPeer& peer, std::shared_ptr<Import> import) {
  const std::uint64_t chunk = import->id;
  if (import->single_use()) { // another loan may have the block: its end closes it only if no use stays behind here
    foreign_.run([self = std::static_pointer_cast<Importer>(shared_from_this()), kept = std::static_pointer_cast<ImporterPeer>(peer.shared_from_this()), import] {
      self->unmap(*kept, *import);
    });
  }
  peer.imports.erase(chunk);
  if (import->kind == ImportKind::HostPages) gpuloan::dispose(std::move(import)); // unregistering may take long; unmapping does not
  import.reset();
  channel::Record record = channel::make_record(channel::Type::Unmapped);
  record.chunk.chunk = chunk;
  send(peer, record); // nothing when the peer is lost
}

Result<void> Importer::map_device(Import& import, gpuloan_access access) {
  if (!import.handle) {
    auto handle = driver::VmmHandle::import_fd(gpu_, import.fd.get(), import.bytes);
    if (!handle) return forward(std::move(handle.error()));
    import.handle = std::move(*handle);
    import.fd.reset();
  }
  driver::VmmMapping& mapping = access == GPULOAN_ACCESS_WRITE ? import.writable : import.read_only;
  if (mapping) return {};
  auto mapped = driver::VmmMapping::map(gpu_, import.handle, access == GPULOAN_ACCESS_WRITE ? cuda::AccessReadWrite : cuda::AccessRead);
  if (!mapped) return forward(std::move(mapped.error()));
  mapping = std::move(*mapped);
  return {};
}

Result<void> Importer::map_host(Import& import) {
  if (import.host) return {};
  const int seals = ::fcntl(import.fd.get(), F_GET_SEALS);
  struct stat info = {};
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(import.fd.get(), &info) != 0 ||
      static_cast<std::uint64_t>(info.st_size) < import.bytes) {
    return fail(GPULOAN_ERR_PROTOCOL, "host pages are not sealed against shrinking, or smaller than the record says");
  }
  // A device can only be given pages that are mapped writable.
  auto mapping = Mapping::map_shared(import.fd.get(), import.bytes, gpu_ != nullptr || import.access == GPULOAN_ACCESS_WRITE);
  if (!mapping) return forward(std::move(mapping.error()));
  if (gpu_) import.registration = driver::HostRegistration::try_create(gpu_, mapping->bytes());
  import.host = std::move(*mapping);
  import.fd.reset();
  return {};
}

Result<Importer::Address> Importer::map_foreign(Import& import) {
  if (!import.foreign) return fail(GPULOAN_ERR_STATE, "the loan has been returned");
  ForeignMapping& mapping = *import.foreign;
  const std::lock_guard serial(mapping.mutex);
  if (import.kind == ImportKind::Pieces) {
    if (!mapping.range) {
      auto mapped = driver::VmmRange::map(gpu_, mapping.pieces, import.access == GPULOAN_ACCESS_WRITE ? cuda::AccessReadWrite : cuda::AccessRead);
      if (!mapped) return forward(std::move(mapped.error()));
      mapping.range = std::move(*mapped);
    }
    return Address{mapping.range.pointer(), nullptr};
  }
  if (import.kind == ImportKind::Pool) {
    if (!mapping.allocation) {
      const std::lock_guard pool_serial(mapping.pool->mutex);
      if (!mapping.pool->pool) {
        auto pool = driver::ImportedPool::open(gpu_, mapping.pool->fd.get());
        if (!pool) return forward(std::move(pool.error()));
        mapping.pool->pool = std::move(*pool);
        mapping.pool->fd.reset();
      }
      auto allocation = driver::PoolMapping::open(gpu_, mapping.pool->pool.get(), import.pool_pointer, mapping.pool);
      if (!allocation) return forward(std::move(allocation.error()));
      mapping.allocation = std::move(*allocation);
    }
    return Address{mapping.allocation.pointer(), nullptr};
  }
  if (!mapping.legacy) {
    auto opened = driver::IpcMapping::open(gpu_, import.legacy_handle);
    if (!opened) return forward(std::move(opened.error()));
    mapping.legacy = std::move(*opened);
  }
  return Address{mapping.legacy.pointer(), nullptr};
}

// Before the ACK. A mapping that another loan uses stays; one that a new loan asks for meanwhile is opened again once it is
// closed here.
void Importer::unmap(ImporterPeer& peer, Import& import) {
  const std::lock_guard serial(import.mutex);
  import.mapped = false;
  const std::shared_ptr<ForeignMapping> mapping = std::exchange(import.foreign, nullptr);
  if (!mapping || import.kind == ImportKind::Pieces) return; // pieces: nobody else has them
  const std::lock_guard closing(mapping->mutex);
  {
    const Lock lock(mutex_);
    if (--mapping->uses != 0) return;
  }
  mapping->legacy = {};
  mapping->allocation = {};
  const Lock lock(mutex_);
  if (mapping->uses == 0) peer.foreign.erase(import.buffer);
}

// IMPORT: where the memory lies here. Costs nothing where it is mapped already.
Result<Importer::Address> Importer::map(ImporterPeer& peer, Import& import, gpuloan_access access) {
  const std::lock_guard serial(import.mutex);
  Address at;
  if (import.kind == ImportKind::HostPages) {
    GPULOAN_TRY(map_host(import));
    at = {import.registration ? import.registration.device_pointer() : 0, import.host.data()};
  } else {
    if (!gpu_) return fail(GPULOAN_ERR_NO_DEVICE, "device memory was lent to a context without a device");
    GPULOAN_TRY(tie(peer));
    if (import.single_use()) {
      auto mapped = map_foreign(import);
      if (!mapped) return mapped;
      at = *mapped;
    } else {
      GPULOAN_TRY(map_device(import, access));
      at.pointer = (access == GPULOAN_ACCESS_WRITE ? import.writable : import.read_only).pointer();
    }
  }
  import.mapped = true;
  return at;
}

// The ring's end at this loan: a buffer of our own, made when the loan arrives so that a loan which nobody has acquired
// yet never holds up the ring for the others.
Result<void> Importer::prepare_buffer(ImportLoan& loan) {
  ImporterPeer& peer = loan.importer_peer();
  if (!gpu_) return fail(GPULOAN_ERR_NO_DEVICE, "device memory was lent to a context without a device");
  if (loan.access == GPULOAN_ACCESS_READ ? !peer.rings.in : !peer.rings.out) {
    if (!peer.adopt_error.text.empty()) return forward(Error(peer.adopt_error));
    return fail(GPULOAN_ERR_DRIVER, "the exporter announced no ring");
  }
  auto buffer = memory::DeviceBuffer::create(gpu_, loan.bytes);
  if (!buffer) return forward(std::move(buffer.error()));
  loan.buffer = std::make_shared<memory::DeviceBuffer>(std::move(*buffer));
  const memory::HostRing& ring = loan.access == GPULOAN_ACCESS_READ ? peer.rings.in->ring() : peer.rings.out->ring();
  if (!ring.pinned()) loan.rung_reason = "host: with memory that is not pinned here: " + gpu_->pin_refusal();
  if (loan.access == GPULOAN_ACCESS_READ) peer.rings.in->expect(loan.id, 1, loan.buffer->pointer(), loan.bytes);
  return {};
}

} // namespace gpuloan::loan
