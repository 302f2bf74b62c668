// SPDX-License-Identifier: MIT
//
// Records over real sockets: sending, full and lost sockets, who the sender is, what an inherited descriptor must be.
#include "support.hpp"

#include <channel/handshake.hpp>

#include <csignal>
#include <sys/resource.h>
#include <sys/wait.h>

using namespace gpuloan;
using namespace gpuloan::channel;

namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

} // namespace

TEST_CASE("a record, its tail and its descriptor arrive") {
  const DescriptorGuard guard;
  const Pair pair = make_pair();
  const UniqueFd event = make_eventfd();

  Record request = make_record(Type::Request);
  request.request.request = 42;
  CHECK(send_record(pair.peer.get(), request, bytes_of("metadata")) == SendResult::Sent);
  Letter first;
  receive(pair.ours.get(), first);
  auto received = decode(first.message());
  REQUIRE(received.has_value());
  CHECK(received->type() == Type::Request);
  CHECK(received->record->request.request == 42);
  CHECK(received->tail_text() == "metadata");

  const int fds[] = {event.get()};
  CHECK(send_record(pair.peer.get(), make_record(Type::Chunk), {}, fds) == SendResult::Sent);
  Letter second;
  receive(pair.ours.get(), second);
  auto chunk = decode(second.message());
  REQUIRE(chunk.has_value());
  REQUIRE(chunk->fds.size() == 1);
  const UniqueFd arrived = chunk->fds.take(0);
  CHECK(has_flags(arrived.get(), FD_CLOEXEC, 0));
  REQUIRE(::eventfd_write(event.get(), 1) == 0);
  eventfd_t value = 0;
  CHECK(::eventfd_read(arrived.get(), &value) == 0); // the same eventfd
}

TEST_CASE("the longest tail is sent whole") {
  const DescriptorGuard guard;
  const Pair pair = make_pair();
  const std::string tail(kTailMax, 't');
  CHECK(send_record(pair.peer.get(), make_record(Type::Export), bytes_of(tail)) == SendResult::Sent);
  Letter letter;
  receive(pair.ours.get(), letter);
  const auto received = decode(letter.message());
  REQUIRE(received.has_value());
  CHECK(received->tail_text() == tail);
}

TEST_CASE("a full socket says Full and takes records again when it was read") {
  const DescriptorGuard guard;
  const Pair pair = make_pair();
  std::size_t sent = 0;
  SendResult result = SendResult::Sent;
  while ((result = send_record(pair.peer.get(), make_record(Type::Done))) == SendResult::Sent) ++sent;
  CHECK(result == SendResult::Full);
  CHECK(sent >= 128); // the window that KERNEL-FACTS 5 promises without touching buffers
  for (std::size_t i = 0; i < sent; ++i) {
    Letter letter;
    receive(pair.ours.get(), letter);
  }
  CHECK(send_record(pair.peer.get(), make_record(Type::Done)) == SendResult::Sent);
}

TEST_CASE("a socket whose other end is gone says Lost, without SIGPIPE") {
  const DescriptorGuard guard;
  Pair pair = make_pair();
  REQUIRE(send_record(pair.ours.get(), make_record(Type::Done)) == SendResult::Sent); // unread: ECONNRESET, then EPIPE
  pair.ours.reset();
  CHECK(send_record(pair.peer.get(), make_record(Type::Done)) == SendResult::Lost);
  CHECK(send_record(pair.peer.get(), make_record(Type::Done)) == SendResult::Lost);
  CHECK(send_record(-1, make_record(Type::Done)) == SendResult::Lost);
}

TEST_CASE("the sender is the process that speaks, not the one that made the socket") {
  const DescriptorGuard guard;
  Pair pair = make_pair();
  REQUIRE(enable_identity(pair.ours.get()).has_value());
  const pid_t child = ::fork();
  if (child == 0) {
    const bool sent = send_record(pair.peer.get(), make_record(Type::Done)) == SendResult::Sent;
    ::_exit(sent ? 0 : 1);
  }
  REQUIRE(child > 0);
  pollfd ready = {pair.ours.get(), POLLIN, 0};
  REQUIRE(::poll(&ready, 1, 20'000) == 1);
  Letter letter;
  receive(pair.ours.get(), letter);
  auto received = decode(letter.message());
  REQUIRE(received.has_value());
  CHECK(received->sender.known);
  CHECK(received->sender.pid == child);
  CHECK(received->sender.uid == ::getuid());
  const UniqueFd pidfd = peer_pidfd(received->sender);
  REQUIRE(pidfd);
  CHECK(has_flags(pidfd.get(), FD_CLOEXEC, 0));
  pollfd dead = {pidfd.get(), POLLIN, 0};
  CHECK(::poll(&dead, 1, 20'000) == 1);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

// A worker that was given one end says HELLO before the exporter has looked at the other.
TEST_CASE("a HELLO names its sender although nobody had asked for it yet") {
  const DescriptorGuard guard;
  const Pair pair = make_pair();
  REQUIRE(send_record(pair.peer.get(), make_record(Type::Hello)) == SendResult::Sent);
  REQUIRE(enable_identity(pair.ours.get()).has_value());
  Letter letter;
  receive(pair.ours.get(), letter);
  const auto received = decode(letter.message());
  REQUIRE(received.has_value());
  CHECK(received->sender.known);
  CHECK(received->sender.pid == ::getpid());
  CHECK(received->sender.uid == ::getuid());
}

TEST_CASE("without enable_identity the sender is unknown") {
  const DescriptorGuard guard;
  const Pair pair = make_pair();
  REQUIRE(send_record(pair.peer.get(), make_record(Type::Done)) == SendResult::Sent);
  Letter letter;
  receive(pair.ours.get(), letter);
  auto received = decode(letter.message());
  REQUIRE(received.has_value());
  CHECK_FALSE(received->sender.known);
  CHECK_FALSE(peer_pidfd(received->sender));
}

TEST_CASE("peer_pidfd: the message's own, else by number, else none") {
  const DescriptorGuard guard;
  Sender own{true, 1, 0, make_eventfd()};
  const int number = own.pidfd.get();
  CHECK(peer_pidfd(own).get() == number);
  Sender by_number{true, ::getpid(), 0, {}};
  CHECK(peer_pidfd(by_number));
  Sender elsewhere{true, 0, 0, {}}; // another PID namespace
  CHECK_FALSE(peer_pidfd(elsewhere));
  Sender gone{true, 0x7FFF'FFFF, 0, {}};
  CHECK_FALSE(peer_pidfd(gone));
}

// D1
TEST_CASE("descriptors lost at RLIMIT_NOFILE are a typed error") {
  const DescriptorGuard guard;
  const Pair pair = make_pair();
  const UniqueFd event = make_eventfd();
  const int fds[] = {event.get()};
  REQUIRE(send_record(pair.peer.get(), make_record(Type::Chunk), {}, fds) == SendResult::Sent);
  rlimit before = {};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none = {3, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  Letter letter;
  receive(pair.ours.get(), letter);
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  check_fails(decode(letter.message()), GPULOAN_ERR_FD_LIMIT, "MSG_CTRUNC");
}

TEST_CASE("check_inherited: a connected seqpacket socket, made close-on-exec and non-blocking") {
  const DescriptorGuard guard;
  int ends[2] = {-1, -1};
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
  const UniqueFd ours = UniqueFd::take(ends[0]);
  UniqueFd peer = UniqueFd::take(ends[1]);
  CHECK(check_inherited(ours.get()).has_value());
  CHECK(has_flags(ours.get(), FD_CLOEXEC, O_NONBLOCK));
  peer.reset();
  CHECK(check_inherited(ours.get()).has_value()); // a dead peer is for the loop to find
}

TEST_CASE("check_inherited: anything else is INVALID and says what it is not") {
  const DescriptorGuard guard;
  check_fails(check_inherited(-1), GPULOAN_ERR_INVALID, "descriptor -1 is not open");
  const UniqueFd event = make_eventfd();
  check_fails(check_inherited(event.get()), GPULOAN_ERR_INVALID, "no AF_UNIX SOCK_SEQPACKET");
  for (const int type : {SOCK_STREAM, SOCK_DGRAM}) {
    const Pair pair = make_pair(type);
    check_fails(check_inherited(pair.ours.get()), GPULOAN_ERR_INVALID, "no AF_UNIX SOCK_SEQPACKET");
  }
  const UniqueFd alone = UniqueFd::take(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  check_fails(check_inherited(alone.get()), GPULOAN_ERR_INVALID, "not connected");
  const UniqueFd inet = UniqueFd::take(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  check_fails(check_inherited(inet.get()), GPULOAN_ERR_INVALID, "no AF_UNIX SOCK_SEQPACKET");
}
