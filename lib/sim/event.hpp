// SPDX-License-Identifier: MIT
//
// Events. What a wait or a query is about is decided when it is called: the newest record at that time (a Moment). A
// local event remembers its newest record as an object; an interprocess one counts records in its shared slot.
#pragma once

#include <sim/event_slot.hpp>
#include <sim/stream.hpp>

namespace gpuloan::sim {

struct Record {
  std::atomic<bool> done{false};
};

// One record of one event; empty for an event that was never recorded, which counts as done.
struct Moment {
  std::shared_ptr<Record> record;
  std::shared_ptr<EventSlot> slot;
  std::uint64_t number = 0;

  [[nodiscard]] bool done() const noexcept {
    if (slot) return slot->done(number);
    return !record || record->done.load(std::memory_order_acquire);
  }
};

struct EventState {
  ContextRef context;
  bool opened = false; // from another event's handle
  std::shared_ptr<EventSlot> slot; // of an interprocess event
  std::mutex mutex;
  std::shared_ptr<Record> newest; // of a local one; guarded by mutex

  [[nodiscard]] Moment moment();
};

// Forgets the events of a context that ends.
void forget_events(const ContextState& context);

[[nodiscard]] std::size_t live_events(); // created or opened, and not destroyed

} // namespace gpuloan::sim
