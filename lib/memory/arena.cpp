// SPDX-License-Identifier: MIT
//
// Regions: where they are, whose streams still use them, when their bytes are free again. Chunks are the pool's.
//
// A region is in one list: live, or deferred once it was destroyed while work that uses it had not passed. Deferred bytes
// keep their chunk from being reused or unmapped; sweep() looks at them, from the loop's tick and before a new chunk is
// made. Handing out memory that is there makes no driver call.
//
// One lock covers everything, driver calls included; of those only ones that do not wait for the GPU are made (S10).
#include <memory/arena.hpp>

#include <base/clock.hpp>
#include <base/log.hpp>
#include <memory/chunk_pool.hpp>

#include <algorithm>
#include <ctime>
#include <map>

namespace gpuloan::memory {
namespace {

constexpr std::uint64_t kMaxAlignment = Arena::kGranularity;
static_assert(Arena::kGranularity == HostPages::kAlignment);
constexpr std::uint32_t kEndWaitMs = 1000; // what the end of an arena waits for work that still uses its memory

Result<void> check_spec(const RegionSpec& spec) {
  if (spec.alignment > kMaxAlignment || (spec.alignment & (spec.alignment - 1)) != 0) {
    return fail(GPULOAN_ERR_INVALID, "region: alignment " + std::to_string(spec.alignment) +
                                         " is no power of two up to " + std::to_string(kMaxAlignment));
  }
  if (spec.access != GPULOAN_ACCESS_READ && spec.access != GPULOAN_ACCESS_WRITE) {
    return fail(GPULOAN_ERR_INVALID, "region: access is neither read nor write");
  }
  return {};
}

Want want_of(const RegionSpec& spec) noexcept {
  return {spec.bytes, std::max(spec.alignment, Suballocator::kUnit), spec.access, spec.memory,
          spec.own_chunk || spec.bytes >= Arena::kOwnChunkBytes};
}

void sleep_us(long microseconds) noexcept {
  const timespec time = {0, microseconds * 1000};
  ::nanosleep(&time, nullptr);
}

} // namespace

struct Arena::Impl {
  using Regions = std::list<Region>;

  Impl(std::shared_ptr<driver::Gpu> on, std::shared_ptr<Account> account, std::uint64_t idle_limit)
      : gpu(std::move(on)), events(gpu), pool(gpu, std::move(account), idle_limit) {}

  [[nodiscard]] Result<Region*> create(const RegionSpec& spec);
  [[nodiscard]] Result<Placement> place(const Want& want);
  void settle_in(Region& region, const Placement& placement);
  void list_addresses(Region& region);
  void unlist_addresses(const Region& region) noexcept;
  void destroy(Region& region) noexcept;
  [[nodiscard]] StreamUses::Progress settle(Region& region) noexcept;
  void free(Region& region, Regions& from) noexcept;
  bool sweep(bool* freed = nullptr) noexcept;
  void wait_for_deferred() noexcept;
  void abandon_deferred() noexcept;

  std::mutex mutex;
  const std::shared_ptr<driver::Gpu> gpu;
  EventPool events;
  ChunkPool pool; // destroyed after the regions
  Regions live;
  Regions deferred;
  std::map<std::uint64_t, Region*> by_address; // live ones; host memory under both of its addresses
  std::uint64_t live_bytes = 0;
};

Arena::Arena(std::shared_ptr<driver::Gpu> gpu, std::shared_ptr<Account> account, std::uint64_t idle_limit)
    : impl_(std::make_unique<Impl>(std::move(gpu), std::move(account), idle_limit)) {}

// Unmapping does not wait for work that runs (R22), so the arena does, but not for ever: memory that is still in use then
// is left mapped and charged.
Arena::~Arena() {
  const std::lock_guard lock(impl_->mutex);
  while (!impl_->live.empty()) impl_->destroy(impl_->live.front());
  impl_->wait_for_deferred();
  impl_->abandon_deferred();
}

void Arena::Impl::wait_for_deferred() noexcept {
  const Deadline deadline = Deadline::after_ms(kEndWaitMs);
  long pause_us = 20;
  while (sweep() && !deadline.passed()) {
    sleep_us(pause_us);
    pause_us = std::min(pause_us * 2, 1000L);
  }
}

void Arena::Impl::abandon_deferred() noexcept {
  if (deferred.empty() || !driver::calls_allowed()) return;
  GPULOAN_LOG(GPULOAN_LOG_WARNING, "arena: work of local streams still uses memory of a peer's arena that ends now; its "
                                   "chunks stay mapped until the process ends");
  while (!deferred.empty()) {
    PooledChunk* const chunk = deferred.front().chunk_;
    deferred.remove_if([chunk](const Region& region) { return region.chunk_ == chunk; });
    pool.abandon(*chunk);
  }
}

// ---- Creating ----------------------------------------------------------------------------------------------------

Result<Region*> Arena::create(const RegionSpec& spec) {
  GPULOAN_TRY(check_spec(spec));
  const std::lock_guard lock(impl_->mutex);
  try {
    return impl_->create(spec);
  } catch (const std::bad_alloc&) {
    return fail(GPULOAN_ERR_NO_MEMORY, "region: no host memory for its bookkeeping");
  }
}

Result<Region*> Arena::Impl::create(const RegionSpec& spec) {
  if (pool.retired()) return fail(GPULOAN_ERR_PEER_LOST, "region: its peer is lost");
  if (spec.memory == GPULOAN_MEMORY_DEVICE && gpu == nullptr) {
    return fail(GPULOAN_ERR_NO_DEVICE, "region: this context has no device, so no device memory");
  }
  Regions made(1);
  Region& region = made.front();
  region.spec_ = spec;
  region.self_ = made.begin();
  if (spec.bytes != 0) {
    const Want want = want_of(spec);
    auto placement = place(want);
    if (!placement) return forward(std::move(placement.error()));
    region.own_chunk_ = want.own;
    settle_in(region, *placement);
  }
  live.splice(live.end(), made);
  live_bytes += spec.bytes;
  return &region;
}

// What exists first; then what is free again by now; then a new chunk.
Result<Placement> Arena::Impl::place(const Want& want) {
  if (auto placement = pool.reuse(want)) return *placement;
  bool freed = false;
  sweep(&freed);
  if (freed) {
    if (auto placement = pool.reuse(want)) return *placement;
  }
  return pool.grow(want);
}

void Arena::Impl::settle_in(Region& region, const Placement& placement) {
  const Chunk& chunk = placement.chunk->chunk;
  region.chunk_ = placement.chunk;
  region.chunk_id_ = placement.chunk->id;
  region.offset_ = placement.offset;
  region.chunk_bytes_ = chunk.bytes();
  if (chunk.pointer() != 0) region.pointer_ = chunk.pointer() + placement.offset;
  if (chunk.host() != nullptr) region.host_ = chunk.host() + placement.offset;
  try {
    list_addresses(region);
  } catch (...) {
    unlist_addresses(region);
    pool.give_back(*placement.chunk, placement.offset, region.bytes());
    throw;
  }
}

void Arena::Impl::list_addresses(Region& region) {
  if (region.pointer_ != 0) by_address[region.pointer_] = &region;
  if (region.host_ != nullptr) by_address[reinterpret_cast<std::uintptr_t>(region.host_)] = &region;
}

void Arena::Impl::unlist_addresses(const Region& region) noexcept {
  by_address.erase(region.pointer_);
  by_address.erase(reinterpret_cast<std::uintptr_t>(region.host_));
}

// ---- Destroying --------------------------------------------------------------------------------------------------

void Arena::destroy(Region* region) noexcept {
  const std::lock_guard lock(impl_->mutex);
  impl_->destroy(*region);
}

void Arena::Impl::destroy(Region& region) noexcept {
  unlist_addresses(region);
  live_bytes -= region.bytes();
  if (settle(region) == StreamUses::Progress::Passed) return free(region, live);
  deferred.splice(deferred.end(), live, region.self_);
}

StreamUses::Progress Arena::Impl::settle(Region& region) noexcept {
  return region.uses_.empty() ? StreamUses::Progress::Passed : region.uses_.settle(*gpu, events);
}

void Arena::Impl::free(Region& region, Regions& from) noexcept {
  if (region.chunk_ != nullptr) pool.give_back(*region.chunk_, region.offset_, region.bytes());
  from.erase(region.self_);
}

bool Arena::sweep() noexcept {
  const std::lock_guard lock(impl_->mutex);
  return impl_->sweep();
}

// What can never be proven to have passed stays, but nothing waits for it.
bool Arena::Impl::sweep(bool* freed) noexcept {
  bool waiting = false;
  for (auto next = deferred.begin(); next != deferred.end();) {
    Region& region = *next++;
    const StreamUses::Progress progress = settle(region);
    waiting = waiting || progress == StreamUses::Progress::Waiting;
    if (progress != StreamUses::Progress::Passed) continue;
    free(region, deferred);
    if (freed != nullptr) *freed = true;
  }
  return waiting;
}

// ---- The rest ----------------------------------------------------------------------------------------------------

// Without a device no stream exists, and a region without bytes is used by none.
void Arena::used_on(Region* region, driver::Stream stream) {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->gpu == nullptr || region->chunk_ == nullptr) return;
  region->uses_.note(stream);
}

Region* Arena::find(std::uint64_t pointer, std::uint64_t bytes) const noexcept {
  const std::lock_guard lock(impl_->mutex);
  auto next = impl_->by_address.upper_bound(pointer);
  if (next == impl_->by_address.begin()) return nullptr;
  const auto& [start, region] = *std::prev(next);
  const std::uint64_t offset = pointer - start;
  if (offset >= region->bytes() || bytes > region->bytes() - offset) return nullptr;
  return region;
}

bool Arena::overlaps(std::uint64_t pointer, std::uint64_t bytes) const noexcept {
  const std::lock_guard lock(impl_->mutex);
  return impl_->pool.overlaps(pointer, bytes);
}

Result<Announcement> Arena::announcement(const Region* region) {
  const std::lock_guard lock(impl_->mutex);
  Announcement record;
  PooledChunk* const chunk = region->chunk_;
  if (chunk != nullptr && chunk->unmapping) return fail(GPULOAN_ERR_BUSY, "region: its peer is about to unmap it, for an exclusive loan to another");
  if (chunk == nullptr || chunk->announced) return record;
  if (impl_->pool.retired()) return fail(GPULOAN_ERR_PEER_LOST, "region: its peer is lost");
  GPULOAN_TRY(chunk->chunk.reopen_fd());
  auto fd = UniqueFd::dup(chunk->chunk.fd());
  if (!fd) return forward(std::move(fd.error()));
  record.needed = true;
  record.chunk = chunk->id;
  record.bytes = chunk->chunk.bytes();
  record.memory = chunk->chunk.memory();
  record.access = chunk->access;
  record.fd = std::move(*fd);
  return record;
}

void Arena::announced(std::uint64_t chunk) noexcept {
  const std::lock_guard lock(impl_->mutex);
  if (PooledChunk* const known = impl_->pool.find(chunk); known != nullptr) impl_->pool.announced(*known);
}

std::uint64_t Arena::begin_unmap(const Region* region) noexcept {
  const std::lock_guard lock(impl_->mutex);
  return region->chunk_ != nullptr && impl_->pool.begin_unmap(*region->chunk_) ? region->chunk_id_ : 0;
}

bool Arena::mapped(const Region* region) const noexcept {
  const std::lock_guard lock(impl_->mutex);
  return region->chunk_ != nullptr && region->chunk_->announced;
}

std::vector<std::uint64_t> Arena::recall(bool everything) {
  const std::lock_guard lock(impl_->mutex);
  return impl_->pool.recall(everything);
}

bool Arena::unmapped(std::uint64_t chunk) noexcept {
  const std::lock_guard lock(impl_->mutex);
  return impl_->pool.unmapped(chunk);
}

void Arena::retire() noexcept {
  const std::lock_guard lock(impl_->mutex);
  impl_->pool.retire();
}

void Arena::holders_gone() noexcept {
  const std::lock_guard lock(impl_->mutex);
  impl_->pool.holders_gone();
}

ArenaStats Arena::stats() const noexcept {
  const std::lock_guard lock(impl_->mutex);
  const ChunkPool& pool = impl_->pool;
  return {pool.chunks(), impl_->live_bytes, pool.idle_bytes(), pool.retired_bytes(), pool.surrendered_bytes()};
}

} // namespace gpuloan::memory
