// SPDX-License-Identifier: MIT
//
// The self-test of io_uring: the steps that the engine depends on, in the order in which kernels, filters and limits
// refuse them (KERNEL-FACTS 3): making a ring; entering it (a filter may allow the setup and forbid this); registering a
// buffer ring; a multishot recvmsg that delivers data, its buffer and a close-on-exec descriptor and stays armed. It
// takes under a millisecond, needs no network and waits for nothing that is not already queued.
#include <loop/uring_ring.hpp>

#include <loop/cmsg.hpp>

#include <array>
#include <atomic>
#include <cerrno>
#include <fcntl.h>

namespace gpuloan::loop {
namespace {

constexpr std::uint64_t kPatience = 2'000'000'000; // a kernel that does not answer by then fails the step

// Submits what is queued and takes one completion. 0, or a positive errno.
int complete_one(Ring& ring, Completion& out) noexcept {
  if (const int error = ring.wait(kPatience); error != 0) return error;
  return ring.take(std::span(&out, 1)) == 1 ? 0 : ETIME;
}

Result<void> step_enter(Ring& ring) {
  io_uring_sqe* entry = ring.entry();
  if (entry == nullptr) return fail_step("enter", "io_uring_get_sqe", EAGAIN);
  ::io_uring_prep_nop(entry);
  Completion completion;
  if (const int error = complete_one(ring, completion); error != 0) return fail_step("enter", "io_uring_enter", error);
  if (completion.result < 0) return fail_step("enter", "IORING_OP_NOP", -completion.result);
  return {};
}

// Sends one byte and the sending end itself as a descriptor. 0, or a positive errno.
int send_descriptor(int socket) noexcept {
  std::byte byte = {};
  iovec vector = {&byte, 1};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control = {};
  msghdr message = {};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &socket, sizeof(socket));
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == 1 ? 0 : errno;
}

// The first descriptor of a message that carries exactly one; closes all others.
UniqueFd only_descriptor(const Message& message) noexcept {
  UniqueFd first;
  std::size_t count = 0;
  walk_control(message.control, [&](const ControlItem& item) {
    for_each_descriptor(item, [&](int fd) {
      UniqueFd owner = UniqueFd::take(fd);
      if (count++ == 0) first = std::move(owner);
    });
  });
  return count == 1 ? std::move(first) : UniqueFd();
}

Result<void> check_received(BufferRing& buffers, const Completion& completion) {
  constexpr const char* kStep = "multishot recvmsg";
  if (completion.result < 0) return fail_step(kStep, "IORING_OP_RECVMSG", -completion.result);
  if ((completion.flags & IORING_CQE_F_BUFFER) == 0) return fail_step(kStep, "IORING_CQE_F_BUFFER", EOPNOTSUPP);
  const auto id = static_cast<std::uint16_t>(completion.flags >> IORING_CQE_BUFFER_SHIFT);
  const auto message = buffers.message(id, completion.result);
  if (!message) return fail_step(kStep, "the layout of the buffer", EOPNOTSUPP);
  const UniqueFd descriptor = only_descriptor(*message);
  if (!descriptor || message->data.size() != 1) return fail_step(kStep, "SCM_RIGHTS", EOPNOTSUPP);
  const int flags = ::fcntl(descriptor.get(), F_GETFD);
  if (flags < 0 || (flags & FD_CLOEXEC) == 0) return fail_step(kStep, "MSG_CMSG_CLOEXEC", EOPNOTSUPP);
  if ((completion.flags & IORING_CQE_F_MORE) == 0) return fail_step(kStep, "IORING_CQE_F_MORE", EOPNOTSUPP);
  return {};
}

Result<void> step_receive(Ring& ring, BufferRing& buffers) {
  constexpr const char* kStep = "multishot recvmsg";
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    return fail_step(kStep, "socketpair", errno);
  }
  const UniqueFd receiver = UniqueFd::take(ends[0]);
  const UniqueFd sender = UniqueFd::take(ends[1]);
  if (const int error = send_descriptor(sender.get()); error != 0) return fail_step(kStep, "sendmsg", error);
  io_uring_sqe* entry = ring.entry();
  if (entry == nullptr) return fail_step(kStep, "io_uring_get_sqe", EAGAIN);
  buffers.prepare_receive(entry, receiver.get());
  ::io_uring_sqe_set_data64(entry, 1);
  Completion completion;
  if (const int error = complete_one(ring, completion); error != 0) return fail_step(kStep, "io_uring_enter", error);
  GPULOAN_TRY(check_received(buffers, completion));

  // Cancelled before its socket is closed: a request holds its file open.
  entry = ring.entry();
  if (entry == nullptr) return fail_step("cancel", "io_uring_get_sqe", EAGAIN);
  ::io_uring_prep_cancel64(entry, 1, 0);
  ::io_uring_sqe_set_data64(entry, 2);
  for (int i = 0; i < 2; ++i) {
    if (const int error = complete_one(ring, completion); error != 0) return fail_step("cancel", "io_uring_enter", error);
    const int expected = completion.user_data == 1 ? -ECANCELED : 0;
    if (completion.result != expected) return fail_step("cancel", "IORING_OP_ASYNC_CANCEL", EOPNOTSUPP);
  }
  return {};
}

Result<void> test_once() {
  BufferRing buffers; // unmapped after the ring is gone
  Ring ring;
  GPULOAN_TRY(ring.open());
  GPULOAN_TRY(step_enter(ring));
  GPULOAN_TRY(buffers.open(ring, 4));
  return step_receive(ring, buffers);
}

} // namespace

// A failure is not remembered: descriptors and locked memory may be there the next time, and the test is cheap.
Result<void> uring_self_test() {
  static std::atomic<bool> passed = false; // two at once do no harm; a lock might be held where a process forks
  if (!passed) GPULOAN_TRY(test_once());
  passed = true;
  return {};
}

} // namespace gpuloan::loop
