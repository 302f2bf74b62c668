// SPDX-License-Identifier: MIT
//
// Slots are used in turn. The source owns a slot from the start of its copy to RING_DRAINED, the sink from RING_FILLED to
// the end of its own copy; events tell each side when its copy of a slot is complete, in stream order.
#include <memory/host_ring.hpp>

#include <base/clock.hpp>

#include <algorithm>
#include <fcntl.h>
#include <thread>

namespace gpuloan::memory {

Result<HostRing> HostRing::open(std::shared_ptr<driver::Gpu> gpu, UniqueFd fd, std::uint64_t slot_bytes, std::uint32_t slots) {
  HostRing ring;
  auto mapping = Mapping::map_shared(fd.get(), slot_bytes * slots);
  if (!mapping) return forward(std::move(mapping.error()));
  ring.mapping_ = std::move(*mapping);
  ring.registration_ = driver::HostRegistration::try_create(gpu, ring.mapping_.bytes());
  if (!ring.registration_) {
    auto unpinned = UnpinnedCopies::create(gpu);
    if (!unpinned) return forward(std::move(unpinned.error()));
    ring.unpinned_ = std::move(*unpinned);
    ring.copies_.resize(slots);
  }
  auto stream = driver::OwnedStream::create(gpu);
  if (!stream) return forward(std::move(stream.error()));
  ring.stream_ = std::move(*stream);
  for (std::uint32_t index = 0; index < slots; ++index) {
    auto event = driver::OwnedEvent::create(gpu, cuda::EventDisableTiming);
    if (!event) return forward(std::move(event.error()));
    ring.events_.push_back(std::move(*event));
  }
  ring.gpu_ = std::move(gpu);
  ring.fd_ = std::move(fd);
  ring.slot_bytes_ = slot_bytes;
  return ring;
}

Result<HostRing> HostRing::create(std::shared_ptr<driver::Gpu> gpu, std::uint64_t slot_bytes, std::uint32_t slots) {
  auto fd = create_memfd("gpuloan-ring", slot_bytes * slots);
  if (!fd) return forward(std::move(fd.error()));
  if (::fcntl(fd->get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) return fail_errno("fcntl(F_ADD_SEALS)", errno);
  return open(std::move(gpu), std::move(*fd), slot_bytes, slots);
}

Result<HostRing> HostRing::adopt(std::shared_ptr<driver::Gpu> gpu, UniqueFd fd, std::uint64_t slot_bytes, std::uint32_t slots) {
  if (slots == 0 || slots > kRingSlotsMax || slot_bytes == 0 || slot_bytes > (std::uint64_t{1} << 30)) {
    return fail(GPULOAN_ERR_PROTOCOL, "a ring of " + std::to_string(slots) + " slots of " + std::to_string(slot_bytes) + " bytes is not acceptable");
  }
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return fail(GPULOAN_ERR_PROTOCOL, "the ring's pages are not sealed against shrinking");
  auto ring = open(std::move(gpu), std::move(fd), slot_bytes, slots);
  if (ring) ring->fd_.reset();
  return ring;
}

Result<void> HostRing::copy_out(std::uint32_t index, cuda::DevicePtr from, std::uint64_t bytes) {
  if (unpinned_) {
    auto copy = unpinned_->to_host(slot(index), from, bytes, stream());
    if (!copy) return forward(std::move(copy.error()));
    copies_[index] = std::move(*copy);
    return {};
  }
  GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuMemcpyDtoHAsync, slot(index), from, bytes, stream()));
  return started(index);
}

Result<void> HostRing::copy_in(std::uint32_t index, cuda::DevicePtr to, std::uint64_t bytes) {
  if (unpinned_) {
    auto copy = unpinned_->to_device(to, slot(index), bytes, stream());
    if (!copy) return forward(std::move(copy.error()));
    copies_[index] = std::move(*copy);
    return {};
  }
  GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuMemcpyHtoDAsync, to, slot(index), bytes, stream()));
  return started(index);
}

Result<void> HostRing::started(std::uint32_t index) {
  auto recorded = events_[index].record(stream());
  if (!recorded) give_up();
  return recorded;
}

Result<bool> HostRing::copied(std::uint32_t index) const { return unpinned_ ? copies_[index]->query() : events_[index].query(); }

bool HostRing::quiet() const noexcept try {
  if (unpinned_) return !unpinned_->busy();
  if (!stream_) return true;
  const auto over = stream_.query();
  return !over || *over;
} catch (const std::bad_alloc&) { // of the error's text: asked again
  return false;
}

// ---- Source -------------------------------------------------------------------------------------------------------

void RingSource::start(std::uint64_t loan, std::uint32_t turn, cuda::DevicePtr from, std::uint64_t bytes) {
  queue_.push_back({loan, bytes, 0, from, turn});
}

void RingSource::forget(std::uint64_t loan) noexcept {
  std::erase_if(queue_, [loan](const Transfer& transfer) { return transfer.loan == loan; });
  for (Copying& copy : copying_) copy.forgotten |= copy.piece.loan == loan;
}

void RingSource::drained(std::uint32_t slot) noexcept {
  if (slot < slots_.size() && slots_[slot] == SlotState::Full) slots_[slot] = SlotState::Free;
}

Result<void> RingSource::fill_slots() {
  while (!queue_.empty() && slots_[next_slot_] == SlotState::Free) {
    Transfer& transfer = queue_.front();
    const std::uint64_t bytes = std::min(ring_.slot_bytes(), transfer.bytes - transfer.next);
    const Piece piece{transfer.loan, transfer.next, bytes, transfer.turn, next_slot_};
    const bool last = transfer.next + bytes == transfer.bytes;
    std::list<Copying> one{{piece, last, false}}; // what could fail, before the copy is out
    GPULOAN_TRY(ring_.copy_out(next_slot_, transfer.from + transfer.next, bytes));
    copying_.splice(copying_.end(), one);
    transfer.next += bytes;
    slots_[next_slot_] = SlotState::Copying;
    next_slot_ = (next_slot_ + 1) % ring_.slots();
    if (last) queue_.pop_front();
  }
  return {};
}

Result<void> RingSource::pump(Progress& progress) {
  if (ring_.given_up()) return {};
  driver::Gpu::Scope scope(ring_.gpu());
  if (!scope.ok()) return scope.ok();
  while (!copying_.empty()) {
    const Copying& copy = copying_.front();
    auto complete = ring_.copied(copy.piece.slot);
    if (!complete) return forward(std::move(complete.error()));
    if (!*complete) break;
    progress.filled.reserve(copying_.size()); // for all that may follow, before the first is over: what is not told would be waited for
    progress.complete.reserve(copying_.size());
    slots_[copy.piece.slot] = copy.forgotten ? SlotState::Free : SlotState::Full;
    if (!copy.forgotten) {
      progress.filled.push_back(copy.piece);
      if (copy.last) progress.complete.push_back(copy.piece);
    }
    copying_.pop_front();
  }
  return fill_slots();
}

bool RingSource::in_flight(std::uint64_t loan) const noexcept {
  if (ring_.given_up()) return copying();
  return std::any_of(copying_.begin(), copying_.end(), [loan](const Copying& copy) { return copy.piece.loan == loan; });
}

// ---- Sink ---------------------------------------------------------------------------------------------------------

void RingSink::expect(std::uint64_t loan, std::uint32_t turn, cuda::DevicePtr to, std::uint64_t bytes) {
  expected_[loan] = {to, bytes, 0, 0, turn};
}

Result<void> RingSink::filled(const Piece& piece) {
  if (piece.slot >= busy_.size() || busy_[piece.slot]) return fail(GPULOAN_ERR_PROTOCOL, "RING_FILLED names a slot that is not free");
  const auto it = expected_.find(piece.loan);
  if (rolls_ && it != expected_.end() && piece.turn == it->second.turn + 1 && it->second.landed == it->second.bytes) {
    it->second.turn = piece.turn;
    it->second.enqueued = it->second.landed = 0;
  }
  const bool unread = it == expected_.end() || it->second.turn != piece.turn;
  std::list<Copying> one{{piece, unread}}; // before the copy is under way, as in fill_slots
  if (!unread) {
    Expected& expected = it->second;
    if (piece.offset != expected.enqueued || piece.bytes == 0 || piece.bytes > ring_.slot_bytes() ||
        piece.bytes > expected.bytes - expected.enqueued) {
      return fail(GPULOAN_ERR_PROTOCOL, "RING_FILLED does not continue the transfer");
    }
    driver::Gpu::Scope scope(ring_.gpu());
    if (!scope.ok()) return scope.ok();
    GPULOAN_TRY(ring_.copy_in(piece.slot, expected.to + piece.offset, piece.bytes));
    expected.enqueued += piece.bytes;
  }
  busy_[piece.slot] = true;
  copying_.splice(copying_.end(), one);
  return {};
}

bool RingSink::landed(std::uint64_t loan, std::uint32_t turn) const noexcept {
  const auto it = expected_.find(loan);
  return it != expected_.end() && it->second.turn == turn && it->second.landed == it->second.bytes;
}

bool RingSink::in_flight(std::uint64_t loan) const noexcept {
  if (ring_.given_up()) return copying();
  return std::any_of(copying_.begin(), copying_.end(), [loan](const Copying& copy) { return copy.piece.loan == loan && !copy.unread; });
}

Result<void> RingSink::pump(Progress& progress) {
  if (ring_.given_up()) return {};
  driver::Gpu::Scope scope(ring_.gpu());
  if (!scope.ok()) return scope.ok();
  while (!copying_.empty()) {
    const Copying& copy = copying_.front();
    if (!copy.unread) {
      auto complete = ring_.copied(copy.piece.slot);
      if (!complete) return forward(std::move(complete.error()));
      if (!*complete) break;
    }
    progress.drained.reserve(copying_.size()); // as in the source's
    progress.landed.reserve(copying_.size());
    busy_[copy.piece.slot] = false;
    progress.drained.push_back(copy.piece.slot);
    if (const auto it = expected_.find(copy.piece.loan); !copy.unread && it != expected_.end() && it->second.turn == copy.piece.turn) {
      it->second.landed += copy.piece.bytes;
      if (it->second.landed == it->second.bytes) progress.landed.push_back(copy.piece);
    }
    copying_.pop_front();
  }
  return {};
}

// ---- Both ends ----------------------------------------------------------------------------------------------------

void RingEnds::forget(std::uint64_t loan) noexcept {
  if (out) out->forget(loan);
  if (in) in->forget(loan);
}

Result<void> RingEnds::pump(RingSource::Progress& source, RingSink::Progress& sink) {
  Result<void> moved = out && out->busy() ? out->pump(source) : Result<void>();
  if (moved && in && in->busy()) moved = in->pump(sink);
  if (moved) return moved;
  if (out) out->ring().give_up();
  if (in) in->ring().give_up();
  return moved;
}

namespace {

template <typename End>
bool drain_one(std::unique_ptr<End>& end) noexcept {
  const Deadline deadline = Deadline::after_ms(1000);
  while (end && end->copying()) {
    if (!driver::calls_allowed() || deadline.passed()) {
      static_cast<void>(end.release());
      return false;
    }
    typename End::Progress ignored;
    if (!end->pump(ignored)) end->ring().give_up();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

} // namespace

bool RingEnds::drain() noexcept {
  const bool over = drain_one(out);
  return drain_one(in) && over;
}

} // namespace gpuloan::memory
