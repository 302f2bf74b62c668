// SPDX-License-Identifier: MIT
//
// Engine contract, third part: waiting. Readable descriptors, room to write, wake-ups, time limits, signals, fork.
#include "support.hpp"

#include <base/clock.hpp>

#include <csignal>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace gpuloan;
using namespace gpuloan::loop;
using What = Recorder::What;

namespace {

UniqueFd make_eventfd() {
  UniqueFd fd = UniqueFd::take(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  REQUIRE(fd);
  return fd;
}

void fill(int socket) {
  while (send_text(socket, "fill")) {
  }
  REQUIRE(errno == EAGAIN);
}

void empty(int socket) {
  char text[8];
  while (::recv(socket, text, sizeof(text), MSG_DONTWAIT) > 0) {
  }
}

// SIGALRM every millisecond, without SA_RESTART.
class SignalStorm {
 public:
  SignalStorm() {
    struct sigaction action = {};
    action.sa_handler = [](int) {};
    REQUIRE(::sigaction(SIGALRM, &action, &before_) == 0);
    const itimerval often = {{0, 1000}, {0, 1000}};
    REQUIRE(::setitimer(ITIMER_REAL, &often, nullptr) == 0);
  }
  ~SignalStorm() {
    const itimerval never = {};
    CHECK(::setitimer(ITIMER_REAL, &never, nullptr) == 0);
    CHECK(::sigaction(SIGALRM, &before_, nullptr) == 0);
  }

 private:
  struct sigaction before_ = {};
};

} // namespace

GPULOAN_ENGINE_CASE("a readable descriptor is reported as long as it is readable") {
  const UniqueFd event = make_eventfd();
  f.add_readable(event, 5);
  drain(*f.engine, f.recorder);
  CHECK(f.recorder.calls.empty());
  REQUIRE(::eventfd_write(event.get(), 1) == 0);
  run_until(*f.engine, f.recorder, [&] { return f.recorder.count(What::Readable, 5) == 3; });
  eventfd_t value = 0;
  REQUIRE(::eventfd_read(event.get(), &value) == 0);
  for (int i = 0; i < 3; ++i) REQUIRE(f.engine->wait(0, f.recorder).has_value());
  const std::size_t before = f.recorder.calls.size();
  CHECK(before <= 4); // one more may have been on its way
  drain(*f.engine, f.recorder);
  CHECK(f.recorder.calls.size() == before);
  REQUIRE(::eventfd_write(event.get(), 1) == 0);
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == before + 1; });
  f.engine->remove(event.get());
}

GPULOAN_ENGINE_CASE("a removed readable descriptor is silent") {
  const UniqueFd event = make_eventfd();
  f.add_readable(event, 5);
  REQUIRE(::eventfd_write(event.get(), 1) == 0);
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == 1; });
  f.engine->remove(event.get());
  drain(*f.engine, f.recorder);
  CHECK(f.recorder.calls.size() == 1);
}

GPULOAN_ENGINE_CASE("a pidfd becomes readable when its process dies") {
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  REQUIRE(child > 0);
  const UniqueFd pidfd = UniqueFd::take(static_cast<int>(::syscall(SYS_pidfd_open, child, 0)));
  REQUIRE(pidfd);
  f.add_readable(pidfd, 8);
  drain(*f.engine, f.recorder);
  CHECK(f.recorder.calls.empty());
  REQUIRE(::kill(child, SIGKILL) == 0);
  run_until(*f.engine, f.recorder, [&] { return f.recorder.count(What::Readable, 8) != 0; });
  CHECK(::waitpid(child, nullptr, WNOHANG) == child);
  run_until(*f.engine, f.recorder, [&] { return f.recorder.count(What::Readable, 8) >= 3; }); // also after the reap
  f.engine->remove(pidfd.get());
}

GPULOAN_ENGINE_CASE("on_writable comes once, when a full socket takes data again") {
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  fill(pair.ours.get());
  REQUIRE(f.engine->want_writable(pair.ours.get()).has_value());
  REQUIRE(f.engine->want_writable(pair.ours.get()).has_value()); // asking twice is asking once
  drain(*f.engine, f.recorder);
  CHECK(f.recorder.calls.empty());
  empty(pair.peer.get());
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });
  drain(*f.engine, f.recorder);
  REQUIRE(f.recorder.calls.size() == 1);
  CHECK(f.recorder.calls[0].what == What::Writable);
  CHECK(send_text(pair.ours.get(), "again"));

  REQUIRE(send_text(pair.peer.get(), "still receiving"));
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == 2; });
  CHECK(f.recorder.calls[1].what == What::Message);
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("messages arrive while on_writable is waited for") {
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  fill(pair.ours.get());
  REQUIRE(f.engine->want_writable(pair.ours.get()).has_value());
  REQUIRE(send_text(pair.peer.get(), "x"));
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });
  CHECK(f.recorder.calls[0].what == What::Message);
  empty(pair.peer.get());
  run_until(*f.engine, f.recorder, [&] { return f.recorder.calls.size() == 2; });
  CHECK(f.recorder.calls[1].what == What::Writable);
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("no on_writable after the end of the peer was reported, or after remove") {
  Pair dead = make_pair();
  Pair removed = make_pair();
  f.add_socket(dead.ours, 1);
  f.add_socket(removed.ours, 2);
  fill(dead.ours.get());
  fill(removed.ours.get());
  REQUIRE(f.engine->want_writable(dead.ours.get()).has_value());
  REQUIRE(f.engine->want_writable(removed.ours.get()).has_value());
  drain(*f.engine, f.recorder);
  f.remove(removed.ours);
  empty(removed.peer.get());
  dead.peer.reset();
  run_until(*f.engine, f.recorder, [&] { return f.recorder.count(What::Closed, 1) != 0; });
  const std::size_t until_closed = f.recorder.calls.size();
  drain(*f.engine, f.recorder);
  CHECK(f.recorder.calls.size() == until_closed);
  CHECK(f.recorder.count(What::Writable, 2) == 0);
  f.remove(dead.ours);
}

GPULOAN_ENGINE_CASE("a wake before the wait is not lost, and ends one wait only") {
  f.engine->wake();
  f.engine->wake();
  const std::uint64_t start = now_ns();
  REQUIRE(f.engine->wait(kPatience, f.recorder).has_value());
  CHECK(now_ns() - start < kPatience);
  const std::uint64_t second = now_ns();
  REQUIRE(f.engine->wait(30 * kMillisecond, f.recorder).has_value());
  CHECK(now_ns() - second >= 30 * kMillisecond);
  CHECK(f.recorder.calls.empty());
}

GPULOAN_ENGINE_CASE("wakes from another thread") {
  constexpr int kRounds = 200;
  int rounds = 0;
  for (; rounds < kRounds; ++rounds) {
    std::thread other([&] { f.engine->wake(); });
    const auto result = f.engine->wait(kPatience, f.recorder);
    other.join();
    REQUIRE(result.has_value());
  }
  CHECK(rounds == kRounds);
  CHECK(f.recorder.calls.empty());
}

GPULOAN_ENGINE_CASE("a wake inside a callback ends the next wait") {
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  REQUIRE(send_text(pair.peer.get(), "x"));
  f.recorder.then = [&](const auto&) { f.engine->wake(); };
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });
  const std::uint64_t start = now_ns();
  REQUIRE(f.engine->wait(kPatience, f.recorder).has_value());
  CHECK(now_ns() - start < kPatience);
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("a wait without events lasts its time, also under signals and stale completions") {
  const std::uint64_t start = now_ns();
  REQUIRE(f.engine->wait(20 * kMillisecond + 1, f.recorder).has_value());
  CHECK(now_ns() - start >= 20 * kMillisecond);

  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  drain(*f.engine, f.recorder);
  f.remove(pair.ours);
  const SignalStorm storm;
  const std::uint64_t second = now_ns();
  REQUIRE(f.engine->wait(20 * kMillisecond, f.recorder).has_value());
  CHECK(now_ns() - second >= 20 * kMillisecond);
  CHECK(f.recorder.calls.empty());
}

GPULOAN_ENGINE_CASE("the longest time does not overflow") {
  f.engine->wake();
  REQUIRE(f.engine->wait(~std::uint64_t{0}, f.recorder).has_value());
}

GPULOAN_ENGINE_CASE("poll_fd tells that wait has something to do") {
  const int fd = f.engine->poll_fd();
  if (f.engine->kind() == GPULOAN_ENGINE_IO_URING) {
    CHECK(fd == -1);
    return;
  }
  CHECK(f.engine->kind() == GPULOAN_ENGINE_EPOLL);
  CHECK_FALSE(is_readable(fd));
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  CHECK_FALSE(is_readable(fd));
  REQUIRE(send_text(pair.peer.get(), "x"));
  CHECK(is_readable(fd));
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });
  CHECK_FALSE(is_readable(fd));
  f.engine->wake();
  CHECK(is_readable(fd));
  f.remove(pair.ours);
}

GPULOAN_ENGINE_CASE("a forked child may destroy its copy without harm, and holds nothing open") {
  Pair pair = make_pair();
  f.add_socket(pair.ours, 1);
  drain(*f.engine, f.recorder);
  Pair gate = make_pair();
  const pid_t child = ::fork();
  if (child == 0) {
    f.engine.reset();
    pair.ours.reset();
    pair.peer.reset();
    gate.ours.reset();
    pollfd end = {gate.peer.get(), POLLIN, 0};
    static_cast<void>(::poll(&end, 1, -1)); // lives until the parent is done
    ::_exit(0);
  }
  REQUIRE(child > 0);
  gate.peer.reset();
  REQUIRE(send_text(pair.peer.get(), "x"));
  run_until(*f.engine, f.recorder, [&] { return !f.recorder.calls.empty(); });
  CHECK(f.recorder.calls[0].text == "x");
  f.remove(pair.ours);
  run_until(*f.engine, f.recorder, [&] {
    f.engine->wake();
    char byte = 0;
    return ::recv(pair.peer.get(), &byte, 1, MSG_DONTWAIT) == 0; // the child closes its copies some time
  });
  gate.ours.reset();
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}
