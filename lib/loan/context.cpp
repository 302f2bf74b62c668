// SPDX-License-Identifier: MIT
//
// Context: its peers. They come, what they send is received, and they are lost or closed.
#include <loan/context.hpp>
#include <loan/loan.hpp>

#include <base/log.hpp>

#include <algorithm>
#include <cstring>
#include <new>
#include <sys/socket.h>

namespace gpuloan::loan {
namespace {

constexpr std::uint64_t kPidfdBit = 1; // a peer's tag is even; the tag of its pidfd is the next odd number

} // namespace

Context::Context(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu) : options_(options), gpu_(std::move(gpu)) {}

Context::~Context() = default;

// ---- Peers --------------------------------------------------------------------------------------------------------

std::shared_ptr<Peer> Context::find_peer(std::uint64_t tag) {
  const auto it = peers_.find(tag & ~kPidfdBit);
  return it == peers_.end() ? nullptr : it->second;
}

Result<void> Context::add_peer(const std::shared_ptr<Peer>& peer) {
  peer->tag = next_tag_;
  next_tag_ += 2;
  const auto known = peers_.emplace(peer->tag, peer).first;
  auto enter = [this, peer] {
    const Lock lock(mutex_);
    if (peer->lost) return;
    if (auto added = engine_->add_socket(peer->socket.get(), peer->tag); !added) {
      lose(peer, std::move(added.error()));
      return;
    }
    peer->in_loop = true;
  };
  try {
    post(std::move(enter));
  } catch (...) {
    peers_.erase(known);
    throw;
  }
  return {};
}

void Context::watch_pidfd(Peer& peer) {
  if (!peer.pidfd) return;
  if (auto added = engine_->add_readable(peer.pidfd.get(), peer.tag | kPidfdBit); !added) {
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "cannot watch a peer's pidfd: " + added.error().text);
    return;
  }
  peer.pidfd_in_loop = true;
}

std::vector<channel::DeviceEntry> Context::device_entries(std::size_t max) const {
  std::vector<channel::DeviceEntry> entries;
  if (!gpu_) return entries;
  const driver::Floors& floors = gpu_->floors();
  const auto add = [&](const cuda::Uuid& uuid, std::uint32_t bits) {
    channel::DeviceEntry& entry = entries.emplace_back();
    std::memcpy(entry.uuid, uuid.bytes, sizeof entry.uuid);
    entry.floors = bits;
    entry.driver_version = gpu_->driver().version();
  };
  add(floors.uuid, floors.bits | (floors.mps ? channel::kDeviceMps : 0U));
  for (const driver::Neighbour& other : floors.neighbours) {
    if (entries.size() < max) add(other.uuid, other.reachable ? channel::kDevicePeer : 0U);
  }
  return entries;
}

Error Context::loss(const char* why) noexcept {
  Error error{GPULOAN_ERR_PEER_LOST, ""};
  try {
    error.text = why;
  } catch (const std::bad_alloc&) {
  }
  return error;
}

// Does not throw: settle_loss(), and leaving the loop, are tried again by the loop.
void Context::lose(const std::shared_ptr<Peer>& peer, Error why) {
  if (peer->lost) return;
  peer->lost = true;
  peer->loss = std::move(why);
  peer->outbox.clear();
  if (peer->socket) ::shutdown(peer->socket.get(), SHUT_RDWR);
  leaving_ = true;
  if (engine_ && !on_loop_thread()) engine_->wake();
  try {
    settle_loss(peer);
  } catch (const std::bad_alloc&) {
  }
}

void Context::settle_loss(const std::shared_ptr<Peer>& peer) {
  GPULOAN_LOG(GPULOAN_LOG_INFO, "peer lost: " + peer->loss.text);
  on_peer_lost(peer);
  peer->loss_settled = true;
  notify();
}

void Context::take_out_lost() {
  for (auto it = peers_.begin(); it != peers_.end();) {
    const std::shared_ptr<Peer> peer = it->second;
    if (peer->lost && !peer->loss_settled) settle_loss(peer);
    if (!peer->lost || peer->taken_out) {
      ++it;
      continue;
    }
    if (peer->in_loop) engine_->remove(peer->socket.get());
    peer->in_loop = false;
    peer->socket.reset();
    peer->taken_out = true;
    if (peer->pidfd_in_loop && !awaits_death(*peer)) {
      engine_->remove(peer->pidfd.get());
      peer->pidfd_in_loop = false;
    }
    it = peer->pidfd_in_loop ? std::next(it) : peers_.erase(it);
  }
  leaving_ = std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) { return entry.second->lost && !entry.second->taken_out; });
}

void Context::no_memory_for(std::uint64_t tag) {
  const Lock lock(mutex_);
  if (const std::shared_ptr<Peer> peer = find_peer(tag); peer != nullptr) lose(peer, out_of_memory());
}

void Context::close_peer(const std::shared_ptr<Peer>& peer) noexcept {
  std::shared_ptr<void> last;
  Lock lock(mutex_);
  if (!closed_) {
    try {
      see_off(lock, *peer, Deadline::after_ms(kSeeOffMs));
    } catch (const std::exception& error) {
      log_turn(error);
    }
  }
  if (!closed_) {
    if (!peer->lost && peer->phase == Peer::Phase::Ready) {
      channel::Record bye = channel::make_record(channel::Type::Bye);
      bye.notice.status = GPULOAN_OK;
      try {
        send(*peer, bye);
      } catch (const std::bad_alloc&) { // the end of the socket says it too
      }
    }
    lose(peer, loss("the connection was closed on this side"));
    forget_peer(*peer);
  }
  peer->closed = true;
  last = drop(peer->handle);
}

// ---- What the engine calls ----------------------------------------------------------------------------------------

void Context::on_message(std::uint64_t tag, const loop::Message& message) {
  try {
    auto received = channel::decode(message); // takes the descriptors, whatever comes next
    const Lock lock(mutex_);
    ++turn_messages_;
    const std::shared_ptr<Peer> peer = find_peer(tag);
    if (peer == nullptr || peer->lost) return;
    if (!received) {
      lose(peer, std::move(received.error()));
      return;
    }
    if (!received->rest.empty() && (!peer->takes_bundles || peer->phase != Peer::Phase::Ready)) {
      lose(peer, Error{GPULOAN_ERR_PROTOCOL, "several records in one message, in the handshake or without the feature"});
      return;
    }
    if (!received->rest.empty()) ++turn_messages_;
    const Bundling answers(*this, *peer);
    for (;;) {
      auto done = peer->phase == Peer::Phase::Ready ? handle(peer, *received) : shake(peer, *received);
      if (!done) lose(peer, std::move(done.error()));
      if (received->rest.empty() || peer->lost) return;
      received = channel::decode_next(received->rest);
      if (received) continue;
      lose(peer, std::move(received.error()));
      return;
    }
  } catch (const std::bad_alloc&) {
    no_memory_for(tag);
  }
}

void Context::on_closed(std::uint64_t tag, int error) {
  try {
    const Lock lock(mutex_);
    turn_others_ = true;
    const std::shared_ptr<Peer> peer = find_peer(tag);
    if (peer == nullptr || peer->lost) return;
    lose(peer, Error{GPULOAN_ERR_PEER_LOST, error == 0 ? "the peer closed its socket or died" : errno_text("the peer's socket", error)});
  } catch (const std::bad_alloc&) {
    no_memory_for(tag);
  }
}

void Context::on_readable(std::uint64_t tag) {
  const Lock lock(mutex_);
  turn_others_ = true;
  if (tag == kListenerTag) {
    on_listener();
    return;
  }
  const std::shared_ptr<Peer> peer = find_peer(tag);
  if (peer == nullptr) return;
  on_peer_dead(peer);
  // What it sent before it died still counts, and the end of its socket comes after that. A socket that a grandchild keeps
  // open never ends, so the peer is lost here at the latest.
  if (!peer->lost) {
    post([this, peer] {
      if (peer->in_loop) static_cast<void>(engine_->drain(peer->socket.get(), *this));
      const Lock inner(mutex_);
      lose(peer, Error{GPULOAN_ERR_PEER_LOST, "the peer's process is gone"});
    });
  }
  engine_->remove(peer->pidfd.get()); // last: where there was no memory, it fires again
  peer->pidfd_in_loop = false;
  if (peer->taken_out) peers_.erase(peer->tag);
}

// ---- Stats --------------------------------------------------------------------------------------------------------

gpuloan_stats Context::stats() {
  const Lock lock(mutex_);
  gpuloan_stats stats = {};
  stats.size = sizeof stats;
  stats.engine = engine_kind_;
  stats.loans_total = loans_total_;
  stats.loans_failed = loans_failed_;
  stats.copied_bytes = copied_bytes_;
  stats.gpu_waits = gpu_waits_;
  for (const auto& [tag, peer] : peers_) stats.peers += !peer->lost && peer->phase == Peer::Phase::Ready ? 1U : 0U;
  engine_reason_.copy(stats.engine_reason, GPULOAN_TEXT_MAX - 1);
  const std::string driver = gpu_ ? gpu_->driver().describe() : "no driver: host memory only";
  driver.copy(stats.driver_text, GPULOAN_TEXT_MAX - 1);
  fill_stats(stats);
  return stats;
}

gpuloan_peer_info Context::peer_info(const Peer& peer) {
  const Lock lock(mutex_);
  gpuloan_peer_info info = {};
  info.size = sizeof info;
  info.pid = peer.pid;
  info.pidfd = peer.pidfd ? 1 : 0;
  info.lost = peer.lost ? 1 : 0;
  info.protocol = peer.version;
  info.has_device = peer.sees_device ? 1 : 0;
  fill_peer_info(peer, info);
  return info;
}

} // namespace gpuloan::loan
