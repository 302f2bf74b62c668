// SPDX-License-Identifier: MIT
//
// Chunks at the importer. A chunk's descriptor is kept until the first loan maps it, then closed; the mapping stays until
// the exporter recalls the chunk or is gone. Holds are counted per loan, so that UNMAPPED is only said when none is left.
#include <loan/importer.hpp>

#include <base/reaper.hpp>

#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>

namespace gpuloan::loan {

Result<void> Importer::on_chunk(ImporterPeer& peer, channel::Received& received) {
  const channel::Chunk& wire = received.record->chunk;
  if (wire.chunk == 0 || wire.bytes == 0 || peer.imports.contains(wire.chunk)) return fail(GPULOAN_ERR_PROTOCOL, "CHUNK names a chunk that is known already");
  if (peer.imports.size() >= ImporterPeer::kImportsMax) return fail(GPULOAN_ERR_PROTOCOL, "the exporter sent more than " + std::to_string(ImporterPeer::kImportsMax) + " chunks");
  auto import = std::make_shared<Import>();
  import->id = wire.chunk;
  import->bytes = wire.bytes;
  import->kind = wire.kind == static_cast<std::uint32_t>(channel::ChunkKind::HostPages) ? channel::ChunkKind::HostPages : channel::ChunkKind::Vmm;
  import->access = wire.access == GPULOAN_ACCESS_WRITE ? GPULOAN_ACCESS_WRITE : GPULOAN_ACCESS_READ;
  import->fd = received.fds.take(0);
  peer.imports.emplace(wire.chunk, std::move(import));
  return {};
}

Result<void> Importer::on_recall(ImporterPeer& peer, std::uint64_t chunk) {
  const auto it = peer.imports.find(chunk);
  if (it == peer.imports.end()) return fail(GPULOAN_ERR_PROTOCOL, "RECALL names an unknown chunk");
  it->second->recalled = true;
  if (it->second->holds == 0) drop_import(peer, it->second);
  return {};
}

void Importer::drop_import(ImporterPeer& peer, std::shared_ptr<Import> import) {
  const std::uint64_t chunk = import->id;
  peer.imports.erase(chunk);
  if (import->kind == channel::ChunkKind::HostPages) gpuloan::dispose(std::move(import)); // unregistering may take long; unmapping does not
  import.reset();
  channel::Record record = channel::make_record(channel::Type::Unmapped);
  record.chunk.chunk = chunk;
  send(peer, record); // nothing when the peer is lost
}

Result<void> Importer::map_device(Import& import, gpuloan_access access) {
  if (!gpu_) return fail(GPULOAN_ERR_NO_DEVICE, "device memory was lent to a context without a device");
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
  if (gpu_ && gpu_->floors().has(GPULOAN_FLOOR_HOST_REGISTER)) {
    if (auto registration = driver::HostRegistration::create(gpu_, mapping->bytes())) import.registration = std::move(*registration);
  }
  import.host = std::move(*mapping);
  import.fd.reset();
  return {};
}

// IMPORT: where the chunk lies here. Costs nothing where it is mapped already.
Result<Importer::Address> Importer::map(Import& import, gpuloan_access access) {
  const std::lock_guard serial(import.mutex);
  if (import.kind == channel::ChunkKind::Vmm) {
    GPULOAN_TRY(map_device(import, access));
    import.mapped = true;
    return Address{(access == GPULOAN_ACCESS_WRITE ? import.writable : import.read_only).pointer(), nullptr};
  }
  GPULOAN_TRY(map_host(import));
  import.mapped = true;
  return Address{import.registration ? import.registration.device_pointer() : 0, import.host.data()};
}

// The ring's end at this loan: a buffer of our own, made when the loan arrives so that a loan which nobody has acquired
// yet never holds up the ring for the others.
Result<void> Importer::prepare_buffer(ImportLoan& loan) {
  ImporterPeer& peer = loan.importer_peer();
  if (!gpu_) return fail(GPULOAN_ERR_NO_DEVICE, "device memory was lent to a context without a device");
  if (loan.access == GPULOAN_ACCESS_READ ? !peer.from_exporter : !peer.to_exporter) {
    return fail(GPULOAN_ERR_DRIVER, peer.adopt_error.empty() ? "the exporter announced no ring" : peer.adopt_error);
  }
  auto buffer = memory::DeviceBuffer::create(gpu_, loan.bytes);
  if (!buffer) return forward(std::move(buffer.error()));
  loan.buffer = std::make_shared<memory::DeviceBuffer>(std::move(*buffer));
  if (loan.access == GPULOAN_ACCESS_READ) peer.from_exporter->expect(loan.id, 1, loan.buffer->pointer(), loan.bytes);
  return {};
}

} // namespace gpuloan::loan
