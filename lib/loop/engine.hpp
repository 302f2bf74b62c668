// SPDX-License-Identifier: MIT
//
// Engine: what a loop waits with. Two implementations behind one interface, epoll (always) and io_uring (where a
// self-test says it works); the same tests run on both.
//
// An engine never owns a descriptor: remove() it, then close it. Both may happen inside a callback.
#pragma once

#include <base/status.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace gpuloan::loop {

// One received datagram. `control` is the raw ancillary data: whoever gets a Message must take the descriptors in it,
// also when it drops the sender. `flags` are those of recvmsg: look at bits (MSG_TRUNC, MSG_CTRUNC), never the word.
// Valid during the callback only.
struct Message {
  std::span<const std::byte> data;
  std::span<const std::byte> control;
  int flags = 0;
};

// Room that every receive gives: records are at most 128 bytes plus a 4096 byte tail; control holds up to 64
// descriptors, credentials and a pidfd.
inline constexpr std::size_t kDataBytes = 128 + 4096;
inline constexpr std::size_t kControlBytes = 512;

// Callbacks of wait(), on the thread that calls it. `tag` is what add_… was given.
class Handler {
 public:
  virtual void on_message(std::uint64_t tag, const Message& message) = 0;
  // End of file (error 0) or a receive error (positive errno). Comes once, after every message that was queued: a
  // dead peer's ECONNRESET is not the end, its last records are still delivered (KERNEL-FACTS 4).
  virtual void on_closed(std::uint64_t tag, int error) = 0;
  virtual void on_readable(std::uint64_t tag) = 0;
  virtual void on_writable(std::uint64_t tag) = 0;

 protected:
  ~Handler() = default;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // A SEQPACKET socket whose messages are to be received (non-blocking, MSG_CMSG_CLOEXEC).
  [[nodiscard]] virtual Result<void> add_socket(int fd, std::uint64_t tag) = 0;
  // Anything else that becomes readable: listening socket, pidfd, eventfd. Level-triggered.
  [[nodiscard]] virtual Result<void> add_readable(int fd, std::uint64_t tag) = 0;
  // One on_writable once the socket takes data again. Only for descriptors added with add_socket.
  [[nodiscard]] virtual Result<void> want_writable(int fd) = 0;
  // No callback of `fd` comes after this returns.
  virtual void remove(int fd) noexcept = 0;

  // Waits up to `timeout_ns` (0: looks) and calls the handler for what is there. Returns early on wake(). True: the handler was called, or
  // somebody woke it.
  [[nodiscard]] virtual Result<bool> wait(std::uint64_t timeout_ns, Handler& handler) = 0;
  // Delivers what is queued on a socket now, to its end or until there is nothing; for a process that is known to be
  // dead. Other descriptors may get their callbacks too. Not inside a callback.
  [[nodiscard]] virtual Result<void> drain(int fd, Handler& handler) = 0;
  // Ends the present or the next wait(). Any thread.
  virtual void wake() noexcept = 0;
  // A descriptor that is readable when wait() has something to do; -1 where the engine has none (io_uring).
  [[nodiscard]] virtual int poll_fd() const noexcept = 0;
  [[nodiscard]] virtual gpuloan_engine kind() const noexcept = 0;
};

// Both are used by one thread, the one that made them, except wake().
[[nodiscard]] Result<std::unique_ptr<Engine>> make_epoll();
// UNSUPPORTED with the step of the self-test that failed and its cause, or "built without liburing".
[[nodiscard]] Result<std::unique_ptr<Engine>> make_uring();

struct Choice {
  std::unique_ptr<Engine> engine;
  std::string reason; // why this one runs
};
// `wanted` is gpuloan_engine; GPULOAN_ENGINE in the environment ("auto", "epoll", "io_uring") overrides AUTO only.
// AUTO tries io_uring when `ring_allowed`, and epoll on any failure, with the reason; an engine asked for by name
// and not available is an error.
[[nodiscard]] Result<Choice> make_engine(gpuloan_engine wanted, bool ring_allowed);

} // namespace gpuloan::loop
