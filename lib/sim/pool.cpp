// SPDX-License-Identifier: MIT
//
// What a pool does with its blocks. Those that are given up end after the pool's lock was released, since their end
// takes the locks of the address space and of the machine.
#include <sim/pool.hpp>
#include <sim/pool_register.hpp>

#include <algorithm>
#include <atomic>

namespace gpuloan::sim {
namespace {

constexpr std::uint64_t kPiece = std::uint64_t{32} << 20; // in which a real pool takes memory, as it says
constexpr std::size_t kUnit = 512;

// Idle blocks of all pools, so that a synchronisation costs no more than a load where there are none.
std::atomic<std::size_t> idle_blocks{0};

} // namespace

Block& Block::operator=(Block&& other) noexcept {
  std::swap(start_, other.start_);
  std::swap(chunk_, other.chunk_);
  return *this;
}

Block::~Block() {
  if (chunk_) AddressSpace::get().forsake(start_);
}

CuResult Block::make(std::shared_ptr<Chunk> chunk, Block& out) {
  if (const CuResult result = AddressSpace::get().set_aside(chunk->size(), out.start_, kPiece)) return result;
  out.chunk_ = std::move(chunk);
  return Success;
}

PoolMemory::~PoolMemory() {
  static_cast<void>(AddressSpace::get().withdraw(block_.start(), kind_));
  pool_->take_back(std::move(block_), counted_);
}

PoolState::PoolState(Origin which, int device, int types) : origin(which), physical(device), handle_types(types) {
  access_[static_cast<std::size_t>(device)] = AccessReadWrite;
}

CuResult PoolState::allocate(std::size_t bytes, DevicePtr& out) {
  Block block = take_idle(bytes);
  if (!block) {
    if (const CuResult result = make_block(bytes, block)) return result;
  }
  hand_out(RangeKind::Pooled, std::move(block), bytes, out);
  return Success;
}

CuResult PoolState::import(std::shared_ptr<Chunk> chunk, std::size_t bytes, DevicePtr& out) {
  Block block;
  if (const CuResult result = Block::make(std::move(chunk), block)) return result;
  hand_out(RangeKind::Imported, std::move(block), bytes, out);
  return Success;
}

CuResult PoolState::make_block(std::size_t bytes, Block& out) {
  const std::size_t size = (bytes + kUnit - 1) / kUnit * kUnit;
  if (max_bytes != 0) {
    if (size > max_bytes) return OutOfMemory;
    if (held_bytes() > max_bytes - size) trim_to(0);
    if (held_bytes() > max_bytes - size) return OutOfMemory;
  }
  std::shared_ptr<Chunk> chunk;
  const bool shareable = handle_types != HandleNone;
  CuResult result = Chunk::create(physical, size, shareable, chunk);
  if (result == OutOfMemory) {
    trim_to(0);
    result = Chunk::create(physical, size, shareable, chunk);
  }
  return result != Success ? result : Block::make(std::move(chunk), out);
}

// The smallest that is not much too large, and of those the one that was freed last.
Block PoolState::take_idle(std::size_t bytes) {
  Block found;
  const std::lock_guard lock(mutex_);
  auto best = idle_.rend();
  for (auto next = idle_.rbegin(); next != idle_.rend(); ++next) {
    if (next->size() < bytes || next->size() / 2 > bytes) continue;
    if (best == idle_.rend() || next->size() < best->size()) best = next;
  }
  if (best == idle_.rend()) return found;
  found = std::move(*best);
  held_ -= found.size(); // for as long as it is nowhere
  idle_.erase(std::next(best).base());
  idle_blocks.fetch_sub(1, std::memory_order_relaxed);
  return found;
}

void PoolState::hand_out(RangeKind kind, Block block, std::size_t bytes, DevicePtr& out) {
  Range range;
  range.kind = kind;
  range.start = block.start();
  range.size = bytes;
  range.chunk = block.chunk();
  range.pool = handle;
  range.handle_types = kind == RangeKind::Pooled ? handle_types : HandleNone; // an import is no export
  const std::size_t size = block.size();
  auto memory = std::make_shared<PoolMemory>(shared_from_this(), kind, std::move(block), bytes);
  {
    const std::lock_guard lock(mutex_);
    ++out_;
    used_ += bytes;
    held_ += size;
    range.access = access_;
    AddressSpace::get().place(std::move(range));
  }
  out = memory->start();
  add_pool_memory(std::move(memory));
}

void PoolState::take_back(Block block, std::size_t bytes) {
  const std::lock_guard lock(mutex_); // `block` ends after it
  --out_;
  used_ -= bytes;
  if (retired_ || origin == Origin::Imported) {
    held_ -= block.size();
    return;
  }
  idle_.push_back(std::move(block));
  idle_blocks.fetch_add(1, std::memory_order_relaxed);
}

// With the lock: takes blocks out, oldest first, as long as at least `keep` stays.
std::vector<Block> PoolState::drop_idle(std::uint64_t keep) {
  std::vector<Block> dropped;
  while (!idle_.empty() && held_ >= keep && held_ - keep >= idle_.front().size()) {
    held_ -= idle_.front().size();
    dropped.push_back(std::move(idle_.front()));
    idle_.erase(idle_.begin());
    idle_blocks.fetch_sub(1, std::memory_order_relaxed);
  }
  return dropped;
}

void PoolState::trim_to(std::uint64_t keep) {
  std::vector<Block> dropped;
  const std::lock_guard lock(mutex_);
  dropped = drop_idle(keep);
}

void PoolState::trim_to_threshold() {
  std::vector<Block> dropped;
  const std::lock_guard lock(mutex_);
  dropped = drop_idle(threshold_);
}

bool PoolState::retire() {
  std::vector<Block> dropped;
  Fd card;
  const std::lock_guard lock(mutex_);
  if (origin == Origin::Imported && out_ > 0) return false;
  retired_ = true;
  card = std::move(card_);
  dropped = drop_idle(0);
  return true;
}

void PoolState::set_threshold(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  threshold_ = bytes;
}

std::uint64_t PoolState::threshold() const {
  const std::lock_guard lock(mutex_);
  return threshold_;
}

std::uint64_t PoolState::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

std::uint64_t PoolState::held_bytes() const {
  const std::lock_guard lock(mutex_);
  return held_;
}

std::uint64_t PoolState::reserved_bytes() const { return (held_bytes() + kPiece - 1) / kPiece * kPiece; }

void PoolState::set_access(int device, int access) {
  const std::lock_guard lock(mutex_);
  access_[static_cast<std::size_t>(device)] = access;
  AddressSpace::get().set_pool_access(handle, device, access);
}

void trim_pools() {
  if (idle_blocks.load(std::memory_order_relaxed) == 0) return;
  for (const PoolRef& pool : all_pools()) pool->trim_to_threshold();
}

} // namespace gpuloan::sim
