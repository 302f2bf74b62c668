// SPDX-License-Identifier: MIT
//
// The other end of a connection, in the hands of a fuzzer: it makes records out of the input, from the layout and not by the
// library's helpers, and reads what the library sends.
#pragma once

#include "fuzz.hpp"

#include <base/unique_fd.hpp>
#include <channel/records.hpp>

#include <optional>
#include <vector>

namespace gpuloan::fuzz {

struct Arrived {
  channel::Record record = {};
  std::vector<std::byte> tail;
  std::vector<UniqueFd> fds;
  [[nodiscard]] channel::Type type() const { return static_cast<channel::Type>(record.header.type); }
};

class Wire {
 public:
  Wire() = default;
  // `theirs` goes to the library.
  [[nodiscard]] static Wire open(UniqueFd& theirs);

  // False once nothing can be sent any more. The header's counts are sent as they are.
  bool send(const channel::Record& record, std::span<const std::uint8_t> tail = {}, std::span<const int> fds = {});
  bool send_bytes(std::span<const std::uint8_t> bytes, std::span<const int> fds = {});
  // The next record that is there; each is checked against the table of what a record may carry.
  [[nodiscard]] std::optional<Arrived> receive();
  [[nodiscard]] bool hung_up() const { return hung_up_; }
  void close() { socket_.reset(); }
  [[nodiscard]] int fd() const { return socket_.get(); }

 private:
  UniqueFd socket_;
  bool hung_up_ = false;
};

[[nodiscard]] channel::Record make(channel::Type type);
// HELLO of this process, without a device.
[[nodiscard]] channel::Record make_hello();
// A memfd of `bytes`.
[[nodiscard]] UniqueFd make_pages(std::size_t bytes, bool sealed);
// Any record that may pass decode(): its type, body and tail from the input, the header as its type wants it. What was sent.
channel::Record send_any(Wire& wire, Input& input);
// Bytes that need not be a record at all.
void send_rubbish(Wire& wire, Input& input);

} // namespace gpuloan::fuzz
