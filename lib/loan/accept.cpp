// SPDX-License-Identifier: MIT
//
// Who connects to an exporter: HELLO and its checks, WELCOME, the control pages' four steps, the tether. What breaks the protocol is
// refused or dropped; nothing that connects makes the exporter wait, fail or grow without bound.
#include <loan/exporter.hpp>

#include <base/log.hpp>

#include <algorithm>
#include <cstring>
#include <unistd.h>

namespace gpuloan::loan {
namespace {

constexpr std::size_t kHandshakesMax = 256; // at once; more are closed unheard
constexpr std::uint64_t kListenerPauseNs = 100'000'000;

} // namespace

Result<gpuloan_key> Exporter::invite(std::string_view account) {
  const Lock lock(mutex_);
  return keys_.mint(account);
}

Result<void> Exporter::listen(const char* path) {
  const Lock lock(mutex_);
  if (listener_) return fail(GPULOAN_ERR_STATE, "this context listens already, at " + listen_path_);
  auto listener = channel::listen_at(path);
  if (!listener) return forward(std::move(listener.error()));
  listener_ = std::move(listener->socket);
  socket_file_ = std::move(listener->file);
  listen_path_ = path;
  post([this] {
    const Lock inner(mutex_);
    if (!closed_) watch_listener();
  });
  return {};
}

Result<void> Exporter::attach(int fd, std::string_view account) {
  GPULOAN_TRY(channel::check_inherited(fd));
  if (account.size() >= sizeof gpuloan_peer_info{}.account) return fail(GPULOAN_ERR_INVALID, "the account name is longer than 63 bytes");
  const Lock lock(mutex_);
  GPULOAN_TRY(channel::enable_identity(fd));
  auto peer = std::make_shared<ExporterPeer>(shared_from_this());
  peer->needs_key = false;
  peer->account = account;
  peer->socket = UniqueFd::take(fd);
  try {
    adopt_peer(peer);
  } catch (...) {
    static_cast<void>(peer->socket.release()); // the caller's again
    throw;
  }
  return {};
}

void Exporter::adopt_peer(const std::shared_ptr<ExporterPeer>& peer) {
  peer->connected_ns = now_ns();
  remembered_.push_back(peer);
  try {
    static_cast<void>(add_peer(peer));
  } catch (...) {
    remembered_.pop_back();
    throw;
  }
  request_tick();
}

void Exporter::on_listener() {
  const auto shaking = std::count_if(peers_.begin(), peers_.end(), [](const auto& entry) {
    return !entry.second->lost && entry.second->phase != Peer::Phase::Ready;
  });
  std::size_t room = kHandshakesMax - std::min<std::size_t>(kHandshakesMax, static_cast<std::size_t>(shaking));
  while (true) {
    auto socket = channel::accept_one(listener_.get());
    if (!socket) { // out of descriptors, most likely: look away for a while instead of spinning
      GPULOAN_LOG(GPULOAN_LOG_WARNING, "cannot accept a connection: " + socket.error().text);
      engine_->remove(listener_.get());
      listener_back_ns_ = now_ns() + kListenerPauseNs;
      return;
    }
    if (!*socket) return;
    if (room == 0) continue; // closes it
    --room;
    if (!channel::enable_identity(socket->get())) continue;
    auto peer = std::make_shared<ExporterPeer>(shared_from_this());
    peer->socket = std::move(*socket);
    adopt_peer(peer);
  }
}

void Exporter::watch_listener() {
  listener_back_ns_ = 0;
  if (auto added = engine_->add_readable(listener_.get(), kListenerTag); !added) {
    GPULOAN_LOG(GPULOAN_LOG_ERROR, "cannot watch the listening socket: " + added.error().text);
  }
}

void Exporter::refuse(const std::shared_ptr<ExporterPeer>& peer, Error why) {
  channel::Record record = channel::make_record(channel::Type::Refused);
  record.notice.status = why.status;
  send_text(*peer, record, why.text);
  push_event({GPULOAN_EVENT_PEER_REFUSED, why.status, nullptr, nullptr, nullptr, why.text});
  peer->refused = true;
  lose(peer, std::move(why));
}

Result<void> Exporter::shake(const std::shared_ptr<Peer>& base, channel::Received& received) {
  const auto peer = std::static_pointer_cast<ExporterPeer>(base);
  using channel::Type;
  using Phase = Peer::Phase;
  const Type type = received.type();
  if (peer->phase == Phase::Hello) {
    if (type != Type::Hello) {
      refuse(peer, Error{GPULOAN_ERR_PROTOCOL, "the first record was no HELLO"});
    } else if (auto hello = on_hello(peer, received); !hello) {
      refuse(peer, std::move(hello.error()));
    } else {
      welcome(peer);
    }
    return {};
  }
  if (type == Type::Bye) return fail(GPULOAN_ERR_PEER_LOST, "the peer closed the connection");
  if (peer->phase == Phase::Mapped && type == Type::PagesMapped) {
    GPULOAN_TRY(peer->words.seal());
    if (!send(*peer, channel::make_record(Type::PagesSealed))) return {}; // lost, or the loop will see that it is
    peer->phase = Phase::Checked;
    return {};
  }
  if (peer->phase == Phase::Checked && type == Type::PagesChecked) {
    auto fd = peer->tether->for_peer();
    if (!fd) return forward(std::move(fd.error()));
    std::vector<UniqueFd> fds;
    fds.push_back(std::move(*fd));
    if (!send(*peer, channel::make_record(Type::Tether), {}, std::move(fds))) return {};
    peer->phase = Phase::Ready;
    push_event({GPULOAN_EVENT_PEER_READY, GPULOAN_OK, peer, nullptr, nullptr, ""});
    return {};
  }
  return fail(GPULOAN_ERR_PROTOCOL, "a record came out of turn in the handshake");
}

// By UUID: which device each side works on, and whether the importer's driver lets the one reach the other.
void Exporter::match_device(ExporterPeer& peer) {
  const driver::Floors& ours = gpu_->floors();
  const auto is_ours = [&](const channel::DeviceEntry& entry) { return std::memcmp(entry.uuid, ours.uuid.bytes, sizeof entry.uuid) == 0; };
  const auto found = std::find_if(peer.devices.begin(), peer.devices.end(), is_ours);
  peer.sees_device = found != peer.devices.end();
  peer.same_device = found == peer.devices.begin();
  peer.peer_access = peer.sees_device && !peer.same_device && (found->floors & channel::kDevicePeer) != 0;
  peer.apart = "the importer works on another device, " +
               std::string(peer.sees_device ? "which has no peer access to this one: " : "and this one is not visible to it: ") + ours.uuid_text();
}

Result<void> Exporter::on_hello(const std::shared_ptr<ExporterPeer>& peer, channel::Received& received) {
  auto hello = channel::check_hello(received, ::geteuid(), boot_);
  if (!hello) return forward(std::move(hello.error()));
  if (peer->needs_key) {
    if (!hello->has_key) return fail(GPULOAN_ERR_KEY, "a connection to a path needs a key (gpuloan_context_invite)");
    std::memcpy(peer->key, received.record->hello.key, sizeof peer->key); // wiped when it is spent or given back
    auto account = keys_.claim(peer->key);
    if (!account) return forward(std::move(account.error()));
    peer->key_claimed = true;
    peer->account = std::move(*account);
  }
  peer->version = hello->version;
  peer->takes_bundles = (received.record->hello.features & channel::FeatureBundles) != 0;
  peer->devices = std::move(hello->devices);
  peer->floors.has_device = hello->wants_device && !peer->devices.empty();
  if (peer->floors.has_device) {
    peer->floors.floors = peer->devices.front().floors;
    if (gpu_) match_device(*peer);
  }
  peer->pid = received.sender.pid;
  peer->same_process = peer->pid == ::getpid();
  peer->pidfd = channel::peer_pidfd(received.sender);
  channel::disable_identity(peer->socket.get());
  watch_pidfd(*peer);
  return {};
}

void Exporter::welcome(const std::shared_ptr<ExporterPeer>& peer) {
  auto words = gate::Words::create(options_.slots);
  auto fd = words ? UniqueFd::dup(words->fd()) : Result<UniqueFd>(forward(std::move(words.error())));
  auto tether = Tether::create();
  if (!fd || !tether) {
    refuse(peer, std::move(fd ? tether.error() : fd.error()));
    return;
  }
  peer->words = std::move(*words);
  peer->tether = std::make_shared<const Tether>(std::move(*tether));
  peer->account_ref = accounts_.get(peer->account);
  peer->arena = std::make_shared<memory::Arena>(gpu_, peer->account_ref, options_.idle_bytes);
  peer->generations.assign(options_.slots, 0);
  for (std::uint32_t slot = options_.slots; slot > 0; --slot) peer->free_slots.push_back(slot - 1);

  const auto devices = device_entries(1);
  channel::Record record = channel::make_record(channel::Type::Welcome);
  record.welcome.version = peer->version;
  record.welcome.features = peer->takes_bundles ? std::uint32_t{channel::FeatureBundles} : 0;
  record.welcome.device_count = static_cast<std::uint32_t>(devices.size());
  record.welcome.slots = options_.slots;
  if (!send(*peer, record, std::as_bytes(std::span(devices)))) return; // gone before WELCOME: its loss gives the key back
  if (peer->key_claimed) keys_.spend(peer->key);
  peer->key_claimed = false;
  ::explicit_bzero(peer->key, sizeof peer->key);

  record = channel::make_record(channel::Type::Pages);
  record.pages.bytes = peer->words.bytes();
  record.pages.slots = options_.slots;
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(*fd));
  send(*peer, record, {}, std::move(fds));
  peer->phase = Peer::Phase::Mapped;
}

} // namespace gpuloan::loan
