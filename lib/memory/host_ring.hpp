// SPDX-License-Identifier: MIT
//
// The host rung between two GPU contexts: a ring of slots in a memfd, one ring a direction, registered once by both
// sides. The source copies device to slot, the sink slot to device, and both copies overlap (H3). Where a side's driver
// refuses the registration, that side's copies are made by a thread of the ring's own (unpinned_copies.hpp): slower, and
// ordered by the events that such a copy waits for instead of by the ring's stream.
//
// A transfer is told on (RING_FILLED, the turn's control word) by the CPU once its copies are complete.
//
// Which slot holds what travels in records (RING_FILLED, RING_DRAINED), never in shared memory, so a peer that scribbles
// can only spoil its own bytes. Each end is guarded by its side's lock; the only driver calls made under it are on the
// ring's own stream, and none of them blocks. Transfers of one direction run one after the other in the order of start().
#pragma once

#include <base/mapping.hpp>
#include <driver/handles.hpp>
#include <memory/unpinned_copies.hpp>

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <vector>

namespace gpuloan::memory {

inline constexpr std::uint64_t kRingSlotBytes = 4U << 20;
inline constexpr std::uint32_t kRingSlots = 4;
inline constexpr std::uint32_t kRingSlotsMax = 64;

// One end's view of a ring.
class HostRing {
 public:
  HostRing() noexcept = default;
  // Exporter: makes the memfd, sealed against resizing. The descriptor is taken with take_fd() to be sent.
  [[nodiscard]] static Result<HostRing> create(std::shared_ptr<driver::Gpu> gpu, std::uint64_t slot_bytes, std::uint32_t slots);
  [[nodiscard]] static Result<HostRing> adopt(std::shared_ptr<driver::Gpu> gpu, UniqueFd fd, std::uint64_t slot_bytes,
                                              std::uint32_t slots);
  [[nodiscard]] UniqueFd take_fd() noexcept { return std::move(fd_); }
  [[nodiscard]] std::byte* slot(std::uint32_t index) const noexcept { return mapping_.data() + index * slot_bytes_; }
  [[nodiscard]] std::uint64_t slot_bytes() const noexcept { return slot_bytes_; }
  [[nodiscard]] std::uint32_t slots() const noexcept { return static_cast<std::uint32_t>(events_.size()); }
  [[nodiscard]] driver::Stream stream() const noexcept { return stream_.get(); }
  // For an arena that will still ask the stream when the ring is gone; no copy may follow.
  [[nodiscard]] driver::OwnedStream take_stream() noexcept { return std::move(stream_); }
  [[nodiscard]] driver::Gpu& gpu() const noexcept { return *gpu_; }
  [[nodiscard]] bool pinned() const noexcept { return unpinned_ == nullptr; }
  // Once a copy has failed, or one has begun that no event tells of, no other is started, and only the stream tells when all are over.
  void give_up() noexcept { given_up_ = true; }
  [[nodiscard]] bool given_up() const noexcept { return given_up_; }
  [[nodiscard]] bool quiet() const noexcept; // no copy runs
  // Starts the copy of a slot behind what is in the ring's stream now.
  [[nodiscard]] Result<void> copy_out(std::uint32_t slot, cuda::DevicePtr from, std::uint64_t bytes); // device to slot
  [[nodiscard]] Result<void> copy_in(std::uint32_t slot, cuda::DevicePtr to, std::uint64_t bytes);    // slot to device
  [[nodiscard]] Result<bool> copied(std::uint32_t slot) const; // the slot's last copy is complete

 private:
  [[nodiscard]] static Result<HostRing> open(std::shared_ptr<driver::Gpu> gpu, UniqueFd fd, std::uint64_t slot_bytes,
                                             std::uint32_t slots);
  [[nodiscard]] Result<void> started(std::uint32_t slot);
  std::shared_ptr<driver::Gpu> gpu_;
  UniqueFd fd_;
  Mapping mapping_;
  driver::HostRegistration registration_;
  driver::OwnedStream stream_;
  std::vector<driver::OwnedEvent> events_;
  std::vector<std::shared_ptr<const UnpinnedCopy>> copies_; // by slot, where unpinned_
  std::unique_ptr<UnpinnedCopies> unpinned_;
  std::uint64_t slot_bytes_ = 0;
  bool given_up_ = false;
};

struct Piece {
  std::uint64_t loan = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint32_t turn = 0;
  std::uint32_t slot = 0;
};

// The filling end.
class RingSource {
 public:
  explicit RingSource(HostRing ring) : ring_(std::move(ring)), slots_(ring_.slots(), SlotState::Free) {}
  // Queues the transfer of `bytes` (not 0) from `from`. The ring's stream must already wait for the bytes (gate::join).
  void start(std::uint64_t loan, std::uint32_t turn, cuda::DevicePtr from, std::uint64_t bytes);
  void forget(std::uint64_t loan) noexcept; // copies in flight go on; nothing more of it is reported
  void forget_all() noexcept { queue_.clear(); }
  void drained(std::uint32_t slot) noexcept;

  struct Progress {
    std::vector<Piece> filled;   // tell the sink
    std::vector<Piece> complete; // whole transfers whose every copy is complete
  };
  [[nodiscard]] Result<void> pump(Progress& progress);
  [[nodiscard]] bool busy() const noexcept { return ring_.given_up() ? copying() : !queue_.empty() || copying(); }
  [[nodiscard]] bool copying() const noexcept { return ring_.given_up() ? !ring_.quiet() : !copying_.empty(); }
  [[nodiscard]] bool in_flight(std::uint64_t loan) const noexcept; // a copy that reads its memory is not over
  [[nodiscard]] const HostRing& ring() const noexcept { return ring_; }
  [[nodiscard]] HostRing& ring() noexcept { return ring_; }

 private:
  enum class SlotState : std::uint8_t { Free, Copying, Full };
  struct Transfer {
    std::uint64_t loan, bytes, next;
    cuda::DevicePtr from;
    std::uint32_t turn;
  };
  struct Copying {
    Piece piece;
    bool last;
    bool forgotten;
  };
  [[nodiscard]] Result<void> fill_slots();
  HostRing ring_;
  std::vector<SlotState> slots_;
  std::deque<Transfer> queue_;
  std::list<Copying> copying_;
  std::uint32_t next_slot_ = 0;
};

// The draining end.
class RingSink {
 public:
  // `rolls`: a transfer of the next turn may follow a landed one without expect(). The importer's sink rolls, since the
  // exporter begins a turn only after DONE; the exporter's does not, since a turn is the exporter's to begin.
  RingSink(HostRing ring, bool rolls) : ring_(std::move(ring)), busy_(ring_.slots(), false), rolls_(rolls) {}
  // The next turn of `loan` will bring `bytes` to `to`.
  void expect(std::uint64_t loan, std::uint32_t turn, cuda::DevicePtr to, std::uint64_t bytes);
  // No more of it is wanted; copies in flight go on in the ring's stream.
  void forget(std::uint64_t loan) noexcept { expected_.erase(loan); }
  // A slot was filled. PROTOCOL when the piece does not fit what is expected or the slot is not free. A piece of a loan
  // that nobody expects (any more) is drained unread.
  [[nodiscard]] Result<void> filled(const Piece& piece);
  [[nodiscard]] bool landed(std::uint64_t loan, std::uint32_t turn) const noexcept;

  struct Progress {
    std::vector<std::uint32_t> drained; // tell the source
    std::vector<Piece> landed;          // whole transfers that are in place
  };
  [[nodiscard]] Result<void> pump(Progress& progress);
  [[nodiscard]] bool busy() const noexcept { return copying(); }
  [[nodiscard]] bool copying() const noexcept { return ring_.given_up() ? !ring_.quiet() : !copying_.empty(); }
  [[nodiscard]] bool in_flight(std::uint64_t loan) const noexcept; // a copy that writes its memory is not over
  [[nodiscard]] const HostRing& ring() const noexcept { return ring_; }
  [[nodiscard]] HostRing& ring() noexcept { return ring_; }

 private:
  struct Expected {
    cuda::DevicePtr to;
    std::uint64_t bytes, enqueued, landed;
    std::uint32_t turn;
  };
  struct Copying {
    Piece piece;
    bool unread;
  };
  HostRing ring_;
  std::vector<bool> busy_;
  bool rolls_;
  std::map<std::uint64_t, Expected> expected_;
  std::list<Copying> copying_;
};

// One side's ends of the two rings of a connection. Null until something needs them.
struct RingEnds {
  std::unique_ptr<RingSource> out;
  std::unique_ptr<RingSink> in;

  [[nodiscard]] bool busy() const noexcept { return (out && out->busy()) || (in && in->busy()); }
  [[nodiscard]] bool in_flight(std::uint64_t loan) const noexcept { return (out && out->in_flight(loan)) || (in && in->in_flight(loan)); }
  void forget(std::uint64_t loan) noexcept;
  // Where a copy has failed, both give up.
  [[nodiscard]] Result<void> pump(RingSource::Progress& source, RingSink::Progress& sink);
  // Waits until this side's own copies are over, a second an end at most. An end where they are not is left to the process; false then:
  // what they copy must stay.
  [[nodiscard]] bool drain() noexcept;
};

} // namespace gpuloan::memory
