// SPDX-License-Identifier: MIT
//
// Regions of a peer's arena, as the caller makes, uses and destroys them.
#include <loan/exporter.hpp>

namespace gpuloan::loan {

Result<std::shared_ptr<RegionHandle>> Exporter::create_region(const std::shared_ptr<ExporterPeer>& peer, const memory::RegionSpec& spec) {
  auto region = std::make_shared<RegionHandle>();
  {
    const Lock lock(mutex_);
    if (peer->lost) return fail(GPULOAN_ERR_PEER_LOST, "the peer is gone: " + peer->loss.text);
    if (!peer->arena) return fail(GPULOAN_ERR_STATE, "the handshake with this peer is not complete");
    region->arena = peer->arena;
  }
  region->exporter = std::static_pointer_cast<Exporter>(shared_from_this());
  region->peer = peer;
  auto made = region->arena->create(spec);
  if (!made) return forward(std::move(made.error()));
  region->region = *made;
  try {
    const Lock lock(mutex_);
    if (closed_) {
      region->arena->destroy(std::exchange(region->region, nullptr));
      return fail(GPULOAN_ERR_STATE, "the context is closed");
    }
    std::erase_if(regions_, [](const auto& weak) { return weak.expired(); });
    regions_.push_back(region);
    hold(region->handle, region);
  } catch (const std::bad_alloc&) {
    region->arena->destroy(region->region);
    throw;
  }
  return region;
}

Result<void> Exporter::destroy_region(RegionHandle& handle) {
  Lock lock(mutex_);
  if (handle.region == nullptr) return {};
  const memory::Region& region = *handle.region;
  const std::uint64_t base = region.pointer() != 0 ? region.pointer() : reinterpret_cast<std::uint64_t>(region.host());
  if (ledger_.out(base, region.bytes())) return fail(GPULOAN_ERR_BUSY, "the region is lent; destroy it after its loans have ended");
  for (const auto& weak : handle.peer->retired) {
    if (const auto loan = weak.lock(); loan && loan->region == handle.region) {
      loan->region = nullptr;
      loan->state = step(loan->state, ExportEvent::Drop).next;
      if (handle.peer->dead && handle.peer->untethered) loan->state = step(loan->state, ExportEvent::Gone).next;
    }
  }
  memory::Region* gone = std::exchange(handle.region, nullptr);
  lock.unlock(); // it may record events on a caller's streams
  handle.arena->destroy(gone);
  lock.lock();
  if (!handle.peer->lost && !closed_) recall_idle(*handle.peer);
  request_tick();
  return {};
}

Result<void> Exporter::used_on(RegionHandle& handle, cuda::Stream stream) {
  const Lock lock(mutex_);
  if (handle.region == nullptr) return fail(GPULOAN_ERR_STATE, "the context of the region is closed");
  if (!gate::is_cpu(stream)) handle.arena->used_on(handle.region, stream);
  return {};
}

} // namespace gpuloan::loan
