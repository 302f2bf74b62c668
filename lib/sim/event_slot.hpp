// SPDX-License-Identifier: MIT
//
// The shared half of an interprocess event: a slot of the state file with two counters, records made and the newest
// record whose work is done. A record that was queued by a process that dies never becomes done, and nobody can tell
// (fact S5); a slot that was never recorded counts as done (facts S7 and S11).
#pragma once

#include <sim/rows.hpp>

#include <cstdint>
#include <memory>

namespace gpuloan::sim {

inline constexpr CuResult MapFailed = 205; // gpuloan itself has no use for it

class EventSlot {
 public:
  EventSlot(const EventSlot&) = delete;
  EventSlot& operator=(const EventSlot&) = delete;
  ~EventSlot();

  // OutOfMemory when all slots of the machine are taken.
  [[nodiscard]] static CuResult create(std::shared_ptr<EventSlot>& out);
  // MapFailed for bytes that are no handle; InvalidValue for an event whose creator has destroyed it or is gone. (A
  // real driver was seen to open the latter two as well, into memory that nobody records to any more.)
  [[nodiscard]] static CuResult open(const IpcEventHandle& handle, std::shared_ptr<EventSlot>& out);
  [[nodiscard]] IpcEventHandle handle() const noexcept;

  // From now on the handle opens nothing; those who opened it before keep the event.
  void retire() noexcept;

  [[nodiscard]] std::uint64_t recorded() const noexcept;
  [[nodiscard]] std::uint64_t begin_record() noexcept; // the new record's number
  [[nodiscard]] bool done(std::uint64_t record) const noexcept;
  void complete(std::uint64_t record) noexcept;

 private:
  EventSlot(std::uint32_t slot, std::uint32_t generation, bool creator) noexcept
      : slot_(slot), generation_(generation), creator_(creator) {}

  const std::uint32_t slot_;
  const std::uint32_t generation_;
  bool creator_; // and not retired; under the state file's Guard
};

} // namespace gpuloan::sim
