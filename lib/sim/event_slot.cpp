// SPDX-License-Identifier: MIT
//
// Slots of the state file's event table. A slot's generation makes old handles of a slot that is used again void.
#include <sim/event_slot.hpp>
#include <sim/state_file.hpp>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace gpuloan::sim {
namespace {

struct HandleBytes {
  char magic[8];
  std::uint32_t slot;
  std::uint32_t generation;
  unsigned char rest[48];
};
static_assert(sizeof(HandleBytes) == sizeof(IpcEventHandle));

constexpr char kMagic[8] = {'s', 'i', 'm', 'e', 'v', 'e', 'n', 't'};

EventEntry& entry_of(std::uint32_t slot) noexcept { return StateFile::get().layout().events[slot]; }

std::atomic_ref<std::uint64_t> shared(std::uint64_t& counter) noexcept { return std::atomic_ref(counter); }

// Under Guard: a slot that is free, or whose holders are all gone.
EventEntry* find_slot(StateFile& file) noexcept {
  StateLayout& layout = file.layout();
  const auto limit = static_cast<std::uint32_t>(std::min<std::uint64_t>(layout.event_limit, kMaxEvents));
  for (std::uint32_t slot = 0; slot < limit; ++slot) {
    if (layout.events[slot].state == EntryState::Free) return &layout.events[slot];
  }
  if (limit < kMaxEvents) return &layout.events[layout.event_limit++];
  for (std::uint32_t slot = 0; slot < limit; ++slot) {
    if (!file.held(StateFile::event_byte(slot))) return &layout.events[slot];
  }
  return nullptr;
}

} // namespace

CuResult EventSlot::create(std::shared_ptr<EventSlot>& out) {
  StateFile& file = StateFile::get();
  std::shared_ptr<EventSlot> made; // ends after the guard if something throws
  const StateFile::Guard guard(file);
  EventEntry* entry = find_slot(file);
  if (entry == nullptr) return OutOfMemory;
  const auto slot = static_cast<std::uint32_t>(entry - file.layout().events);
  file.hold(StateFile::event_byte(slot));
  file.hold(StateFile::event_creator_byte(slot));
  *entry = {EntryState::Free, entry->generation + 1, 0, 0};
  entry->state = EntryState::Used;
  out.reset(new EventSlot(slot, entry->generation, true));
  return Success;
}

CuResult EventSlot::open(const IpcEventHandle& handle, std::shared_ptr<EventSlot>& out) {
  HandleBytes bytes;
  std::memcpy(&bytes, &handle, sizeof bytes);
  if (std::memcmp(bytes.magic, kMagic, sizeof kMagic) != 0 || bytes.slot >= kMaxEvents) return MapFailed;
  StateFile& file = StateFile::get();
  const StateFile::Guard guard(file);
  const EventEntry& entry = entry_of(bytes.slot);
  if (entry.state != EntryState::Used || entry.generation != bytes.generation) return InvalidValue;
  if (!file.held(StateFile::event_creator_byte(bytes.slot))) return InvalidValue;
  file.hold(StateFile::event_byte(bytes.slot));
  out.reset(new EventSlot(bytes.slot, bytes.generation, false));
  return Success;
}

EventSlot::~EventSlot() {
  StateFile& file = StateFile::get();
  const StateFile::Guard guard(file);
  if (creator_) file.drop(StateFile::event_creator_byte(slot_));
  file.drop(StateFile::event_byte(slot_));
  if (!file.held(StateFile::event_byte(slot_))) entry_of(slot_).state = EntryState::Free;
}

void EventSlot::retire() noexcept {
  StateFile& file = StateFile::get();
  const StateFile::Guard guard(file);
  if (creator_) file.drop(StateFile::event_creator_byte(slot_));
  creator_ = false;
}

IpcEventHandle EventSlot::handle() const noexcept {
  HandleBytes bytes = {};
  std::memcpy(bytes.magic, kMagic, sizeof kMagic);
  bytes.slot = slot_;
  bytes.generation = generation_;
  IpcEventHandle handle;
  std::memcpy(&handle, &bytes, sizeof handle);
  return handle;
}

std::uint64_t EventSlot::recorded() const noexcept { return shared(entry_of(slot_).recorded).load(); }

std::uint64_t EventSlot::begin_record() noexcept { return shared(entry_of(slot_).recorded).fetch_add(1) + 1; }

bool EventSlot::done(std::uint64_t record) const noexcept { return shared(entry_of(slot_).completed).load() >= record; }

void EventSlot::complete(std::uint64_t record) noexcept { shared(entry_of(slot_).completed).store(record); }

} // namespace gpuloan::sim
