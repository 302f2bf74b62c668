// SPDX-License-Identifier: MIT
//
// Which way a loan takes: where the bytes lie, what the peer can have of them (admission.cpp), and whether that way is proven.
#include <loan/exporter.hpp>

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

// Room for a copy: what the device has, and what lies idle in this peer's arena.
std::uint64_t Exporter::free_bytes(ExporterPeer& peer) {
  std::size_t free = 0, total = 0;
  const driver::Gpu::Scope scope(*gpu_);
  if (!scope.ok() || gpu_->driver().call.cuMemGetInfo(&free, &total) != cuda::Success) return UINT64_MAX; // the allocation will tell
  return free + peer.arena->stats().idle_bytes;
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

} // namespace gpuloan::loan
