// SPDX-License-Identifier: MIT
//
// The epoll engine: the reference, always built.
//
// Level-triggered, so nothing has to be remembered between two waits: what was not read is reported again. A socket
// that is readable is read with one recvmmsg of up to 16 messages per wait, which is where most of the engine's speed
// comes from (KERNEL-FACTS 2) and keeps a flooding peer from starving the others.
//
// A source is in one of three states: armed; closed (on_closed was called, and it is out of the epoll set, because a set
// reports a hang-up for ever); removed (not in the table). Events carry the generation of the source that they are for:
// a callback may remove a descriptor and add another with the same number, and the rest of the round must not hit it.
//
// One thread, except wake(). Owns the epoll descriptor, the wake eventfd and the receive buffers, never a source's
// descriptor.
#include <loop/batch.hpp>
#include <loop/timeout.hpp>
#include <loop/wakeup.hpp>

#include <array>
#include <cerrno>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unordered_map>

namespace gpuloan::loop {
namespace {

constexpr int kEventsPerWait = 64;
constexpr std::uint64_t kWakeKey = ~std::uint64_t{0};

class Epoll final : public Engine {
 public:
  Epoll(UniqueFd epoll, Wakeup wakeup) : epoll_(std::move(epoll)), wakeup_(std::move(wakeup)) {}

  // Also for the wake eventfd, once, by make_epoll.
  [[nodiscard]] Result<void> watch_wakeup() { return control(EPOLL_CTL_ADD, wakeup_.fd(), EPOLLIN, kWakeKey); }

  [[nodiscard]] Result<void> add_socket(int fd, std::uint64_t tag) override { return add(fd, tag, true); }
  [[nodiscard]] Result<void> add_readable(int fd, std::uint64_t tag) override { return add(fd, tag, false); }
  [[nodiscard]] Result<void> want_writable(int fd) override;
  void remove(int fd) noexcept override;
  [[nodiscard]] Result<bool> wait(std::uint64_t timeout_ns, Handler& handler) override;
  [[nodiscard]] Result<void> drain(int fd, Handler& handler) override;
  void wake() noexcept override { wakeup_.raise(); }
  [[nodiscard]] int poll_fd() const noexcept override { return epoll_.get(); }
  [[nodiscard]] gpuloan_engine kind() const noexcept override { return GPULOAN_ENGINE_EPOLL; }

 private:
  struct Source {
    std::uint64_t tag = 0;
    std::uint32_t generation = 0;
    bool socket = false;
    bool closed = false;
    bool wants_writable = false;
  };

  [[nodiscard]] Result<void> add(int fd, std::uint64_t tag, bool socket);
  [[nodiscard]] Result<void> control(int operation, int fd, std::uint32_t events, std::uint64_t key) noexcept;
  [[nodiscard]] Source* find(std::uint64_t key) noexcept;
  int wait_for_events(std::uint64_t timeout_ns) noexcept;
  bool handle(const epoll_event& event, Handler& handler);
  bool receive(std::uint64_t key, std::uint32_t events, Handler& handler);
  void deliver(std::uint64_t key, Handler& handler);
  void close(std::uint64_t key, int error, Handler& handler);

  static std::uint64_t key_of(int fd, std::uint32_t generation) noexcept {
    return std::uint64_t{generation} << 32 | static_cast<std::uint32_t>(fd);
  }
  static int fd_of(std::uint64_t key) noexcept { return static_cast<int>(static_cast<std::uint32_t>(key)); }

  UniqueFd epoll_;
  Wakeup wakeup_;
  Batch batch_;
  std::array<epoll_event, kEventsPerWait> events_ = {};
  std::unordered_map<int, Source> sources_;
  std::uint32_t generation_ = 0;
  bool has_pwait2_ = true;
};

Result<void> Epoll::control(int operation, int fd, std::uint32_t events, std::uint64_t key) noexcept {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = key;
  if (::epoll_ctl(epoll_.get(), operation, fd, &event) != 0) return fail_errno("epoll_ctl", errno);
  return {};
}

Epoll::Source* Epoll::find(std::uint64_t key) noexcept {
  const auto at = sources_.find(fd_of(key));
  return at != sources_.end() && key_of(at->first, at->second.generation) == key ? &at->second : nullptr;
}

Result<void> Epoll::add(int fd, std::uint64_t tag, bool socket) {
  const auto [at, added] = sources_.try_emplace(fd);
  if (!added) return fail(GPULOAN_ERR_INVALID, "descriptor " + std::to_string(fd) + " is already in the loop");
  at->second.tag = tag;
  // The highest generation would make a key that looks like the wake eventfd's.
  at->second.generation = ++generation_ & 0x7FFF'FFFFU;
  at->second.socket = socket;
  auto result = control(EPOLL_CTL_ADD, fd, EPOLLIN, key_of(fd, at->second.generation));
  if (!result) sources_.erase(at);
  return result;
}

Result<void> Epoll::want_writable(int fd) {
  const auto at = sources_.find(fd);
  if (at == sources_.end() || !at->second.socket || at->second.closed) return fail_no_socket(fd);
  GPULOAN_TRY(control(EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLOUT, key_of(fd, at->second.generation)));
  at->second.wants_writable = true;
  return {};
}

void Epoll::remove(int fd) noexcept {
  const auto at = sources_.find(fd);
  if (at == sources_.end()) return;
  if (!at->second.closed) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  sources_.erase(at);
}

int Epoll::wait_for_events(std::uint64_t timeout_ns) noexcept {
  if (has_pwait2_) {
    const timespec timeout = {static_cast<time_t>(timeout_ns / 1'000'000'000U),
                              static_cast<long>(timeout_ns % 1'000'000'000U)};
    const int count = ::epoll_pwait2(epoll_.get(), events_.data(), kEventsPerWait, &timeout, nullptr);
    // Linux before 5.11 says ENOSYS; container filters that do not know the call say EPERM.
    if (count >= 0 || (errno != ENOSYS && errno != EPERM)) return count;
    has_pwait2_ = false;
  }
  const std::uint64_t rounded_up = timeout_ns / 1'000'000U + (timeout_ns % 1'000'000U != 0 ? 1 : 0);
  const int milliseconds = static_cast<int>(std::min<std::uint64_t>(rounded_up, 1'000'000'000U));
  return ::epoll_wait(epoll_.get(), events_.data(), kEventsPerWait, milliseconds);
}

Result<bool> Epoll::wait(std::uint64_t timeout_ns, Handler& handler) {
  WaitLimit limit(timeout_ns);
  for (;;) {
    const std::uint64_t left = limit.left_ns();
    const int count = wait_for_events(left);
    if (count < 0 && errno != EINTR) return fail_errno("epoll_wait", errno);
    bool something = false;
    for (int i = 0; i < count; ++i) {
      if (handle(events_[static_cast<std::size_t>(i)], handler)) something = true;
    }
    if (something || left == 0) return something;
  }
}

// False when the event was for a source that is gone.
bool Epoll::handle(const epoll_event& event, Handler& handler) {
  const std::uint64_t key = event.data.u64;
  const std::uint32_t events = event.events;
  if (key == kWakeKey) {
    wakeup_.clear();
    return true;
  }
  Source* source = find(key);
  if (source == nullptr || source->closed) return false;
  if (!source->socket) {
    handler.on_readable(source->tag);
    return true;
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) receive(key, events, handler);
  source = find(key); // the callbacks may have removed it
  if (source == nullptr || source->closed || !source->wants_writable || (events & EPOLLOUT) == 0) return true;
  source->wants_writable = false;
  static_cast<void>(control(EPOLL_CTL_MOD, fd_of(key), EPOLLIN, key)); // cannot fail: it is in the set
  handler.on_writable(source->tag);
  return true;
}

Result<void> Epoll::drain(int fd, Handler& handler) {
  const auto at = sources_.find(fd);
  if (at == sources_.end() || !at->second.socket) return fail_no_socket(fd);
  const std::uint64_t key = key_of(fd, at->second.generation);
  for (std::size_t batch = 0; batch < kDrainBatches; ++batch) {
    const Source* source = find(key); // the callbacks may have removed it
    if (source == nullptr || source->closed || !receive(key, 0, handler)) break;
  }
  return {};
}

// One batch; false when there was nothing. A dead peer's ECONNRESET is reported before its last records, so it is read past.
bool Epoll::receive(std::uint64_t key, std::uint32_t events, Handler& handler) {
  if (batch_.receive(fd_of(key)) >= 0) {
    deliver(key, handler);
    return true;
  }
  if (errno != EAGAIN) {
    close(key, errno, handler);
  } else if ((events & EPOLLHUP) != 0) {
    close(key, 0, handler);
  }
  return false;
}

void Epoll::deliver(std::uint64_t key, Handler& handler) {
  const Batch::DropRest drop_rest{batch_};
  while (!batch_.empty()) {
    const Source* source = find(key);
    if (source == nullptr || source->closed) return;
    const Message message = batch_.take();
    if (message.data.empty()) { // end of file; an empty record looks the same and is forbidden for that reason
      close_descriptors(message.control);
      close(key, 0, handler);
      return;
    }
    handler.on_message(source->tag, message);
  }
}

void Epoll::close(std::uint64_t key, int error, Handler& handler) {
  Source* source = find(key);
  source->closed = true;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd_of(key), nullptr);
  handler.on_closed(source->tag, error);
}

} // namespace

Result<std::unique_ptr<Engine>> make_epoll() {
  UniqueFd fd = UniqueFd::take(::epoll_create1(EPOLL_CLOEXEC));
  if (!fd) return fail_errno("epoll_create1", errno);
  auto wakeup = Wakeup::create();
  if (!wakeup) return forward(std::move(wakeup.error()));
  auto engine = std::make_unique<Epoll>(std::move(fd), std::move(*wakeup));
  GPULOAN_TRY(engine->watch_wakeup());
  return engine;
}

} // namespace gpuloan::loop
