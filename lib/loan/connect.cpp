// SPDX-License-Identifier: MIT
//
// The importer's connection: HELLO to PAGES_CHECKED.
#include <loan/importer.hpp>

#include <algorithm>
#include <cstring>
#include <unistd.h>

namespace gpuloan::loan {
namespace {

constexpr std::size_t kDevicesMax = 64; // of a HELLO

} // namespace

Result<std::shared_ptr<ImporterPeer>> Importer::connect(const char* path, const gpuloan_key* key, std::uint32_t timeout_ms) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  auto socket = channel::connect_to(path, deadline.at_ns());
  if (!socket) return forward(std::move(socket.error()));
  return handshake(std::move(*socket), key, deadline);
}

Result<std::shared_ptr<ImporterPeer>> Importer::adopt(int fd, std::uint32_t timeout_ms) {
  auto usable = channel::check_inherited(fd);
  if (!usable && usable.error().status == GPULOAN_ERR_INVALID) return forward(std::move(usable.error()));
  UniqueFd taken = UniqueFd::take(fd); // ours from here on, also where we have no use for it
  if (!usable) return forward(std::move(usable.error()));
  return handshake(std::move(taken), nullptr, Deadline::after_ms(timeout_ms));
}

Result<std::shared_ptr<ImporterPeer>> Importer::handshake(UniqueFd socket, const gpuloan_key* key, const Deadline& deadline) {
  auto peer = std::make_shared<ImporterPeer>(shared_from_this());
  channel::Record hello = channel::make_record(channel::Type::Hello);
  hello.hello.version_min = channel::kVersionMin;
  hello.hello.version_max = channel::kVersionMax;
  hello.hello.features = channel::FeatureBundles;
  std::memcpy(hello.hello.boot_id, boot_.data(), boot_.size());
  if (key != nullptr) {
    hello.hello.has_key = 1;
    std::memcpy(hello.hello.key, key->bytes, sizeof hello.hello.key);
  }
  const auto devices = device_entries(kDevicesMax);
  hello.hello.device_count = static_cast<std::uint32_t>(devices.size());
  hello.hello.wants_device = gpu_ ? 1 : 0;
  GPULOAN_TRY(channel::enable_identity(socket.get()));
  Lock lock(mutex_);
  if (closed_) return fail(GPULOAN_ERR_PEER_LOST, "the context is closed");
  peer->socket = std::move(socket);
  remembered_.push_back(peer);
  peer->phase = Peer::Phase::Welcome;
  try {
    GPULOAN_TRY(add_peer(peer));
  } catch (...) { // nobody else knows of it: its socket is closed with it
    std::erase(remembered_, peer);
    throw;
  }
  send(*peer, hello, std::as_bytes(std::span(devices)));
  const bool over = wait(lock, deadline, false, [&] { return peer->lost || peer->phase == Peer::Phase::Ready; });
  if (over && !peer->lost) return peer;
  ::explicit_bzero(&hello, sizeof hello);
  Error why = peer->lost ? peer->loss : Error{GPULOAN_ERR_TIMEOUT, "the exporter did not complete the handshake in time"};
  lose(peer, why);
  forget_peer(*peer); // it may have been ready for a moment: no event names what nobody was given
  const auto loans = forget_loans(*peer);
  lock.unlock();
  return forward(std::move(why));
}

Result<void> Importer::shake(const std::shared_ptr<Peer>& base, channel::Received& received) {
  auto& peer = static_cast<ImporterPeer&>(*base);
  using channel::Type;
  using Phase = Peer::Phase;
  const Type type = received.type();
  if (peer.phase == Phase::Welcome) {
    auto welcome = channel::check_welcome(received);
    if (!welcome) return forward(std::move(welcome.error()));
    peer.version = welcome->version;
    peer.takes_bundles = (received.record->welcome.features & channel::FeatureBundles) != 0;
    peer.devices = std::move(welcome->devices);
    peer.floors.has_device = !peer.devices.empty();
    if (peer.floors.has_device) peer.floors.floors = peer.devices.front().floors;
    if (peer.floors.has_device && gpu_) {
      const auto is_theirs = [&](const cuda::Uuid& uuid) { return std::memcmp(peer.devices.front().uuid, uuid.bytes, sizeof uuid.bytes) == 0; };
      const auto& others = gpu_->floors().neighbours;
      peer.sees_device = is_theirs(gpu_->floors().uuid) || std::any_of(others.begin(), others.end(), [&](const auto& other) { return is_theirs(other.uuid); });
    }
    if (received.sender.known && received.sender.uid != ::geteuid()) {
      return fail(GPULOAN_ERR_UID, "the exporter runs as user " + std::to_string(received.sender.uid) + ", this process as user " + std::to_string(::geteuid()));
    }
    // Who speaks, not who made the socket: a pair's maker is not always who holds its other end.
    peer.pidfd = channel::peer_pidfd(received.sender);
    peer.pid = received.sender.pid;
    channel::disable_identity(peer.socket.get());
    watch_pidfd(peer);
    peer.phase = Phase::Mapped;
    return {};
  }
  if (peer.phase == Phase::Mapped && type == Type::Pages) {
    const channel::Pages& pages = received.record->pages;
    auto words = gate::Words::adopt(received.fds.take(0), pages.bytes, pages.slots);
    if (!words) return forward(std::move(words.error()));
    peer.words = std::move(*words);
    send(peer, channel::make_record(Type::PagesMapped));
    peer.phase = Phase::Sealed;
    return {};
  }
  if (peer.phase == Phase::Sealed && type == Type::PagesSealed) {
    GPULOAN_TRY(peer.words.check_seal());
    send(peer, channel::make_record(Type::PagesChecked));
    peer.phase = Phase::Ready;
    notify();
    return {};
  }
  if (type == Type::Refused) return forward(channel::refusal(received));
  return fail(GPULOAN_ERR_PROTOCOL, "a record came out of turn in the handshake");
}

} // namespace gpuloan::loan
