// SPDX-License-Identifier: MIT
//
// The importer's end, and that of a connection of its: our own work on the exporter's memory ends first, then what is mapped of it goes, the
// tether last. Where work does not end, all of it is left to the process.
#include <loan/importer.hpp>

#include <base/reaper.hpp>

#include <algorithm>

namespace gpuloan::loan {

// The ACK of a loan that was let go of follows our GPU work on it, and so does what DONE stands for: the end of the socket would
// overtake the one with its reason, and say of the other that it never came. Not without end: the work may be stuck. Polls, as what ends
// on another thread does not wake a loop of the caller's.
void Importer::see_off(Lock& lock, Peer& base, const Deadline& deadline) {
  const auto& peer = static_cast<const ImporterPeer&>(base);
  const auto is_leaving = [](const auto& entry) { return entry.second->state == ImportState::Letting || entry.second->state == ImportState::Finishing; };
  static_cast<void>(wait(lock, deadline, true, [&] { return peer.lost || (peer.outbox.empty() && std::none_of(peer.loans.begin(), peer.loans.end(), is_leaving)); }));
}

void Importer::close() noexcept {
  bool watched = false;
  {
    Lock lock(mutex_);
    if (closed_) return;
    try {
      const Deadline deadline = Deadline::after_ms(kSeeOffMs);
      for (const auto& peer : std::vector(remembered_)) see_off(lock, *peer, deadline);
    } catch (const std::exception& error) { // what they would have said is lost
      log_turn(error);
    }
    closed_ = true;
    for (const auto& [tag, peer] : peers_) lose(peer, loss("the importer closed its context"));
    notify();
    watched = watch_works();
  }
  const bool quiet = completion_.stop() && watched; // first: they wait, a second at most, for work that uses the memory
  bool over = apart_.stop() && quiet;
  over = foreign_.stop() && over;
  stop_loop();
  Lock lock(mutex_);
  auto held = clear_handles(); // destroyed last, without the lock
  for (const auto& peer : remembered_) {
    for (const auto& [id, loan] : peer->loans) { // a ring may still copy out of them
      if (!loan->buffer) continue;
      try {
        peer->limbo.emplace_back(id, loan->buffer);
      } catch (const std::bad_alloc&) {
        abandon(std::move(loan->buffer));
      }
      loan->buffer.reset();
    }
    peer->loans.clear();
    peer->requests.clear();
    if (!over) { // left mapped, and tied: unmapping does not wait for running work (R22)
      abandon(std::move(peer->imports));
      abandon(std::move(peer->foreign));
      abandon(std::move(peer->pools));
      abandon(std::move(peer->tether));
      abandon(std::move(peer->tether_registration));
    }
    peer->release_memory(true);
    peer->socket.reset();
    peer->pidfd.reset();
  }
  remembered_.clear();
  peers_.clear();
  lock.unlock();
  held = {};
  wait_disposed(kDisposeMs);
}

namespace {

// What is left of a connection, destroyed by the reaper. A ring whose copies do not end is left to the process, with what
// they copy to.
struct Remains {
  std::vector<std::shared_ptr<ImportEvents>> events;
  std::map<std::uint64_t, std::shared_ptr<Import>> imports;
  gate::Words words;
  memory::RingEnds rings;
  decltype(ImporterPeer::limbo) limbo;
  decltype(ImporterPeer::foreign) foreign;
  std::map<std::uint64_t, std::shared_ptr<ImportPool>> pools;
  Mapping tether;
  driver::HostRegistration tether_registration;

  Remains() = default;
  Remains(const Remains&) = delete;
  Remains& operator=(const Remains&) = delete;
  ~Remains() {
    if (!rings.drain()) abandon(std::move(limbo));
    imports.clear();
    foreign.clear();
    pools.clear();
    tether_registration = {}; // waits for all work of the context: nothing of ours touches the exporter's memory any more
    tether.reset();
  }
};

} // namespace

void ImporterPeer::release_memory(bool mapped) noexcept {
  try {
    auto remains = std::make_shared<Remains>();
    if (rings.out) rings.out->forget_all();
    remains->events = std::move(events);
    if (mapped) remains->imports = std::move(imports);
    remains->words = std::move(words);
    remains->rings = std::move(rings);
    remains->limbo = std::move(limbo);
    if (mapped) {
      remains->foreign = std::move(foreign);
      remains->pools = std::move(pools);
      remains->tether = std::move(tether);
      remains->tether_registration = std::move(tether_registration);
    }
    events.clear();
    limbo.clear();
    if (mapped) imports.clear();
    dispose(std::move(remains));
  } catch (...) { // no memory: the members' own destructors do it, but for the rings, which copy to what goes before them
    rings = {};
  }
}

} // namespace gpuloan::loan
