// SPDX-License-Identifier: MIT
//
// The parts of the io_uring engine that know liburing's calling conventions: return values that are negative errnos,
// partial submissions, the overflow list behind the completion queue, and the layout of a multishot recvmsg's buffer.
#include <loop/uring_ring.hpp>

#include <base/fork.hpp>

#include <cerrno>
#include <sys/mman.h>
#include <unistd.h>

namespace gpuloan::loop {
namespace {

constexpr unsigned kSubmissions = 64; // charged to RLIMIT_MEMLOCK per user, so small; a full queue is submitted
constexpr unsigned kCompletions = 4 * kSubmissions; // what does not fit waits in the kernel's overflow list
constexpr int kRetries = 16;
constexpr std::size_t kBufferBytes = sizeof(io_uring_recvmsg_out) + kControlBytes + kDataBytes;
constexpr std::size_t kPageBytes = 4096;

static_assert(kBufferBytes % 16 == 0 && (sizeof(io_uring_recvmsg_out) + kControlBytes) % 16 == 0,
              "records are used in place and must be aligned");

constexpr std::size_t round_to_pages(std::size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

} // namespace

std::unexpected<Error> fail_step(const char* step, const char* call, int code) {
  return fail(GPULOAN_ERR_UNSUPPORTED, std::string("io_uring self-test, step ") + step + ": " + errno_text(call, code));
}

Result<void> Ring::open() {
  io_uring_params params = {};
  params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG |
                 IORING_SETUP_CQSIZE;
  params.cq_entries = kCompletions;
  const int result = ::io_uring_queue_init_params(kSubmissions, &ring_, &params);
  if (result < 0) return fail_step("setup", "io_uring_setup", -result);
  open_ = true;
  fork_generation_ = fork_generation();
  if ((params.features & IORING_FEAT_EXT_ARG) == 0) return fail_step("setup", "IORING_FEAT_EXT_ARG", EOPNOTSUPP);
  const int apart = ::io_uring_ring_dontfork(&ring_);
  if (apart < 0) return fail_step("dontfork", "madvise(MADV_DONTFORK)", -apart);
  return {};
}

Ring::~Ring() {
  if (!open_) return;
  if (ours()) {
    ::io_uring_queue_exit(&ring_);
  } else {
    ::close(ring_.ring_fd); // its memory is not mapped here
  }
}

bool Ring::ours() const noexcept { return fork_generation_ == fork_generation(); }

io_uring_sqe* Ring::entry() noexcept {
  io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
  for (int i = 0; sqe == nullptr && i < kRetries; ++i) {
    static_cast<void>(::io_uring_submit(&ring_));
    sqe = ::io_uring_get_sqe(&ring_);
  }
  return sqe;
}

int Ring::wait(std::uint64_t timeout_ns) noexcept {
  int result = 0;
  if (timeout_ns == 0) {
    result = ::io_uring_submit_and_get_events(&ring_);
  } else {
    io_uring_cqe* ignored = nullptr;
    __kernel_timespec timeout = {};
    timeout.tv_sec = static_cast<std::int64_t>(timeout_ns / 1'000'000'000U);
    timeout.tv_nsec = static_cast<long long>(timeout_ns % 1'000'000'000U);
    result = ::io_uring_submit_and_wait_timeout(&ring_, &ignored, 1, &timeout, nullptr);
  }
  // EAGAIN and EBUSY: short of memory or behind with reaping; the queue is kept and submitted by the next call.
  const bool passes = result >= 0 || result == -ETIME || result == -EINTR || result == -EAGAIN || result == -EBUSY;
  return passes ? 0 : -result;
}

int Ring::flush() noexcept {
  int result = 0;
  for (int i = 0; i < kRetries; ++i) {
    result = ::io_uring_submit_and_get_events(&ring_);
    if (result >= 0 ? ::io_uring_sq_ready(&ring_) == 0 : result != -EINTR && result != -EAGAIN) break;
  }
  return result < 0 ? -result : 0;
}

std::size_t Ring::take(std::span<Completion> into) noexcept {
  constexpr std::size_t kChunk = 32;
  io_uring_cqe* entries[kChunk];
  std::size_t taken = 0;
  while (taken < into.size()) {
    const std::size_t room = std::min(kChunk, into.size() - taken);
    const unsigned count = ::io_uring_peek_batch_cqe(&ring_, entries, static_cast<unsigned>(room));
    if (count == 0) break;
    for (unsigned i = 0; i < count; ++i) into[taken++] = {entries[i]->user_data, entries[i]->res, entries[i]->flags};
    ::io_uring_cq_advance(&ring_, count);
  }
  return taken;
}

BufferRing::~BufferRing() {
  // In a forked child something else may be mapped there.
  if (memory_ != nullptr && fork_generation_ == fork_generation()) ::munmap(memory_, bytes_);
}

Result<void> BufferRing::open(Ring& ring, std::uint32_t count) {
  const std::size_t head = round_to_pages(count * sizeof(io_uring_buf));
  bytes_ = head + round_to_pages(count * kBufferBytes);
  void* address = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return fail_step("buffers", "mmap", errno);
  memory_ = static_cast<std::byte*>(address);
  fork_generation_ = fork_generation();
  // The kernel has the head pinned: a copy made by fork must not become the page that this process goes on writing.
  ::madvise(memory_, bytes_, MADV_DONTFORK);
  count_ = count;
  shape_.msg_controllen = kControlBytes;

  io_uring_buf_reg registration = {};
  registration.ring_addr = reinterpret_cast<std::uintptr_t>(memory_);
  registration.ring_entries = count;
  registration.bgid = kGroup;
  const int result = ::io_uring_register_buf_ring(ring.get(), &registration, 0);
  if (result < 0) return fail_step("register_buf_ring", "io_uring_register(PBUF_RING)", -result);
  ::io_uring_buf_ring_init(reinterpret_cast<io_uring_buf_ring*>(memory_));
  for (std::uint32_t id = 0; id < count; ++id) give_back(static_cast<std::uint16_t>(id));
  return {};
}

std::byte* BufferRing::buffer(std::uint16_t id) const noexcept {
  return memory_ + round_to_pages(count_ * sizeof(io_uring_buf)) + id * kBufferBytes;
}

void BufferRing::prepare_receive(io_uring_sqe* entry, int socket) noexcept {
  ::io_uring_prep_recvmsg_multishot(entry, socket, &shape_, MSG_CMSG_CLOEXEC);
  entry->flags |= IOSQE_BUFFER_SELECT;
  entry->buf_group = kGroup;
}

std::optional<Message> BufferRing::message(std::uint16_t id, int length) noexcept {
  if (id >= count_) return std::nullopt;
  std::byte* start = buffer(id);
  io_uring_recvmsg_out* out = ::io_uring_recvmsg_validate(start, length, &shape_);
  if (out == nullptr || out->controllen > kControlBytes) return std::nullopt;
  const std::byte* control = start + sizeof(*out);
  // out->payloadlen is what the sender sent, also where the buffer was too short: count what is here.
  const std::size_t data_bytes = static_cast<std::size_t>(length) - sizeof(*out) - kControlBytes;
  return Message{{control + kControlBytes, data_bytes}, {control, out->controllen}, static_cast<int>(out->flags)};
}

void BufferRing::give_back(std::uint16_t id) noexcept {
  auto* ring = reinterpret_cast<io_uring_buf_ring*>(memory_);
  ::io_uring_buf_ring_add(ring, buffer(id), static_cast<unsigned>(kBufferBytes), id,
                          ::io_uring_buf_ring_mask(count_), 0);
  ::io_uring_buf_ring_advance(ring, 1);
}

} // namespace gpuloan::loop
