// SPDX-License-Identifier: MIT
//
// Engine contract, first part: what arrives. Messages, descriptors, loss that is visible, the end of a peer.
#include "support.hpp"

#include <sys/eventfd.h>
#include <sys/resource.h>

using namespace gpuloan;
using namespace gpuloan::loop;
using What = Recorder::What;

namespace {

UniqueFd make_eventfd() {
  UniqueFd fd = UniqueFd::take(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  REQUIRE(fd);
  return fd;
}

bool close_on_exec(int fd) {
  const int flags = ::fcntl(fd, F_GETFD);
  return flags >= 0 && (flags & FD_CLOEXEC) != 0;
}

// Lowers RLIMIT_NOFILE so that exactly `room` more descriptors fit below it; restores it at the end.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t room) {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    rlim_t limit = 0;
    for (rlim_t free = 0; free < room; ++limit) free += ::fcntl(static_cast<int>(limit), F_GETFD) < 0 ? 1U : 0U;
    const rlimit lower = {limit, before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &lower) == 0);
  }
  ~DescriptorLimit() { CHECK(::setrlimit(RLIMIT_NOFILE, &before_) == 0); }

 private:
  rlimit before_ = {};
};

} // namespace

GPULOAN_ENGINE_CASE("a message arrives with its tag, its bytes and its descriptor") {
  Pair pair = make_pair();
  const UniqueFd sent = make_eventfd();
  f.add_socket(pair.ours, 7);
  REQUIRE(send_text(pair.peer.get(), "hello", {sent.get()}));
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });

  const Recorder::Call& call = f.recorder.calls.at(0);
  CHECK(call.what == What::Message);
  CHECK(call.tag == 7);
  CHECK(call.text == "hello");
  CHECK((call.number & (MSG_TRUNC | MSG_CTRUNC)) == 0);
  REQUIRE(call.fds.size() == 1);
  CHECK(close_on_exec(call.fds[0].get()));
  REQUIRE(::eventfd_write(sent.get(), 1) == 0);
  CHECK(is_readable(call.fds[0].get())); // the same eventfd
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("64 descriptors arrive with one message, all close-on-exec") {
  Pair pair = make_pair();
  const UniqueFd sent = make_eventfd();
  f.add_socket(pair.ours, 1);
  REQUIRE(send_text(pair.peer.get(), "many", std::vector<int>(64, sent.get())));
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });
  REQUIRE(f.recorder.calls[0].fds.size() == 64);
  CHECK((f.recorder.calls[0].number & MSG_CTRUNC) == 0);
  for (const UniqueFd& fd : f.recorder.calls[0].fds) CHECK(close_on_exec(fd.get()));
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("more descriptors than there is room for set MSG_CTRUNC") {
  Pair pair = make_pair();
  const UniqueFd sent = make_eventfd();
  f.add_socket(pair.ours, 1);
  REQUIRE(send_text(pair.peer.get(), "too many", std::vector<int>(253, sent.get())));
  REQUIRE(send_text(pair.peer.get(), "next"));
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == 2; });
  CHECK((f.recorder.calls[0].number & MSG_CTRUNC) != 0);
  CHECK(f.recorder.calls[0].fds.size() < 253);
  CHECK(f.recorder.calls[1].text == "next");
  CHECK((f.recorder.calls[1].number & MSG_CTRUNC) == 0);
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("at RLIMIT_NOFILE the message arrives, the loss shows, and the socket goes on") {
  Pair pair = make_pair();
  const UniqueFd sent = make_eventfd();
  f.add_socket(pair.ours, 1);
  const auto run_until_count = [&](std::size_t count) {
    run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == count; });
  };
  // The same calls once before: UBSan needs descriptors of its own when it first sees a class's virtual call.
  REQUIRE(send_text(pair.peer.get(), "first"));
  run_until_count(1);
  REQUIRE(send_text(pair.peer.get(), "five", std::vector<int>(5, sent.get())));
  {
    const DescriptorLimit limit(2);
    run_until_count(2);
  }
  CHECK((f.recorder.calls[1].number & MSG_CTRUNC) != 0);
  CHECK(f.recorder.calls[1].text == "five");
  CHECK(f.recorder.calls[1].fds.size() == 2);

  REQUIRE(send_text(pair.peer.get(), "again", {sent.get()}));
  run_until_count(3);
  CHECK(f.recorder.calls[2].fds.size() == 1);
  CHECK((f.recorder.calls[2].number & MSG_CTRUNC) == 0);
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("the longest record fits and a longer one sets MSG_TRUNC") {
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  REQUIRE(send_text(pair.peer.get(), std::string(kDataBytes, 'a')));
  REQUIRE(send_text(pair.peer.get(), std::string(kDataBytes + 1, 'b')));
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == 2; });
  CHECK(f.recorder.calls[0].text == std::string(kDataBytes, 'a'));
  CHECK((f.recorder.calls[0].number & MSG_TRUNC) == 0);
  CHECK((f.recorder.calls[1].number & MSG_TRUNC) != 0);
  CHECK(f.recorder.calls[1].text.size() <= kDataBytes);
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("data lies on a 16 byte boundary") {
  struct Aligned final : Handler {
    std::size_t seen = 0;
    void on_message(std::uint64_t, const Message& message) override {
      CHECK(reinterpret_cast<std::uintptr_t>(message.data.data()) % 16 == 0);
      ++seen;
    }
    void on_closed(std::uint64_t, int) override {}
    void on_readable(std::uint64_t) override {}
    void on_writable(std::uint64_t) override {}
  } aligned;
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  for (int i = 0; i < 20; ++i) REQUIRE(send_text(pair.peer.get(), "x"));
  run_until(*f.engine, aligned, [&] { return aligned.seen == 20; });
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("a peer that closes is reported once, after its messages") {
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  REQUIRE(send_text(pair.peer.get(), "last words"));
  pair.peer.reset();
  run_until(*f.engine, f.recorder, [&] { return f.recorder.count(What::Closed, 1) != 0; });
  drain(*f.engine, f.recorder);
  REQUIRE(f.recorder.calls.size() == 2);
  CHECK(f.recorder.calls[0].text == "last words");
  CHECK(f.recorder.calls[1].number == 0);
  f.remove(pair.ours);
}

// Unread data at its death makes the first receive say ECONNRESET, ahead of what it had sent (KERNEL-FACTS 4).
GPULOAN_ENGINE_CASE("a dead peer's last records come before its end, also behind ECONNRESET") {
  Pair pair = make_pair();
  REQUIRE(send_text(pair.ours.get(), "never read"));
  for (const char* text : {"one", "two", "three"}) REQUIRE(send_text(pair.peer.get(), text));
  pair.peer.reset();
  f.add_socket(pair.ours, 1);
  run_until(*f.engine, f.recorder, [&] { return f.recorder.count(What::Closed, 1) != 0; });
  drain(*f.engine, f.recorder);
  REQUIRE(f.recorder.calls.size() == 4);
  CHECK(f.recorder.calls[0].text == "one");
  CHECK(f.recorder.calls[1].text == "two");
  CHECK(f.recorder.calls[2].text == "three");
  CHECK(f.recorder.calls[3].what == What::Closed);
  CHECK(f.recorder.calls[3].number == 0);
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("ECONNRESET on a socket that is already armed is no end either") {
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  drain(*f.engine, f.recorder);
  REQUIRE(send_text(pair.ours.get(), "never read"));
  REQUIRE(send_text(pair.peer.get(), "one"));
  REQUIRE(send_text(pair.peer.get(), "two"));
  pair.peer.reset();
  run_until(*f.engine, f.recorder, [&] { return f.recorder.count(What::Closed, 1) != 0; });
  CHECK(f.recorder.count(What::Message, 1) == 2);
  CHECK(f.recorder.calls.back().number == 0);
  f.remove(pair.ours);
}

// What a dead process sent has to be seen before its memory is dealt with, however busy the loop is (KERNEL-FACTS 4).
GPULOAN_ENGINE_CASE("drain delivers all that is queued, and the end") {
  constexpr std::size_t kQueued = 150;
  Pair pair = make_pair();
  const UniqueFd sent = make_eventfd();
  f.add_socket(pair.ours, 1);
  drain(*f.engine, f.recorder);
  REQUIRE(send_text(pair.ours.get(), "never read")); // ECONNRESET comes first
  for (std::size_t n = 0; n < kQueued; ++n) REQUIRE(send_text(pair.peer.get(), std::to_string(n), {sent.get()}));
  pair.peer.reset();
  REQUIRE(f.engine->drain(pair.ours.get(), f.recorder).has_value());
  REQUIRE(f.recorder.calls.size() == kQueued + 1);
  for (std::size_t n = 0; n < kQueued; ++n) {
    CHECK(f.recorder.calls[n].text == std::to_string(n));
    CHECK(f.recorder.calls[n].fds.size() == 1);
  }
  CHECK(f.recorder.calls.back().what == What::Closed);
  REQUIRE(f.engine->drain(pair.ours.get(), f.recorder).has_value());
  drain(*f.engine, f.recorder);
  CHECK(f.recorder.calls.size() == kQueued + 1);
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("drain of a socket that someone keeps open ends, and the socket goes on") {
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  REQUIRE(send_text(pair.peer.get(), "one"));
  REQUIRE(f.engine->drain(pair.ours.get(), f.recorder).has_value());
  CHECK(f.recorder.calls.size() == 1);
  REQUIRE(f.engine->drain(pair.ours.get(), f.recorder).has_value());
  CHECK(f.recorder.calls.size() == 1);
  REQUIRE(send_text(pair.peer.get(), "two"));
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == 2; });
  CHECK(f.recorder.calls[1].text == "two");
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("a socket may be removed while it is drained") {
  Pair pair = make_pair();
  const UniqueFd sent = make_eventfd();
  f.add_socket(pair.ours, 1);
  for (int n = 0; n < 40; ++n) REQUIRE(send_text(pair.peer.get(), "x", {sent.get()}));
  const int number = pair.ours.get();
  f.recorder.then = [&](const auto&) {
    if (f.recorder.calls.size() == 20) f.remove(pair.ours);
  };
  REQUIRE(f.engine->drain(number, f.recorder).has_value());
  CHECK(f.recorder.calls.size() == 20);
  CHECK(f.engine->drain(number, f.recorder).error().status == GPULOAN_ERR_INVALID);
}

GPULOAN_ENGINE_CASE("one look is enough for what is behind an ECONNRESET") {
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  drain(*f.engine, f.recorder);
  REQUIRE(send_text(pair.ours.get(), "never read"));
  REQUIRE(send_text(pair.peer.get(), "last words"));
  pair.peer.reset();
  REQUIRE(f.engine->wait(0, f.recorder).has_value());
  REQUIRE(f.recorder.calls.size() >= 1);
  CHECK(f.recorder.calls[0].text == "last words");
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("an empty record ends the connection and its descriptors are closed") {
  Pair pair = make_pair();
  const UniqueFd sent = make_eventfd();
  f.add_socket(pair.ours, 1);
  REQUIRE(send_text(pair.peer.get(), "before"));
  REQUIRE(send_text(pair.peer.get(), "", {sent.get(), sent.get()}));
  REQUIRE(send_text(pair.peer.get(), "behind", {sent.get()}));
  run_until(*f.engine, f.recorder, [&] { return f.recorder.count(What::Closed, 1) != 0; });
  drain(*f.engine, f.recorder);
  REQUIRE(f.recorder.calls.size() == 2);
  CHECK(f.recorder.calls[0].text == "before");
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("something that is no socket is closed with its errno") {
  const UniqueFd no_socket = make_eventfd();
  f.add_socket(no_socket, 9);
  REQUIRE(::eventfd_write(no_socket.get(), 1) == 0);
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });
  drain(*f.engine, f.recorder);
  REQUIRE(f.recorder.calls.size() == 1);
  CHECK(f.recorder.calls[0].what == What::Closed);
  CHECK(f.recorder.calls[0].number == ENOTSOCK);
  f.engine->remove(no_socket.get());
}

// More messages than io_uring has buffers (ENOBUFS) and than epoll reads at once.
GPULOAN_ENGINE_CASE("full queues of many sockets arrive complete and in order") {
  constexpr std::size_t kSockets = 12;
  constexpr std::size_t kEach = 100;
  std::vector<Pair> pairs;
  for (std::size_t i = 0; i < kSockets; ++i) {
    pairs.push_back(make_pair());
    for (std::size_t n = 0; n < kEach; ++n) REQUIRE(send_text(pairs[i].peer.get(), std::to_string(n)));
  }
  for (std::size_t i = 0; i < kSockets; ++i) f.add_socket(pairs[i].ours, i);
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == kSockets * kEach; });
  std::vector<std::size_t> next(kSockets, 0);
  for (const Recorder::Call& call : f.recorder.calls) {
    REQUIRE(call.what == What::Message);
    CHECK(call.text == std::to_string(next[call.tag]++));
  }
  for (Pair& pair : pairs) f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("1000 sockets") {
  constexpr std::size_t kSockets = 1000;
  rlimit limit = {};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  if (limit.rlim_cur < 2 * kSockets + 100) {
    MESSAGE("skipped: RLIMIT_NOFILE is " << limit.rlim_cur);
    return;
  }
  std::vector<Pair> pairs;
  for (std::size_t i = 0; i < kSockets; ++i) {
    pairs.push_back(make_pair());
    f.add_socket(pairs[i].ours, i);
  }
  for (std::size_t round = 0; round < 2; ++round) {
    for (const Pair& pair : pairs) REQUIRE(send_text(pair.peer.get(), "x"));
    run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == kSockets * (round + 1); });
  }
  std::vector<std::size_t> seen(kSockets, 0);
  for (const Recorder::Call& call : f.recorder.calls) ++seen.at(call.tag);
  CHECK(seen == std::vector<std::size_t>(kSockets, 2));
  for (std::size_t i = 0; i < kSockets; i += 2) pairs[i].peer.reset();
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == kSockets * 2 + kSockets / 2; });
  for (Pair& pair : pairs) f.remove(pair.ours);
}
