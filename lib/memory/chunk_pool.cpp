// SPDX-License-Identifier: MIT
//
// Reuse, growth and dropping of chunks.
//
// Every chunk is charged to the account before it is made, and its charge follows it: Chunk while the peer lives, Retired
// once the peer is lost, Surrendered when we dropped it while the peer could still map it.
//
// What gives memory back is noexcept and allocates nothing: list and index nodes are made with the chunk and only moved.
#include <memory/chunk_pool.hpp>

#include <base/log.hpp>
#include <base/process_wide.hpp>

#include <algorithm>
#include <cassert>
#include <new>
#include <unistd.h>

namespace gpuloan::memory {
namespace {

constexpr std::uint64_t kChunkRounding = HostPages::kAlignment;
constexpr std::uint64_t kSharedChunkBytes = 2U << 20;
constexpr int kSharedTries = 8;

// An idle chunk may be this much larger than what is asked for: an eighth.
std::uint64_t with_slack(std::uint64_t bytes) noexcept {
  return bytes > UINT64_MAX - bytes / 8 ? UINT64_MAX : bytes + bytes / 8;
}

// Gives a charge back unless the chunk it is for was made.
class ChargeGuard {
 public:
  ChargeGuard(Account& account, std::uint64_t bytes) noexcept : account_(&account), bytes_(bytes) {}
  ChargeGuard(const ChargeGuard&) = delete;
  ChargeGuard& operator=(const ChargeGuard&) = delete;
  ~ChargeGuard() {
    if (account_ != nullptr) account_->credit(Account::Kind::Chunk, bytes_);
  }
  void keep() noexcept { account_ = nullptr; }

 private:
  Account* account_;
  std::uint64_t bytes_;
};

} // namespace

// ---- Finding room ------------------------------------------------------------------------------------------------

void ChunkPool::move_to(PooledChunk& chunk, State state) noexcept {
  Shelf& from = shelf(chunk.state);
  Shelf& to = shelf(state);
  to.order.splice(to.order.end(), from.order, chunk.order);
  from.bytes -= chunk.chunk.bytes();
  to.bytes += chunk.chunk.bytes();
  chunk.state = state;
}

ChunkPool::Class& ChunkPool::class_of(gpuloan_memory memory, gpuloan_access access) noexcept {
  return classes_[memory == GPULOAN_MEMORY_HOST ? 1 : 0][access == GPULOAN_ACCESS_WRITE ? 1 : 0];
}

std::uint64_t ChunkPool::granularity(gpuloan_memory memory) const noexcept {
  if (memory == GPULOAN_MEMORY_HOST || gpu_ == nullptr) return kChunkRounding;
  return std::max<std::uint64_t>(kChunkRounding, gpu_->floors().granularity);
}

std::uint64_t ChunkPool::chunk_bytes(const Want& want) const noexcept {
  const std::uint64_t unit = granularity(want.memory);
  const std::uint64_t bytes = want.own ? want.bytes : kSharedChunkBytes;
  const std::uint64_t units = bytes / unit + (bytes % unit != 0 ? 1 : 0);
  return units > UINT64_MAX / unit ? 0 : units * unit;
}

std::optional<Placement> ChunkPool::reuse(const Want& want) {
  const std::uint64_t bytes = chunk_bytes(want);
  if (bytes == 0) return std::nullopt;
  Class& from = class_of(want.memory, want.access);
  if (!want.own) {
    if (auto placed = reuse_shared(from, want)) return placed;
  }
  PooledChunk* const idle = find_idle(from, bytes);
  if (idle == nullptr) return std::nullopt;
  return begin_use(*idle, want);
}

// The fullest chunk that may have room comes first, so that others become idle. With an alignment the largest free range
// may still not do; after a few tries only chunks that fit for certain are looked at.
std::optional<Placement> ChunkPool::reuse_shared(Class& from, const Want& want) {
  auto next = from.shared.lower_bound(want.bytes);
  for (int tries = 0; tries < kSharedTries && next != from.shared.end(); ++tries) {
    PooledChunk& chunk = *(next++)->second;
    if (auto placed = place_in(chunk, want)) return placed;
  }
  if (next == from.shared.end()) return std::nullopt;
  next = from.shared.lower_bound(want.bytes + want.alignment);
  return next == from.shared.end() ? std::nullopt : place_in(*next->second, want);
}

std::optional<Placement> ChunkPool::place_in(PooledChunk& chunk, const Want& want) {
  const auto offset = chunk.space.allocate(want.bytes, want.alignment);
  if (!offset) return std::nullopt;
  ++chunk.pieces;
  if (chunk.index != nullptr) unindex(chunk);
  if (chunk.space.largest() != 0) index(chunk, class_of(chunk).shared, chunk.space.largest());
  return Placement{&chunk, *offset};
}

// Of the smallest size that does, the chunk that became idle last.
PooledChunk* ChunkPool::find_idle(Class& from, std::uint64_t bytes) noexcept {
  const auto fits = from.idle.lower_bound(bytes);
  if (fits == from.idle.end() || fits->first > with_slack(bytes)) return nullptr;
  return std::prev(from.idle.upper_bound(fits->first))->second;
}

// From idle to used.
Placement ChunkPool::begin_use(PooledChunk& chunk, const Want& want) {
  if (!want.own) chunk.space.reset(chunk.chunk.bytes()); // the only step that may throw
  unindex(chunk);
  move_to(chunk, State::Used);
  chunk.shared = !want.own;
  if (want.own) {
    chunk.pieces = 1;
    return {&chunk, 0};
  }
  const auto placed = place_in(chunk, want);
  assert(placed);
  return *placed;
}

void ChunkPool::give_back(PooledChunk& chunk, std::uint64_t offset, std::uint64_t bytes) noexcept {
  if (chunk.shared) {
    if (chunk.index != nullptr) unindex(chunk);
    chunk.space.free(offset, bytes);
  }
  if (--chunk.pieces != 0) return index(chunk, class_of(chunk).shared, chunk.space.largest());
  if (retired_) return drop(chunk, false);
  move_to(chunk, State::Idle);
  index(chunk, class_of(chunk).idle, chunk.chunk.bytes());
}

void ChunkPool::index(PooledChunk& chunk, PooledChunk::Index& where, std::uint64_t key) noexcept {
  chunk.node.key() = key;
  chunk.place = where.insert(std::move(chunk.node));
  chunk.index = &where;
}

void ChunkPool::unindex(PooledChunk& chunk) noexcept {
  chunk.node = chunk.index->extract(chunk.place);
  chunk.index = nullptr;
}

// ---- Growing -----------------------------------------------------------------------------------------------------

Result<Placement> ChunkPool::grow(const Want& want) {
  const std::uint64_t bytes = chunk_bytes(want);
  GPULOAN_TRY(check_possible(want, bytes));
  GPULOAN_TRY(charge(bytes));
  ChargeGuard guard(*account_, bytes);
  auto made = create_charged(want, bytes);
  if (!made) return forward(std::move(made.error()));
  PooledChunk& chunk = adopt(std::move(*made), want.access);
  guard.keep();
  return begin_use(chunk, want);
}

// Sizes that no device and no host has are refused here: nothing is given up for them, and nothing wraps.
Result<void> ChunkPool::check_possible(const Want& want, std::uint64_t bytes) const {
  if (want.memory == GPULOAN_MEMORY_HOST) {
    const std::uint64_t host = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    if (bytes != 0 && bytes <= host) return {};
    return fail(GPULOAN_ERR_NO_MEMORY, "arena: " + std::to_string(want.bytes) + " bytes are more than this host has");
  }
  const std::uint64_t total = gpu_->floors().total_bytes;
  if (bytes != 0 && (total == 0 || bytes <= total)) return {};
  return std::unexpected(out_of_memory(want, bytes, "the whole device has " + std::to_string(total) + " bytes"));
}

bool ChunkPool::overlaps(std::uint64_t pointer, std::uint64_t bytes) const noexcept {
  return std::any_of(chunks_.begin(), chunks_.end(), [&](const auto& entry) {
    const Chunk& chunk = entry.second.chunk;
    const auto meets = [&](std::uint64_t start) { return start != 0 && pointer < start + chunk.bytes() && start < pointer + bytes; };
    return meets(chunk.pointer()) || meets(reinterpret_cast<std::uintptr_t>(chunk.host()));
  });
}

// Idle chunks that the peer never saw give way to the new one.
Result<void> ChunkPool::charge(std::uint64_t bytes) {
  if (auto charged = account_->charge(bytes)) return charged;
  drop_unannounced();
  auto charged = account_->charge(bytes);
  if (!charged) charged.error().text += mapped_idle_text();
  return charged;
}

Result<Chunk> ChunkPool::create_chunk(gpuloan_memory memory, std::uint64_t bytes) {
  return memory == GPULOAN_MEMORY_HOST ? Chunk::create_host(gpu_, bytes) : Chunk::create_device(gpu_, bytes);
}

Result<Chunk> ChunkPool::create_charged(const Want& want, std::uint64_t bytes) {
  auto made = create_chunk(want.memory, bytes);
  if (made || made.error().status != GPULOAN_ERR_DEVICE_MEMORY) return made;
  if (drop_unannounced()) made = create_chunk(want.memory, bytes);
  if (made || made.error().status != GPULOAN_ERR_DEVICE_MEMORY) return made;
  return std::unexpected(out_of_memory(want, bytes, made.error().text));
}

// Takes the chunk in as an idle one. Everything that allocates comes first; if it throws the chunk is destroyed.
PooledChunk& ChunkPool::adopt(Chunk made, gpuloan_access access) {
  PooledChunk::Order order(1);
  PooledChunk::Index single;
  single.emplace(0, nullptr);
  const std::uint64_t id = last_id_ + 1;
  PooledChunk& chunk = chunks_.try_emplace(id, id, std::move(made), access).first->second;
  last_id_ = id;
  order.front() = &chunk;
  chunk.order = order.begin();
  shelf(State::Idle).order.splice(shelf(State::Idle).order.end(), order);
  shelf(State::Idle).bytes += chunk.chunk.bytes();
  chunk.node = single.extract(single.begin());
  chunk.node.mapped() = &chunk;
  index(chunk, class_of(chunk).idle, chunk.chunk.bytes());
  return chunk;
}

Error ChunkPool::out_of_memory(const Want& want, std::uint64_t bytes, const std::string& cause) const {
  std::string text = "arena: no device memory for " + std::to_string(want.bytes) + " bytes";
  if (bytes != 0) text += " (a chunk of " + std::to_string(bytes) + ")";
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  const driver::Gpu::Scope scope(*gpu_);
  if (scope.ok() && gpu_->driver().call.cuMemGetInfo(&free_bytes, &total) == driver::Success) {
    text += ", " + std::to_string(free_bytes) + " of " + std::to_string(total) + " are free";
  }
  return Error{GPULOAN_ERR_DEVICE_MEMORY, text + mapped_idle_text() + ": " + cause};
}

std::string ChunkPool::mapped_idle_text() const {
  return ", " + std::to_string(idle_bytes()) + " are in idle chunks that the peer still maps";
}

// ---- Dropping ----------------------------------------------------------------------------------------------------

PooledChunk* ChunkPool::find(std::uint64_t id) noexcept {
  const auto found = chunks_.find(id);
  return found == chunks_.end() ? nullptr : &found->second;
}

void ChunkPool::announced(PooledChunk& chunk) noexcept {
  chunk.announced = true;
  chunk.chunk.close_fd();
}

std::vector<std::uint64_t> ChunkPool::recall(bool everything) {
  std::vector<std::uint64_t> named;
  const std::uint64_t limit = everything ? 0 : idle_limit_;
  const Shelf& idle = shelf(State::Idle);
  while (idle.bytes > limit) {
    PooledChunk& chunk = *idle.order.front();
    if (!chunk.announced) {
      drop(chunk, false);
      continue;
    }
    named.push_back(chunk.id);
    unindex(chunk);
    move_to(chunk, State::Recalled);
  }
  return named;
}

bool ChunkPool::begin_unmap(PooledChunk& chunk) noexcept {
  if (!chunk.announced || chunk.unmapping || chunk.state != State::Used) return false;
  return chunk.unmapping = true;
}

bool ChunkPool::unmapped(std::uint64_t id) noexcept {
  PooledChunk* const chunk = find(id);
  if (chunk != nullptr && std::exchange(chunk->unmapping, false)) { // may be made known again
    chunk->announced = false;
    return true;
  }
  if (chunk == nullptr || chunk->state != State::Recalled) return false;
  drop(*chunk, true);
  return true;
}

void ChunkPool::retire() noexcept {
  if (std::exchange(retired_, true)) return;
  for (const State state : {State::Idle, State::Recalled}) {
    while (!shelf(state).order.empty()) drop(*shelf(state).order.front(), false);
  }
  for (PooledChunk* const chunk : shelf(State::Used).order) {
    account_->move(Account::Kind::Chunk, Account::Kind::Retired, chunk->chunk.bytes());
    chunk->kind = Account::Kind::Retired;
  }
}

void ChunkPool::holders_gone() noexcept {
  holders_gone_ = retired_; // of a peer that lives nothing is surrendered
  account_->credit(Account::Kind::Surrendered, std::exchange(surrendered_bytes_, 0));
}

// Frees what the peer never mapped. True when anything was.
bool ChunkPool::drop_unannounced() noexcept {
  bool dropped = false;
  const PooledChunk::Order& idle = shelf(State::Idle).order;
  for (auto next = idle.begin(); next != idle.end();) {
    PooledChunk& chunk = **next++;
    if (chunk.announced) continue;
    drop(chunk, false);
    dropped = true;
  }
  return dropped;
}

void ChunkPool::drop(PooledChunk& chunk, bool peer_unmapped) noexcept {
  const std::uint64_t bytes = chunk.chunk.bytes();
  if (chunk.announced && !peer_unmapped && !holders_gone_) {
    account_->move(chunk.kind, Account::Kind::Surrendered, bytes);
    surrendered_bytes_ += bytes;
  } else {
    account_->credit(chunk.kind, bytes);
  }
  forget(chunk);
}

// Takes the chunk out of everything but the map.
void ChunkPool::withdraw(PooledChunk& chunk) noexcept {
  if (chunk.index != nullptr) unindex(chunk);
  shelf(chunk.state).bytes -= chunk.chunk.bytes();
  shelf(chunk.state).order.erase(chunk.order);
}

void ChunkPool::forget(PooledChunk& chunk) noexcept {
  withdraw(chunk);
  chunks_.erase(chunk.id);
}

void ChunkPool::abandon(PooledChunk& chunk) noexcept {
  struct Abandoned {
    std::mutex mutex;
    std::multimap<std::uint64_t, PooledChunk> chunks; // empty it takes no memory
  };
  withdraw(chunk);
  chunk.account = account_;
  auto& abandoned = process_wide<Abandoned>();
  const std::lock_guard lock(abandoned.mutex);
  abandoned.chunks.insert(chunks_.extract(chunk.id));
}

ChunkPool::~ChunkPool() {
  while (!chunks_.empty()) {
    PooledChunk& chunk = chunks_.begin()->second;
    account_->credit(chunk.kind, chunk.chunk.bytes());
    forget(chunk);
  }
  account_->credit(Account::Kind::Surrendered, surrendered_bytes_);
}

} // namespace gpuloan::memory
