// SPDX-License-Identifier: MIT
//
// Any message through decode() and, where it has several records, decode_next(): data, control buffer and flags as an engine would hand them over. The control buffer's
// descriptors are real ones. Whatever decode() says, all of them are closed once its result is gone; what it lets through
// is a record that carries exactly what its type allows.
//
// Input: flags, length of the control buffer (2 bytes), the control buffer, the data.
#include "control_model.hpp"

#include <channel/rules.hpp>
#include <channel/socket.hpp>

#include <fcntl.h>
#include <unistd.h>

using namespace gpuloan;

namespace {

constexpr std::size_t kControlMax = loop::kControlBytes + 64; // more than an engine gives, too

struct Message {
  alignas(16) std::byte control[kControlMax] = {};
  alignas(16) std::byte data[loop::kDataBytes] = {};
  std::size_t control_bytes = 0, data_bytes = 0;
  int flags = 0;
  std::vector<int> fds;

  explicit Message(fuzz::Input input) {
    const std::uint8_t bits = input.byte();
    flags = ((bits & 1U) != 0 ? MSG_TRUNC : 0) | ((bits & 2U) != 0 ? MSG_CTRUNC : 0) | ((bits & 4U) != 0 ? MSG_EOR : 0);
    control_bytes = copy(input.bytes(input.number<std::uint16_t>() % (kControlMax + 1)), control);
    data_bytes = copy(input.bytes(loop::kDataBytes), data);
    open_descriptors();
  }
  static std::size_t copy(std::span<const std::uint8_t> from, std::byte* to) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
    return from.size();
  }
  // As the kernel does: a number is a descriptor of this process, or a negative errno. What lies beyond the room of an
  // engine is not looked at by decode(); the kernel would never have put a descriptor there.
  void open_descriptors() {
    const auto looked_at = std::span(control).first(std::min(control_bytes, loop::kControlBytes));
    for (const std::size_t at : fuzz::model_of(looked_at).descriptors) {
      int number = -1;
      std::memcpy(&number, control + at, sizeof number);
      if (number < 0) continue;
      number = ::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
      FUZZ_REQUIRE(number >= 0);
      fds.push_back(number);
      std::memcpy(control + at, &number, sizeof number);
    }
  }
  [[nodiscard]] loop::Message view() const { return {std::span(data).first(data_bytes), std::span(control).first(control_bytes), flags}; }
};

void check_record(const channel::Received& received) {
  const channel::Header& header = received.record->header;
  FUZZ_REQUIRE(header.magic == channel::kMagic && header.reserved == 0);
  const channel::TypeRule* rule = channel::rule_of(header.type);
  FUZZ_REQUIRE(rule != nullptr && rule->type == received.type());
  FUZZ_REQUIRE(received.fds.size() == rule->fd_count && header.fd_count == rule->fd_count);
  FUZZ_REQUIRE(received.tail.size() == header.tail_bytes && header.tail_bytes <= rule->tail_max);
}

void check_accepted(const Message& message, const channel::Received& received) {
  FUZZ_REQUIRE((message.flags & (MSG_TRUNC | MSG_CTRUNC)) == 0);
  FUZZ_REQUIRE(message.control_bytes <= loop::kControlBytes);
  check_record(received);
  const std::size_t ends = channel::kRecordBytes + received.record->header.tail_bytes;
  if (received.rest.empty()) {
    FUZZ_REQUIRE(message.data_bytes == ends);
  } else {
    FUZZ_REQUIRE(received.fds.size() == 0 && received.rest.size() >= channel::kRecordBytes);
    FUZZ_REQUIRE(message.data_bytes == channel::bundle_step(ends) + received.rest.size());
  }
  FUZZ_REQUIRE(received.fds.size() + (received.sender.pidfd ? 1U : 0U) == message.fds.size());
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Message message{fuzz::Input(data, size)};
  {
    const auto received = channel::decode(message.view());
    if (received) {
      check_accepted(message, *received);
      std::size_t records = 1;
      for (auto rest = received->rest; !rest.empty();) {
        const auto next = channel::decode_next(rest);
        if (!next) {
          FUZZ_REQUIRE(next.error().status == GPULOAN_ERR_PROTOCOL);
          break;
        }
        check_record(*next);
        FUZZ_REQUIRE(next->fds.size() == 0 && next->rest.size() < rest.size() && ++records <= loop::kDataBytes / channel::kRecordBytes);
        rest = next->rest;
      }
      for (const int fd : message.fds) FUZZ_REQUIRE(fuzz::is_open(fd));
    } else {
      FUZZ_REQUIRE(received.error().status == GPULOAN_ERR_PROTOCOL || received.error().status == GPULOAN_ERR_FD_LIMIT);
      FUZZ_REQUIRE(!received.error().text.empty());
      for (const int fd : message.fds) FUZZ_REQUIRE(!fuzz::is_open(fd)); // with the error already
    }
  }
  for (const int fd : message.fds) FUZZ_REQUIRE(!fuzz::is_open(fd));
  return 0;
}
