// SPDX-License-Identifier: MIT
//
// The io_uring engine: one ring for sockets, pidfds, listening sockets and the wake eventfd.
//
// Requests of a source:
//   Receive   multishot recvmsg into the shared buffer ring; stays armed while its completions carry F_MORE
//   Readable  one-shot poll for POLLIN, armed again after each callback, which makes it level-triggered
//   Writable  one-shot poll for POLLOUT, only while somebody wants it
// A receive ends, and is armed again, when the buffers ran out (ENOBUFS) and at a dead peer's ECONNRESET, behind which its
// last records are still queued. Arming is put off to the next wait(), so a round hands its buffers back first.
//
// Stale completions: user_data holds the operation, the generation of the source and its descriptor. remove() takes the
// source out of the table, so what still arrives under its generation finds nobody; such a message is dropped with its
// descriptors and its buffer goes back. remove() also submits the cancellation at once: a request keeps its file open,
// and the caller closes its descriptor next; and an entry that is still queued must not meet a new file of that number.
//
// One thread, the one that made the ring, except wake(). Since DEFER_TASKRUN receives only inside this thread's calls,
// the destructor can cancel, take what had arrived, close its descriptors, and know that nothing follows.
#include <loop/batch.hpp>
#include <loop/timeout.hpp>
#include <loop/uring_ring.hpp>
#include <loop/wakeup.hpp>

#include <array>
#include <cerrno>
#include <fcntl.h>
#include <poll.h>
#include <unordered_map>
#include <vector>

namespace gpuloan::loop {
namespace {

constexpr std::uint32_t kBuffers = 128; // 600 KiB, touched only as far as they are filled
constexpr std::size_t kRound = 64;      // completions taken at a time
constexpr int kLooks = 4;
constexpr int kFarewellTries = 16;
constexpr std::uint64_t kFarewellPatience = 100'000'000;

enum class Operation : std::uint64_t { Ignored = 0, Receive = 1, Readable = 2, Writable = 3, Wake = 4 };

// Operation in the top 4 bits, 28 bits of generation, 32 bits of descriptor. The low 60 are the key of the source.
constexpr std::uint64_t kKeyMask = ~(std::uint64_t{0xF} << 60);
constexpr std::uint32_t kGenerationMask = 0x0FFF'FFFF;

constexpr std::uint64_t key_of(int fd, std::uint32_t generation) {
  return std::uint64_t{generation & kGenerationMask} << 32 | static_cast<std::uint32_t>(fd);
}
constexpr int fd_of(std::uint64_t key) { return static_cast<int>(static_cast<std::uint32_t>(key)); }
constexpr std::uint64_t pack(Operation operation, std::uint64_t key) {
  return static_cast<std::uint64_t>(operation) << 60 | key;
}
constexpr Operation operation_of(std::uint64_t user_data) { return static_cast<Operation>(user_data >> 60); }

class Uring final : public Engine {
 public:
  explicit Uring(Wakeup wakeup) : wakeup_(std::move(wakeup)) {}
  ~Uring() override;

  [[nodiscard]] Result<void> open();
  [[nodiscard]] Result<void> add_socket(int fd, std::uint64_t tag) override { return add(fd, tag, true); }
  [[nodiscard]] Result<void> add_readable(int fd, std::uint64_t tag) override { return add(fd, tag, false); }
  [[nodiscard]] Result<void> want_writable(int fd) override;
  void remove(int fd) noexcept override;
  [[nodiscard]] Result<bool> wait(std::uint64_t timeout_ns, Handler& handler) override;
  [[nodiscard]] Result<void> drain(int fd, Handler& handler) override;
  void wake() noexcept override { wakeup_.raise(); }
  [[nodiscard]] int poll_fd() const noexcept override { return -1; }
  [[nodiscard]] gpuloan_engine kind() const noexcept override { return GPULOAN_ENGINE_IO_URING; }

 private:
  struct Source {
    std::uint64_t tag = 0;
    std::uint32_t generation = 0;
    bool socket = false;
    bool closed = false;
    bool armed = false; // Receive or Readable is in the kernel or queued for it
    bool writable_armed = false;
  };
  // The buffer of one completion: goes back when the callback is over, however it ends.
  struct Lease {
    BufferRing& buffers;
    bool held;
    std::uint16_t id;
    ~Lease() {
      if (held) buffers.give_back(id);
    }
  };

  [[nodiscard]] Result<void> add(int fd, std::uint64_t tag, bool socket);
  [[nodiscard]] bool arm(std::uint64_t key, Source& source) noexcept;
  [[nodiscard]] bool arm_poll(Operation operation, std::uint64_t key, unsigned events) noexcept;
  [[nodiscard]] Result<void> arm_put_off();
  void cancel(std::uint64_t key, Source& source) noexcept;
  void cancel_request(std::uint64_t user_data) noexcept;
  void drop_everything() noexcept;
  void drop(const Completion& completion) noexcept;
  [[nodiscard]] Source* find(std::uint64_t key) noexcept;

  [[nodiscard]] bool handle_round(Handler& handler);
  [[nodiscard]] bool handle(const Completion& completion, Handler& handler);
  [[nodiscard]] bool handle_receive(std::uint64_t key, const Completion& completion, Handler& handler);
  [[nodiscard]] bool handle_readable(std::uint64_t key, const Completion& completion, Handler& handler);
  [[nodiscard]] bool handle_writable(std::uint64_t key, Handler& handler);
  void handle_message(std::uint64_t key, const Message& message, Handler& handler);
  void deliver_batch(std::uint64_t key, Handler& handler);
  void close(std::uint64_t key, Source& source, int error, Handler& handler);

  Wakeup wakeup_;
  BufferRing buffers_; // declared before the ring: unmapped after it
  Ring ring_;
  std::unordered_map<int, Source> sources_;
  std::unique_ptr<Batch> batch_; // for drain(); made by the first
  std::vector<std::uint64_t> put_off_; // keys of sources to arm at the next wait
  std::array<Completion, kRound> round_ = {};
  std::size_t next_ = 0; // of round_; a callback that throws leaves the rest to the next wait
  std::size_t end_ = 0;
  std::size_t in_flight_ = 0; // requests whose last completion has not been taken
  std::uint32_t generation_ = 0;
  bool wake_armed_ = false;
};

Result<void> Uring::open() {
  GPULOAN_TRY(ring_.open());
  GPULOAN_TRY(buffers_.open(ring_, kBuffers));
  GPULOAN_TRY(arm_put_off());
  // A filter may have been installed since the self-test.
  if (const int error = ring_.flush(); error != 0) return fail_step("enter", "io_uring_enter", error);
  return {};
}

Uring::~Uring() {
  if (!ring_.ours()) return; // a forked child
  drop_everything();
}

// Whatever was received for the handler and not handed out holds descriptors that nobody else knows of.
void Uring::drop_everything() noexcept {
  while (next_ < end_) drop(round_[next_++]);
  if (io_uring_sqe* entry = ring_.entry(); entry != nullptr) {
    ::io_uring_prep_cancel64(entry, 0, IORING_ASYNC_CANCEL_ANY | IORING_ASYNC_CANCEL_ALL);
    ::io_uring_sqe_set_data64(entry, pack(Operation::Ignored, 0));
    ++in_flight_;
  }
  for (int i = 0; i < kFarewellTries && in_flight_ > 0; ++i) {
    const int error = ring_.wait(kFarewellPatience);
    const std::size_t count = ring_.take(round_);
    for (std::size_t at = 0; at < count; ++at) drop(round_[at]);
    if (error != 0) break;      // not this engine's thread, or entering was forbidden meanwhile
    if (count == kRound) i = 0; // there is more to take
  }
}

void Uring::drop(const Completion& completion) noexcept {
  if ((completion.flags & IORING_CQE_F_MORE) == 0) --in_flight_;
  if ((completion.flags & IORING_CQE_F_BUFFER) == 0) return;
  const auto id = static_cast<std::uint16_t>(completion.flags >> IORING_CQE_BUFFER_SHIFT);
  if (const auto message = buffers_.message(id, completion.result); message) close_descriptors(message->control);
  buffers_.give_back(id);
}

Uring::Source* Uring::find(std::uint64_t key) noexcept {
  const auto at = sources_.find(fd_of(key));
  return at != sources_.end() && key_of(at->first, at->second.generation) == key ? &at->second : nullptr;
}

Result<void> Uring::add(int fd, std::uint64_t tag, bool socket) {
  if (::fcntl(fd, F_GETFD) < 0) return fail_errno("io_uring: fcntl(F_GETFD)", errno); // else a completion would say so
  const auto [at, added] = sources_.try_emplace(fd);
  if (!added) return fail(GPULOAN_ERR_INVALID, "descriptor " + std::to_string(fd) + " is already in the loop");
  at->second.tag = tag;
  at->second.generation = ++generation_ & kGenerationMask;
  at->second.socket = socket;
  if (arm(key_of(fd, at->second.generation), at->second)) return {};
  sources_.erase(at);
  return fail(GPULOAN_ERR_SYSTEM, "io_uring: the kernel takes no more requests");
}

bool Uring::arm(std::uint64_t key, Source& source) noexcept {
  if (!source.socket) {
    source.armed = arm_poll(Operation::Readable, key, POLLIN);
    return source.armed;
  }
  io_uring_sqe* entry = ring_.entry();
  if (entry == nullptr) return false;
  buffers_.prepare_receive(entry, fd_of(key));
  ::io_uring_sqe_set_data64(entry, pack(Operation::Receive, key));
  ++in_flight_;
  source.armed = true;
  return true;
}

bool Uring::arm_poll(Operation operation, std::uint64_t key, unsigned events) noexcept {
  io_uring_sqe* entry = ring_.entry();
  if (entry == nullptr) return false;
  ::io_uring_prep_poll_add(entry, operation == Operation::Wake ? wakeup_.fd() : fd_of(key), events);
  ::io_uring_sqe_set_data64(entry, pack(operation, key));
  ++in_flight_;
  return true;
}

Result<void> Uring::arm_put_off() {
  constexpr const char* kFull = "io_uring: the kernel takes no more requests";
  if (!wake_armed_) wake_armed_ = arm_poll(Operation::Wake, 0, POLLIN);
  if (!wake_armed_) return fail(GPULOAN_ERR_SYSTEM, kFull);
  std::size_t armed = 0; // in their order: who found no buffer first gets one first
  for (; armed < put_off_.size(); ++armed) {
    const std::uint64_t key = put_off_[armed];
    Source* source = find(key);
    if (source != nullptr && !source->closed && !source->armed && !arm(key, *source)) break;
  }
  put_off_.erase(put_off_.begin(), put_off_.begin() + static_cast<std::ptrdiff_t>(armed));
  if (!put_off_.empty()) return fail(GPULOAN_ERR_SYSTEM, kFull);
  return {};
}

Result<void> Uring::want_writable(int fd) {
  const auto at = sources_.find(fd);
  if (at == sources_.end() || !at->second.socket || at->second.closed) return fail_no_socket(fd);
  Source& source = at->second;
  if (!source.writable_armed) {
    source.writable_armed = arm_poll(Operation::Writable, key_of(fd, source.generation), POLLOUT);
  }
  if (source.writable_armed) return {};
  return fail(GPULOAN_ERR_SYSTEM, "io_uring: the kernel takes no more requests");
}

void Uring::cancel_request(std::uint64_t user_data) noexcept {
  io_uring_sqe* entry = ring_.entry();
  if (entry == nullptr) return; // its completions find nobody
  ::io_uring_prep_cancel64(entry, user_data, 0);
  ::io_uring_sqe_set_data64(entry, pack(Operation::Ignored, 0));
  ++in_flight_;
}

void Uring::cancel(std::uint64_t key, Source& source) noexcept {
  if (source.armed) cancel_request(pack(source.socket ? Operation::Receive : Operation::Readable, key));
  if (source.writable_armed) cancel_request(pack(Operation::Writable, key));
  source.armed = false;
  source.writable_armed = false;
}

void Uring::remove(int fd) noexcept {
  const auto at = sources_.find(fd);
  if (at == sources_.end()) return;
  cancel(key_of(fd, at->second.generation), at->second);
  sources_.erase(at);
  // Also where nothing was armed any more: close() left its cancellations in the queue.
  static_cast<void>(ring_.flush());
}

Result<bool> Uring::wait(std::uint64_t timeout_ns, Handler& handler) {
  WaitLimit limit(timeout_ns);
  int looks = 0;
  for (;;) {
    GPULOAN_TRY(arm_put_off());
    const std::uint64_t left = limit.left_ns();
    // What a callback that threw left behind is there already: only look.
    if (const int error = ring_.wait(next_ < end_ ? 0 : left); error != 0) return fail_errno("io_uring_enter", error);
    if (handle_round(handler)) return true;
    // A look that met an ECONNRESET, say, has seen nothing of what is behind it.
    if (left == 0 && (put_off_.empty() || ++looks == kLooks)) return false;
  }
}

// The armed receive is called back first, since it may hold messages; the rest is then read without the ring.
Result<void> Uring::drain(int fd, Handler& handler) {
  const auto at = sources_.find(fd);
  if (at == sources_.end() || !at->second.socket) return fail_no_socket(fd);
  const std::uint64_t key = key_of(fd, at->second.generation);
  if (at->second.armed) cancel_request(pack(Operation::Receive, key));
  for (int i = 0; i < kFarewellTries; ++i) {
    const Source* source = find(key); // the callbacks may have removed it
    if (source == nullptr || source->closed) return {};
    if (!source->armed) break;
    if (const int error = ring_.wait(kFarewellPatience); error != 0) return fail_errno("io_uring_enter", error);
    static_cast<void>(handle_round(handler));
  }
  if (!batch_) batch_ = std::make_unique<Batch>();
  for (std::size_t i = 0; i < kDrainBatches; ++i) {
    Source* source = find(key);
    if (source == nullptr || source->closed) break;
    if (batch_->receive(fd) < 0) {
      if (errno != EAGAIN) close(key, *source, errno, handler);
      break;
    }
    deliver_batch(key, handler);
  }
  return {};
}

void Uring::deliver_batch(std::uint64_t key, Handler& handler) {
  const Batch::DropRest drop_rest{*batch_};
  while (!batch_->empty()) {
    const Source* source = find(key);
    if (source == nullptr || source->closed) return;
    handle_message(key, batch_->take(), handler);
  }
}

// True when the handler was called or somebody woke the loop.
bool Uring::handle_round(Handler& handler) {
  if (next_ == end_) {
    next_ = 0;
    end_ = ring_.take(round_);
  }
  bool something = false;
  while (next_ < end_) {
    const Completion completion = round_[next_++];
    if (handle(completion, handler)) something = true;
  }
  return something;
}

bool Uring::handle(const Completion& completion, Handler& handler) {
  if ((completion.flags & IORING_CQE_F_MORE) == 0) --in_flight_;
  const std::uint64_t key = completion.user_data & kKeyMask;
  switch (operation_of(completion.user_data)) {
    case Operation::Receive:
      return handle_receive(key, completion, handler);
    case Operation::Readable:
      return handle_readable(key, completion, handler);
    case Operation::Writable:
      return handle_writable(key, handler);
    case Operation::Wake:
      wake_armed_ = false;
      wakeup_.clear();
      return true;
    case Operation::Ignored:
      break;
  }
  return false;
}

bool Uring::handle_receive(std::uint64_t key, const Completion& completion, Handler& handler) {
  const bool has_buffer = (completion.flags & IORING_CQE_F_BUFFER) != 0;
  const Lease lease{buffers_, has_buffer, static_cast<std::uint16_t>(completion.flags >> IORING_CQE_BUFFER_SHIFT)};
  const auto message = has_buffer ? buffers_.message(lease.id, completion.result) : std::nullopt;
  Source* source = find(key);
  if (source == nullptr || source->closed) {
    if (message) close_descriptors(message->control);
    return false;
  }
  if ((completion.flags & IORING_CQE_F_MORE) == 0) {
    source->armed = false;
    put_off_.push_back(key);
  }
  if (message) {
    handle_message(key, *message, handler);
    return true;
  }
  switch (-completion.result) {
    case ENOBUFS:    // all buffers are full: this round empties some
    case ECONNRESET: // the peer died with unread data; its last records follow
    case EINTR:
    case EAGAIN:
    case ECANCELED: // not by us
      return false;
    default:
      close(key, *source, completion.result < 0 ? -completion.result : EBADMSG, handler);
      return true;
  }
}

void Uring::handle_message(std::uint64_t key, const Message& message, Handler& handler) {
  Source* source = find(key);
  if (!message.data.empty()) {
    handler.on_message(source->tag, message);
    return;
  }
  close_descriptors(message.control); // end of file; an empty record looks the same and is forbidden for that reason
  close(key, *source, 0, handler);
}

void Uring::close(std::uint64_t key, Source& source, int error, Handler& handler) {
  source.closed = true;
  cancel(key, source);
  handler.on_closed(source.tag, error);
}

bool Uring::handle_readable(std::uint64_t key, const Completion& completion, Handler& handler) {
  Source* source = find(key);
  if (source == nullptr || source->closed) return false;
  source->armed = false;
  if (completion.result < 0 && completion.result != -ECANCELED) {
    close(key, *source, -completion.result, handler);
    return true;
  }
  put_off_.push_back(key);
  if (completion.result < 0) return false;
  handler.on_readable(source->tag);
  return true;
}

// A poll that failed or saw a hang-up is a reason to try, too: the send says what is wrong.
bool Uring::handle_writable(std::uint64_t key, Handler& handler) {
  Source* source = find(key);
  if (source == nullptr || source->closed || !source->writable_armed) return false;
  source->writable_armed = false;
  handler.on_writable(source->tag);
  return true;
}

} // namespace

Result<std::unique_ptr<Engine>> make_uring() {
  GPULOAN_TRY(uring_self_test());
  auto wakeup = Wakeup::create();
  if (!wakeup) return forward(std::move(wakeup.error()));
  auto engine = std::make_unique<Uring>(std::move(*wakeup));
  GPULOAN_TRY(engine->open());
  return engine;
}

} // namespace gpuloan::loop
