// SPDX-License-Identifier: MIT
//
// All under the state file's Guard. Sums are made by walking the table: it is short, and a sum kept beside it could
// not be put right after a process was killed between two stores.
#include <sim/accounting.hpp>
#include <sim/config.hpp>
#include <sim/state_file.hpp>

#include <algorithm>
#include <span>

namespace gpuloan::sim {
namespace {

std::span<AllocationEntry> entries(StateFile& file) noexcept {
  StateLayout& layout = file.layout();
  const std::size_t limit = std::min<std::uint64_t>(layout.allocation_limit, kMaxAllocations);
  return std::span(layout.allocations).first(limit);
}

bool taken(StateFile& file, std::uint32_t id) noexcept {
  const AllocationEntry& entry = file.layout().allocations[id];
  return file.held(StateFile::allocation_byte(id)) || (entry.pool != 0 && file.held(entry.pool));
}

// Turns what dead processes left behind, and what its pool does not keep any more, into ghosts.
void sweep(StateFile& file) noexcept {
  std::uint32_t id = 0;
  for (AllocationEntry& entry : entries(file)) {
    if (entry.state == EntryState::Used && !taken(file, id)) entry.state = EntryState::Ghost;
    ++id;
  }
}

std::uint64_t used(StateFile& file, std::uint32_t device) noexcept {
  std::uint64_t sum = 0;
  for (const AllocationEntry& entry : entries(file)) {
    if (entry.state == EntryState::Used && entry.device == device) sum += entry.size;
  }
  return sum;
}

// A sweep costs a system call per allocation, so it is made only when the books say that there is no room.
bool has_room(StateFile& file, std::uint32_t device, std::uint64_t size) noexcept {
  const std::uint64_t total = config().memory_bytes;
  if (size > total) return false;
  if (used(file, device) <= total - size) return true;
  sweep(file);
  return used(file, device) <= total - size;
}

AllocationEntry* find_slot(StateFile& file) noexcept {
  StateLayout& layout = file.layout();
  const auto all = entries(file);
  const auto in_state = [&](EntryState state) -> AllocationEntry* {
    const auto found = std::find_if(all.begin(), all.end(), [=](const auto& entry) { return entry.state == state; });
    return found != all.end() ? &*found : nullptr;
  };
  if (AllocationEntry* free = in_state(EntryState::Free)) return free;
  // Ghosts are kept as long as there is room for more entries in a table of everyday size.
  constexpr std::size_t kKeepGhosts = 1024;
  if (all.size() < kKeepGhosts) return &layout.allocations[layout.allocation_limit++];
  if (AllocationEntry* ghost = in_state(EntryState::Ghost)) return ghost;
  if (all.size() < kMaxAllocations) return &layout.allocations[layout.allocation_limit++];
  sweep(file);
  return in_state(EntryState::Ghost);
}

} // namespace

CuResult account_create(std::uint32_t device, std::uint64_t size, FileIdentity identity, Account& out) {
  StateFile& file = StateFile::get();
  const StateFile::Guard guard(file);
  if (!has_room(file, device, size)) return OutOfMemory;
  AllocationEntry* entry = find_slot(file);
  if (entry == nullptr) return OutOfMemory;
  const auto id = static_cast<std::uint32_t>(entry - file.layout().allocations);
  file.hold(StateFile::allocation_byte(id));
  *entry = {EntryState::Free, device, size, identity.dev, identity.ino, 0};
  entry->state = EntryState::Used;
  out = {id, device, size};
  return Success;
}

CuResult account_open(FileIdentity identity, std::uint64_t size, Account& out) {
  StateFile& file = StateFile::get();
  const StateFile::Guard guard(file);
  const auto all = entries(file);
  const auto entry = std::find_if(all.begin(), all.end(), [&](const AllocationEntry& candidate) {
    return candidate.state != EntryState::Free && candidate.ino == identity.ino && candidate.dev == identity.dev;
  });
  if (entry == all.end() || entry->size > size) return Unknown; // a file has whole pages
  // The exporter let go while the descriptor was on its way; its bytes were free in between.
  if (entry->state == EntryState::Ghost && !has_room(file, entry->device, entry->size)) return OutOfMemory;
  const auto id = static_cast<std::uint32_t>(entry - all.begin());
  file.hold(StateFile::allocation_byte(id));
  entry->state = EntryState::Used;
  out = {id, entry->device, entry->size};
  return Success;
}

void account_close(const Account& account) noexcept {
  StateFile& file = StateFile::get();
  const StateFile::Guard guard(file);
  file.drop(StateFile::allocation_byte(account.id));
  if (!taken(file, account.id)) file.layout().allocations[account.id].state = EntryState::Ghost;
}

void account_bind(const Account& account, off_t pool) noexcept {
  StateFile& file = StateFile::get();
  const StateFile::Guard guard(file);
  file.layout().allocations[account.id].pool = pool;
}

std::uint64_t account_used(std::uint32_t device) {
  StateFile& file = StateFile::get();
  const StateFile::Guard guard(file);
  sweep(file);
  return used(file, device);
}

} // namespace gpuloan::sim
