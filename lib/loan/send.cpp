// SPDX-License-Identifier: MIT
//
// Context: records on their way out. Straight into the socket; where that is full, into the outbox, in order; in one message what is bundled.
#include <loan/context.hpp>
#include <loan/loan.hpp>

#include <new>
#include <sys/socket.h>

namespace gpuloan::loan {
namespace {

// Where the other end lives, a gap in what it is told would go unnoticed. The loop sees the end of the socket, after what the peer still
// sent.
void cut(const Peer& peer) noexcept { ::shutdown(peer.socket.get(), SHUT_RDWR); }

// Whether it was sent; nothing where the socket is full.
std::optional<bool> settle(const Peer& peer, channel::SendResult result) noexcept {
  if (result == channel::SendResult::Full) return std::nullopt;
  if (result == channel::SendResult::Lost) cut(peer);
  return result == channel::SendResult::Sent;
}

std::optional<bool> send_message(const Peer& peer, std::span<const std::byte> message, const std::vector<UniqueFd>& fds) {
  std::vector<int> raw;
  for (const UniqueFd& fd : fds) raw.push_back(fd.get());
  return settle(peer, channel::send_message(peer.socket.get(), message, raw));
}

} // namespace

bool Context::send(Peer& peer, channel::Record record, std::span<const std::byte> tail, std::vector<UniqueFd> fds) try {
  if (peer.lost) return false;
  if (peer.version != 0) channel::set_version(record, peer.version);
  if (bundled_ == &peer) {
    if (fds.empty() && bundle_.add(record, tail)) return true;
    send_bundle();
    if (fds.empty() && bundle_.add(record, tail)) return true;
    if (peer.lost) return false;
  }
  if (peer.outbox.empty() && fds.empty()) { // without a copy
    if (const auto sent = settle(peer, channel::send_record(peer.socket.get(), record, tail))) return *sent;
  }
  const std::size_t count = fds.size();
  return send_now(peer, channel::message_of(record, tail, count), std::move(fds));
} catch (const std::bad_alloc&) { // a record that is not sent may be waited for
  lose(peer.shared_from_this(), out_of_memory());
  return false;
}

bool Context::send_now(Peer& peer, std::span<const std::byte> message, std::vector<UniqueFd> fds) {
  if (peer.outbox.empty()) {
    if (const auto sent = send_message(peer, message, fds)) return *sent;
  }
  const auto it = peers_.find(peer.tag);
  if (it == peers_.end()) return false;
  if (peer.outbox.size() >= Peer::kOutboxMax) {
    lose(it->second, Error{GPULOAN_ERR_PROTOCOL, "the peer does not read: " + std::to_string(Peer::kOutboxMax) + " messages wait for it"});
    return false;
  }
  peer.outbox.push_back({{message.begin(), message.end()}, std::move(fds)});
  if (peer.outbox.size() == 1) {
    post([this, self = it->second] {
      const Lock lock(mutex_);
      if (self->in_loop) static_cast<void>(engine_->want_writable(self->socket.get()));
    });
  }
  return true;
}

void Context::send_bundle() {
  if (bundle_.bytes().empty()) return;
  if (!bundled_->lost) send_now(*bundled_, bundle_.bytes(), {});
  bundle_.clear();
}

void Context::end_bundle() noexcept {
  try {
    if (bundled_ != nullptr) send_bundle();
  } catch (const std::bad_alloc&) {
    bundle_.clear();
    if (!bundled_->lost) cut(*bundled_);
  }
  bundled_ = nullptr;
}

void Context::send_text(Peer& peer, channel::Record record, std::string_view text) {
  text = text.substr(0, GPULOAN_TEXT_MAX - 1);
  send(peer, record, std::as_bytes(std::span(text.data(), text.size())));
}

void Context::send_turn(const Loan& loan, channel::Type type, std::uint64_t at_ns) {
  channel::Record record = channel::make_record(type);
  record.turn.loan = loan.id;
  record.turn.slot = loan.slot;
  record.turn.generation = loan.generation;
  record.turn.turn = loan.turn;
  record.turn.at_ns = at_ns;
  send(*loan.peer, record);
}

void Context::flush(const std::shared_ptr<Peer>& peer) {
  while (!peer->outbox.empty()) {
    Outgoing& first = peer->outbox.front();
    if (!send_message(*peer, first.message, first.fds)) {
      // With descriptors it may be the user's limit of descriptors in flight: the socket would be writable all along.
      if (first.fds.empty()) static_cast<void>(engine_->want_writable(peer->socket.get()));
      else any_stalled_ = peer->stalled = true;
      return;
    }
    peer->outbox.pop_front();
  }
}

void Context::on_writable(std::uint64_t tag) {
  try {
    const Lock lock(mutex_);
    turn_others_ = true;
    if (const std::shared_ptr<Peer> peer = find_peer(tag); peer != nullptr && !peer->lost) flush(peer);
  } catch (const std::bad_alloc&) {
    no_memory_for(tag);
  }
}

} // namespace gpuloan::loan
