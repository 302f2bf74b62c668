// SPDX-License-Identifier: MIT
//
// Engine contract, second part: callbacks that change the loop under its feet. Nothing reaches the handler after
// remove(), no descriptor that arrived for a removed socket stays open, and a removed descriptor's file is let go of at
// once.
#include "support.hpp"

#include <stdexcept>
#include <sys/eventfd.h>

using namespace gpuloan;
using namespace gpuloan::loop;
using What = Recorder::What;

namespace {

UniqueFd make_eventfd() {
  UniqueFd fd = UniqueFd::take(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  REQUIRE(fd);
  return fd;
}

// True when every copy of the other end's descriptor is closed.
bool peer_sees_end(int peer) {
  char byte = 0;
  return ::recv(peer, &byte, 1, MSG_DONTWAIT) == 0 || errno == ECONNRESET;
}

} // namespace

GPULOAN_ENGINE_CASE("a socket removed by its own message gets no further one") {
  Pair pair = make_pair();
  const UniqueFd sent = make_eventfd();
  f.add_socket(pair.ours, 1);
  for (int i = 0; i < 10; ++i) REQUIRE(send_text(pair.peer.get(), "x", {sent.get()}));
  f.recorder.then = [&](const auto&) { f.remove(pair.ours); };
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });
  drain(*f.engine, f.recorder);
  CHECK(f.recorder.calls.size() == 1);
}

GPULOAN_ENGINE_CASE("a socket removed by another one's message gets none") {
  std::array<Pair, 2> pairs = {make_pair(), make_pair()};
  const UniqueFd sent = make_eventfd();
  for (std::size_t i = 0; i < 2; ++i) {
    f.add_socket(pairs[i].ours, i);
    REQUIRE(send_text(pairs[i].peer.get(), "x", {sent.get()}));
  }
  f.recorder.then = [&](const Recorder::Call& call) { f.remove(pairs.at(1 - call.tag).ours); };
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });
  drain(*f.engine, f.recorder);
  REQUIRE(f.recorder.calls.size() == 1);
  f.remove(pairs.at(f.recorder.calls[0].tag).ours);
}

GPULOAN_ENGINE_CASE("a new socket with the number of a removed one gets only its own messages") {
  Pair old_pair = make_pair();
  const UniqueFd sent = make_eventfd();
  f.add_socket(old_pair.ours, 1);
  for (int i = 0; i < 3; ++i) REQUIRE(send_text(old_pair.peer.get(), "old", {sent.get()}));
  Pair spare = make_pair();
  UniqueFd reused;
  f.recorder.then = [&](const Recorder::Call& call) {
    if (call.tag != 1) return;
    const int number = old_pair.ours.get();
    f.remove(old_pair.ours);
    REQUIRE(::dup3(spare.ours.get(), number, O_CLOEXEC) == number);
    reused = UniqueFd::take(number);
    f.add_socket(reused, 2);
  };
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });
  drain(*f.engine, f.recorder);
  CHECK(f.recorder.calls.size() == 1);
  REQUIRE(send_text(spare.peer.get(), "new"));
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == 2; });
  CHECK(f.recorder.calls[1].tag == 2);
  CHECK(f.recorder.calls[1].text == "new");
  f.remove(reused);
}

// The entry of a receive may still be queued when its descriptor's number gets a new file.
GPULOAN_ENGINE_CASE("a socket that is added and removed before any wait takes nothing from its successor") {
  Pair first = make_pair();
  Pair second = make_pair();
  const int number = first.ours.get();
  f.add_socket(first.ours, 1);
  f.remove(first.ours);
  REQUIRE(::dup3(second.ours.get(), number, O_CLOEXEC) == number);
  UniqueFd reused = UniqueFd::take(number);
  REQUIRE(send_text(second.peer.get(), "kept"));
  drain(*f.engine, f.recorder);
  CHECK(f.recorder.calls.empty());
  char text[8] = {};
  CHECK(::recv(reused.get(), text, sizeof(text), MSG_DONTWAIT) == 4);
}

GPULOAN_ENGINE_CASE("remove lets go of the file at once") {
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  drain(*f.engine, f.recorder);
  REQUIRE(f.engine->want_writable(pair.ours.get()).has_value());
  f.remove(pair.ours);
  CHECK(peer_sees_end(pair.peer.get()));
}

GPULOAN_ENGINE_CASE("sockets added inside a callback work") {
  Pair first = make_pair();
  Pair second = make_pair();
  f.add_socket(first.ours, 1);
  REQUIRE(send_text(first.peer.get(), "first"));
  REQUIRE(send_text(second.peer.get(), "second"));
  f.recorder.then = [&](const Recorder::Call& call) {
    if (call.tag == 1) f.add_socket(second.ours, 2);
  };
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == 2; });
  CHECK(f.recorder.calls[1].tag == 2);
  CHECK(f.recorder.calls[1].text == "second");
  f.remove(first.ours);
  f.remove(second.ours);
}

GPULOAN_ENGINE_CASE("removal inside on_closed, on_readable and on_writable") {
  Pair closing = make_pair();
  Pair writable = make_pair();
  UniqueFd readable = make_eventfd();
  f.add_socket(closing.ours, 1);
  f.add_socket(writable.ours, 2);
  f.add_readable(readable, 3);
  closing.peer.reset();
  REQUIRE(f.engine->want_writable(writable.ours.get()).has_value());
  REQUIRE(::eventfd_write(readable.get(), 1) == 0);
  f.recorder.then = [&](const Recorder::Call& call) {
    UniqueFd* const fds[] = {&closing.ours, &writable.ours, &readable};
    f.remove(*fds[call.tag - 1]);
  };
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == 3; });
  drain(*f.engine, f.recorder);
  CHECK(f.recorder.count(What::Closed, 1) == 1);
  CHECK(f.recorder.count(What::Writable, 2) == 1);
  CHECK(f.recorder.count(What::Readable, 3) == 1);
  CHECK(f.recorder.calls.size() == 3);
}

GPULOAN_ENGINE_CASE("a closed socket stays silent until it is removed, and can then be added anew") {
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  REQUIRE(send_text(pair.peer.get(), "")); // ends it although the peer lives
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });
  REQUIRE(send_text(pair.peer.get(), "unheard"));
  drain(*f.engine, f.recorder);
  CHECK(f.recorder.calls.size() == 1);
  CHECK(f.engine->want_writable(pair.ours.get()).error().status == GPULOAN_ERR_INVALID);
  CHECK(f.engine->add_socket(pair.ours.get(), 2).error().status == GPULOAN_ERR_INVALID);
  f.engine->remove(pair.ours.get());
  f.add_socket(pair.ours, 2);
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == 2; });
  CHECK(f.recorder.calls[1].text == "unheard");
  CHECK(f.recorder.calls[1].tag == 2);
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("a handler that throws loses no descriptor") {
  Pair pair = make_pair();
  const UniqueFd sent = make_eventfd();
  f.add_socket(pair.ours, 1);
  for (int i = 0; i < 10; ++i) REQUIRE(send_text(pair.peer.get(), "x", {sent.get()}));
  f.recorder.then = [](const auto&) { throw std::runtime_error("handler"); };
  CHECK_THROWS_AS(static_cast<void>(f.engine->wait(kPatience, f.recorder)), std::runtime_error);
  CHECK(f.recorder.calls.size() == 1);
  f.engine.reset(); // with messages that it had taken and not handed out
}

GPULOAN_ENGINE_CASE("the engine may go while sockets with messages are in it") {
  std::array<Pair, 3> pairs = {make_pair(), make_pair(), make_pair()};
  const UniqueFd sent = make_eventfd();
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    f.add_socket(pairs[i].ours, i);
    for (int n = 0; n < 5; ++n) REQUIRE(send_text(pairs[i].peer.get(), "x", {sent.get()}));
  }
  f.engine.reset();
  for (Pair& pair : pairs) pair.ours.reset();
  for (const Pair& pair : pairs) CHECK(peer_sees_end(pair.peer.get()));
}

GPULOAN_ENGINE_CASE("wrong use is an error and changes nothing") {
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  CHECK(f.engine->add_socket(pair.ours.get(), 2).error().status == GPULOAN_ERR_INVALID);
  CHECK(f.engine->add_readable(pair.ours.get(), 2).error().status == GPULOAN_ERR_INVALID);
  CHECK(f.engine->want_writable(pair.peer.get()).error().status == GPULOAN_ERR_INVALID);
  const UniqueFd readable = make_eventfd();
  f.add_readable(readable, 3);
  CHECK(f.engine->want_writable(readable.get()).error().status == GPULOAN_ERR_INVALID);
  CHECK(f.engine->add_socket(-1, 4).error().status == GPULOAN_ERR_SYSTEM);
  f.engine->remove(pair.peer.get()); // never added
  f.engine->remove(-1);
  REQUIRE(send_text(pair.peer.get(), "x"));
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });
  CHECK(f.recorder.calls[0].tag == 1);
  f.engine->remove(readable.get());
  f.remove(pair.ours);
}
