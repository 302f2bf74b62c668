// SPDX-License-Identifier: MIT
//
// What the tests of the engines share: socket pairs, a handler that writes down what it is told and can be made to act
// in a callback, and a count of open descriptors around each test case.
#pragma once

#include <doctest/doctest.h>

#include <loop/cmsg.hpp>
#include <loop/engine.hpp>

#include <array>
#include <cerrno>
#include <cstdio>
#include <dirent.h>
#include <fcntl.h>
#include <functional>
#include <poll.h>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <vector>

namespace gpuloan::loop {

inline constexpr std::uint64_t kMillisecond = 1'000'000;
// Longer than any machine takes; only a failing test waits for it.
inline constexpr std::uint64_t kPatience = 20'000 * kMillisecond;

inline std::size_t open_descriptors() {
  DIR* directory = ::opendir("/proc/self/fd");
  REQUIRE(directory != nullptr);
  std::size_t count = 0;
  while (const dirent* entry = ::readdir(directory)) count += entry->d_name[0] != '.' ? 1 : 0;
  ::closedir(directory);
  return count;
}

// First member of a fixture: checks, after all other members are gone, that every descriptor is.
class DescriptorGuard {
 public:
  DescriptorGuard() : before_(open_descriptors()) {}
  ~DescriptorGuard() { CHECK(open_descriptors() == before_); }

 private:
  std::size_t before_;
};

struct Pair {
  UniqueFd ours;
  UniqueFd peer;
};

inline Pair make_pair() {
  int ends[2] = {-1, -1};
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  return {UniqueFd::take(ends[0]), UniqueFd::take(ends[1])};
}

// Sends `text` with copies of `fds`. False with errno.
inline bool send_text(int socket, std::string_view text, const std::vector<int>& fds = {}) {
  iovec vector = {const_cast<char*>(text.data()), text.size()};
  std::vector<std::byte> control(fds.empty() ? 0 : CMSG_SPACE(fds.size() * sizeof(int)));
  msghdr message = {};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

inline bool is_readable(int fd) {
  pollfd poll = {fd, POLLIN, 0};
  return ::poll(&poll, 1, 0) == 1;
}

// Writes down every callback. Owns the descriptors that came. `then` runs at the end of each callback.
class Recorder final : public Handler {
 public:
  enum class What { Message, Closed, Readable, Writable };
  struct Call {
    What what;
    std::uint64_t tag;
    std::string text; // Message
    int number;       // Message: flags; Closed: error
    std::vector<UniqueFd> fds;
  };

  void on_message(std::uint64_t tag, const Message& message) override {
    Call call{What::Message, tag, {reinterpret_cast<const char*>(message.data.data()), message.data.size()},
              message.flags, {}};
    walk_control(message.control, [&](const ControlItem& item) {
      for_each_descriptor(item, [&](int fd) { call.fds.push_back(UniqueFd::take(fd)); });
    });
    add(std::move(call));
  }
  void on_closed(std::uint64_t tag, int error) override { add({What::Closed, tag, {}, error, {}}); }
  void on_readable(std::uint64_t tag) override { add({What::Readable, tag, {}, 0, {}}); }
  void on_writable(std::uint64_t tag) override { add({What::Writable, tag, {}, 0, {}}); }

  [[nodiscard]] std::size_t count(What what, std::uint64_t tag) const {
    std::size_t found = 0;
    for (const Call& call : calls) found += call.what == what && call.tag == tag ? 1 : 0;
    return found;
  }
  [[nodiscard]] std::size_t messages() const {
    std::size_t found = 0;
    for (const Call& call : calls) found += call.what == What::Message ? 1 : 0;
    return found;
  }

  std::vector<Call> calls;
  std::function<void(const Call&)> then;

 private:
  void add(Call call) {
    calls.push_back(std::move(call));
    if (then) {
      const auto action = then; // it may replace itself
      const std::size_t at = calls.size() - 1;
      action(calls[at]);
    }
  }
};

// Waits until `done()`; fails the test when that takes too long.
template <typename Done>
void run_until(Engine& engine, Handler& handler, Done&& done) {
  for (int round = 0; !done(); ++round) {
    REQUIRE(round < 100'000);
    const auto result = engine.wait(kPatience, handler);
    REQUIRE_MESSAGE(result.has_value(), (result ? "" : result.error().text));
  }
}

// Looks until a look finds nothing: what is there is then recorded. Not for sources that stay readable.
inline void drain(Engine& engine, Recorder& recorder) {
  for (std::size_t before = recorder.calls.size() + 1; before != recorder.calls.size();) {
    before = recorder.calls.size();
    for (int i = 0; i < 3; ++i) REQUIRE(engine.wait(0, recorder).has_value());
  }
}

struct EpollKind {
  static Result<std::unique_ptr<Engine>> make() { return make_epoll(); }
};
struct UringKind {
  static Result<std::unique_ptr<Engine>> make() { return make_uring(); }
};

// `engine` is null where io_uring is not available; the message says why.
template <typename Kind>
struct Fixture {
  DescriptorGuard guard;
  std::unique_ptr<Engine> engine;
  Recorder recorder;

  Fixture() {
    auto made = Kind::make();
    if (made) {
      engine = std::move(*made);
    } else {
      MESSAGE("skipped: " << made.error().text);
    }
  }
  void add_socket(const UniqueFd& fd, std::uint64_t tag) { REQUIRE(engine->add_socket(fd.get(), tag).has_value()); }
  void add_readable(const UniqueFd& fd, std::uint64_t tag) { REQUIRE(engine->add_readable(fd.get(), tag).has_value()); }
  void remove(UniqueFd& fd) {
    engine->remove(fd.get());
    fd.reset();
  }
};

} // namespace gpuloan::loop

// A test case on both engines, inside Fixture<Kind>.
#define GPULOAN_ENGINE_CASE(name)                                                                                      \
  template <typename Kind>                                                                                             \
  static void DOCTEST_CAT(engine_case_, __LINE__)(::gpuloan::loop::Fixture<Kind> & f);                                 \
  TEST_CASE_TEMPLATE(name, Kind, ::gpuloan::loop::EpollKind, ::gpuloan::loop::UringKind) {                             \
    ::gpuloan::loop::Fixture<Kind> fixture;                                                                            \
    if (fixture.engine) DOCTEST_CAT(engine_case_, __LINE__)<Kind>(fixture);                                            \
  }                                                                                                                    \
  template <typename Kind>                                                                                             \
  static void DOCTEST_CAT(engine_case_, __LINE__)([[maybe_unused]] ::gpuloan::loop::Fixture<Kind> & f)

TYPE_TO_STRING(gpuloan::loop::EpollKind);
TYPE_TO_STRING(gpuloan::loop::UringKind);
