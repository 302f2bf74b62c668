// SPDX-License-Identifier: MIT
//
// Batch: the buffers of one recvmmsg, and what was received into them and not yet handed out.
#pragma once

#include <loop/cmsg.hpp>
#include <loop/engine.hpp>

#include <array>
#include <cerrno>
#include <sys/socket.h>

namespace gpuloan::loop {

inline constexpr std::size_t kBatch = 16;
// drain() ends after so many batches, since a peer may send faster than it is read. No socket buffer holds as much.
inline constexpr std::size_t kDrainBatches = 256;

[[nodiscard]] inline std::unexpected<Error> fail_no_socket(int fd) {
  return fail(GPULOAN_ERR_INVALID, "descriptor " + std::to_string(fd) + " is no open socket of the loop");
}

// Buffers of one recvmmsg. Messages that were received and not handed to the handler (it removed the socket, or threw)
// are dropped with their descriptors.
class Batch {
 public:
  Batch() : slots_(std::make_unique<std::array<Slot, kBatch>>()) {
    for (std::size_t i = 0; i < kBatch; ++i) {
      vectors_[i] = {(*slots_)[i].data.data(), kDataBytes};
      headers_[i].msg_hdr.msg_iov = &vectors_[i];
      headers_[i].msg_hdr.msg_iovlen = 1;
      headers_[i].msg_hdr.msg_control = (*slots_)[i].control.data();
    }
  }

  // Number of messages, or -1 with errno. At end of file the kernel fills the rest with messages of length 0. ECONNRESET
  // is read past: a dead peer's last records are behind it, and the kernel reports it once.
  int receive(int socket) noexcept {
    int received = -1;
    do {
      for (mmsghdr& header : headers_) header.msg_hdr.msg_controllen = kControlBytes;
      received = ::recvmmsg(socket, headers_.data(), kBatch, MSG_DONTWAIT | MSG_CMSG_CLOEXEC, nullptr);
    } while (received < 0 && (errno == EINTR || errno == ECONNRESET));
    next_ = 0;
    end_ = received > 0 ? static_cast<std::size_t>(received) : 0;
    return received;
  }
  [[nodiscard]] bool empty() const noexcept { return next_ == end_; }
  [[nodiscard]] Message take() noexcept {
    const mmsghdr& header = headers_[next_];
    const Slot& slot = (*slots_)[next_];
    ++next_;
    return {std::span(slot.data).first(header.msg_len), std::span(slot.control).first(header.msg_hdr.msg_controllen),
            header.msg_hdr.msg_flags};
  }
  void drop_rest() noexcept {
    while (!empty()) close_descriptors(take().control);
  }
  // At the end of its scope.
  struct DropRest {
    Batch& batch;
    ~DropRest() { batch.drop_rest(); }
  };

 private:
  struct Slot {
    alignas(16) std::array<std::byte, kDataBytes> data;
    alignas(16) std::array<std::byte, kControlBytes> control;
  };
  std::unique_ptr<std::array<Slot, kBatch>> slots_;
  std::array<mmsghdr, kBatch> headers_ = {};
  std::array<iovec, kBatch> vectors_ = {};
  std::size_t next_ = 0;
  std::size_t end_ = 0;
};

} // namespace gpuloan::loop
