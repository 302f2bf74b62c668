// SPDX-License-Identifier: MIT
//
// Ring and BufferRing: the two resources of the io_uring engine, and the words for what failed while making them.
//
// Only liburing 2.3 is used. No SQPOLL (it eats a core), no links and no registered files (they gained nothing, and a
// registered file outlives its owner's death): KERNEL-FACTS 1, 2 and 4.
#pragma once

#include <base/status.hpp>
#include <loop/engine.hpp>

#include <liburing.h>

#include <optional>

namespace gpuloan::loop {

// Completion of a request that carries F_MORE stays armed.
struct Completion {
  std::uint64_t user_data = 0;
  int result = 0;
  std::uint32_t flags = 0;
};

// UNSUPPORTED: "io_uring self-test, step STEP: CALL: text (ERRNO)".
[[nodiscard]] std::unexpected<Error> fail_step(const char* step, const char* call, int code);

// SINGLE_ISSUER | DEFER_TASKRUN: completions are made only inside this thread's own calls, so nothing is received
// between them. Not inherited: a forked child that kept the ring's memory would keep every socket in it open.
class Ring {
 public:
  Ring() noexcept = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring();

  [[nodiscard]] Result<void> open();
  // Borrowed, for liburing's calls.
  [[nodiscard]] io_uring* get() noexcept { return &ring_; }
  // An empty entry, after submitting the queue where it was full; null when even that gave none.
  [[nodiscard]] io_uring_sqe* entry() noexcept;
  // Submits and waits for one completion; 0 only looks. 0, or a positive errno; a timeout is no error.
  [[nodiscard]] int wait(std::uint64_t timeout_ns) noexcept;
  // Submits what is queued and lets the kernel finish what it can without waiting. 0, or a positive errno.
  int flush() noexcept;
  // Takes up to `into.size()` completions.
  [[nodiscard]] std::size_t take(std::span<Completion> into) noexcept;
  // False in a forked child, where the ring may not be touched.
  [[nodiscard]] bool ours() const noexcept;

 private:
  io_uring ring_ = {};
  std::uint32_t fork_generation_ = 0;
  bool open_ = false;
};

// Receive buffers that the kernel picks from, one ring for all sockets. Each holds what a multishot recvmsg writes: a
// header, control, data.
class BufferRing {
 public:
  BufferRing() noexcept = default;
  BufferRing(const BufferRing&) = delete;
  BufferRing& operator=(const BufferRing&) = delete;
  ~BufferRing();

  static constexpr std::uint16_t kGroup = 1;
  // `count` is a power of two, at most 32768. The ring must outlive this object's use, not its destruction.
  [[nodiscard]] Result<void> open(Ring& ring, std::uint32_t count);
  // A receive into any of the buffers, repeated until the kernel says otherwise.
  void prepare_receive(io_uring_sqe* entry, int socket) noexcept;
  // The message that a completed receive put into buffer `id`; nothing when `length` makes no sense.
  [[nodiscard]] std::optional<Message> message(std::uint16_t id, int length) noexcept;
  void give_back(std::uint16_t id) noexcept;

 private:
  [[nodiscard]] std::byte* buffer(std::uint16_t id) const noexcept;

  std::byte* memory_ = nullptr; // the io_uring_buf_ring, then the buffers
  std::size_t bytes_ = 0;
  std::uint32_t count_ = 0;
  std::uint32_t fork_generation_ = 0;
  msghdr shape_ = {}; // tells the kernel how much control to make room for
};

// Tries every step that the engine depends on, since there is no feature bit for a multishot recvmsg. Success is
// remembered for the process.
[[nodiscard]] Result<void> uring_self_test();

} // namespace gpuloan::loop
