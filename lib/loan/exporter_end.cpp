// SPDX-License-Identifier: MIT
//
// The exporter's end, and that of a connection to it: nobody waits for what may not end. Our own copies end first, then the memory goes;
// what a peer may still write is kept until it is gone.
#include <loan/exporter.hpp>

#include <base/reaper.hpp>

namespace gpuloan::loan {
namespace {

// Of a loan in quarantine. Our own handles to its memory go first: behind the release function it is the caller's to free.
struct Kept {
  std::shared_ptr<ReleaseCall> release_call;
  std::shared_ptr<const std::vector<driver::VmmHandle>> pieces;
};

void keep_quarantined(std::vector<std::shared_ptr<ExportLoan>> loans, UniqueFd pidfd, const std::shared_ptr<const Tether>& tether) noexcept {
  for (const auto& loan : loans) {
    if (loan->release_call) loan->release_call->stay(loan->release_call);
  }
  try {
    std::vector<Kept> kept;
    for (const auto& loan : loans) kept.push_back({std::exchange(loan->release_call, nullptr), std::exchange(loan->pieces, nullptr)});
    if (kept.empty()) return;
    keep_until_gone(std::move(pidfd), tether, [kept = std::move(kept)]() mutable {
      for (Kept& each : kept) {
        each.pieces.reset();
        if (each.release_call) each.release_call->go();
      }
    });
  } catch (const std::bad_alloc&) { // then they are never called
  }
}

} // namespace

void Exporter::close() noexcept {
  {
    const Lock lock(mutex_);
    if (closed_) return;
    closed_ = true;
    for (const auto& [tag, peer] : peers_) lose(peer, loss("the exporter closed its context"));
    notify();
  }
  stop_loop();
  after_turn();
  Lock lock(mutex_);
  auto held = clear_handles(); // destroyed last, without the lock
  socket_file_.remove(); // before the socket goes, which keeps the file's inode from being used again
  socket_file_ = {};
  listener_.reset();
  for (const auto& weak : regions_) {
    const auto region = weak.lock();
    if (!region) continue;
    if (region->region != nullptr) region->arena->destroy(std::exchange(region->region, nullptr));
    region->arena.reset();
  }
  regions_.clear();
  for (const auto& peer : remembered_) {
    for (const auto& [id, loan] : peer->loans) {
      loan->arena.reset();
      loan->reading = {};
      loan->landed = {};
      auto call = std::exchange(loan->release_call, nullptr);
      if (!call) continue;
      call->stay(call);
      try {
        peer->released.push_back(std::move(call)); // behind our own last copies
      } catch (const std::bad_alloc&) { // then it is never called
      }
    }
    peer->loans.clear();
    peer->feeds.clear();
    for (Canary& canary : peer->canaries) canary.loans = {};
    auto quarantined = std::exchange(peer->quarantined, {});
    peer->release_memory(true);
    peer->socket.reset();
    keep_quarantined(std::move(quarantined), std::move(peer->pidfd), peer->tether);
    peer->pidfd.reset();
  }
  remembered_.clear();
  peers_.clear();
  lock.unlock();
  held = {};
  static_cast<void>(apart_.stop());
  static_cast<void>(releases_.stop());
  wait_disposed(kDisposeMs);
}

namespace {

// What is left of a connection, destroyed by the reaper in this order: our own copies end, the arena asks the streams that
// used it, then rings, words, events and streams go.
struct Remains {
  driver::OwnedStream copy_stream, canary_stream;
  std::vector<driver::OwnedStream> ring_streams;
  std::vector<std::unique_ptr<EventPair>> events;
  std::vector<std::pair<std::uint32_t, driver::OwnedEvent>> late_slots;
  gate::Words words;
  memory::RingEnds rings;
  std::unique_ptr<memory::UnpinnedCopies> unpinned;
  std::shared_ptr<memory::Arena> arena;
  std::vector<std::shared_ptr<ReleaseCall>> released;
  decltype(ExporterPeer::blocks) blocks;

  Remains() = default;
  Remains(const Remains&) = delete;
  Remains& operator=(const Remains&) = delete;
  ~Remains() {
    bool over = rings.drain();
    if (unpinned && !unpinned->drain()) {
      static_cast<void>(unpinned.release());
      over = false;
    }
    if (!over) { // to the process, with what is copied
      abandon(std::move(arena));
      abandon(std::move(released));
    }
    arena.reset();
    for (const auto& call : released) call->go();
    released.clear();
  }
};

} // namespace

void ExporterPeer::release_memory(bool with_arena) noexcept {
  try {
    auto remains = std::make_shared<Remains>();
    if (rings.out) rings.out->forget_all();
    if (with_arena) {
      remains->copy_stream = std::move(copy_stream);
      remains->canary_stream = std::move(canary_stream);
      remains->ring_streams = std::move(ring_streams);
    } else { // the regions that live on remember which streams used them
      if (rings.out) ring_streams.push_back(rings.out->ring().take_stream());
      if (rings.in) ring_streams.push_back(rings.in->ring().take_stream());
    }
    remains->events = std::move(events);
    remains->late_slots = std::move(late_slots);
    remains->words = std::move(words);
    remains->rings = std::move(rings);
    remains->unpinned = std::move(unpinned);
    remains->released = std::move(released);
    remains->blocks = std::move(blocks);
    if (with_arena) remains->arena = std::move(arena);
    events.clear();
    late_slots.clear();
    memory_released = true;
    dispose(std::move(remains));
  } catch (...) { // no memory: the members' own destructors do it, but for the rings, which copy to and from the arena
    rings = {};
  }
}

} // namespace gpuloan::loan
