// SPDX-License-Identifier: MIT
//
// Records over a SEQPACKET socket: sending, decoding what an engine received, and the descriptors in it.
#pragma once

#include <base/unique_fd.hpp>
#include <channel/records.hpp>
#include <loop/engine.hpp>

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

namespace gpuloan::channel {

// Descriptors that came with one record. Owns them until taken.
class FdList {
 public:
  [[nodiscard]] std::size_t size() const noexcept { return fds_.size(); }
  [[nodiscard]] UniqueFd take(std::size_t index) noexcept { return std::move(fds_[index]); }
  void reserve(std::size_t count) { fds_.reserve(count); }
  void push(UniqueFd fd) { fds_.push_back(std::move(fd)); }

 private:
  std::vector<UniqueFd> fds_;
};

// Who sent a message, where the socket was asked to say (enable_identity).
struct Sender {
  bool known = false;
  pid_t pid = 0; // 0: in another PID namespace
  uid_t uid = 0;
  UniqueFd pidfd; // empty where the kernel gives none
};

struct Received {
  const Record* record = nullptr; // points into the message: valid during the callback
  std::span<const std::byte> tail;
  std::span<const std::byte> rest; // of the message: more records, for decode_next
  FdList fds;
  Sender sender;
  [[nodiscard]] Type type() const noexcept { return static_cast<Type>(record->header.type); }
  [[nodiscard]] std::string_view tail_text() const noexcept {
    return {reinterpret_cast<const char*>(tail.data()), tail.size()};
  }
};

// Takes every descriptor out of `message`, then checks: not truncated, length, magic, version, known type, tail and
// fd counts that the type allows and that really came, tail length declared == arrived. PROTOCOL names what was wrong;
// FD_LIMIT when descriptors were lost on the way (MSG_CTRUNC). On error everything that came is closed.
[[nodiscard]] Result<Received> decode(const loop::Message& message);
// The next record of a message of several, from the `rest` of the one before.
[[nodiscard]] Result<Received> decode_next(std::span<const std::byte> rest);

// A record of `type` with zeroed body and the header filled in.
[[nodiscard]] Record make_record(Type type) noexcept;
// Puts the version that both sides agreed on into the header; not of HELLO and REFUSED, which every version reads.
void set_version(Record& record, std::uint16_t version) noexcept;

enum class SendResult { Sent, Full, Lost }; // Full: the socket buffer is full, try again when writable
// One non-blocking send. `fds` are borrowed. Fills in fd_count and tail_bytes. Lost: the other end is gone (EPIPE,
// ECONNRESET) or any other error that will not pass; ETOOMANYREFS and EAGAIN are Full.
[[nodiscard]] SendResult send_record(int socket, Record record, std::span<const std::byte> tail = {},
                                     std::span<const int> fds = {}) noexcept;

// The bytes of one message, as send_record would send them; for `fds` descriptors.
[[nodiscard]] std::vector<std::byte> message_of(Record record, std::span<const std::byte> tail, std::size_t fds);
// Sends such bytes.
[[nodiscard]] SendResult send_message(int socket, std::span<const std::byte> message, std::span<const int> fds) noexcept;

// Records without descriptors, to be sent in one message.
class Bundle {
 public:
  // False where there is no room for it.
  [[nodiscard]] bool add(Record record, std::span<const std::byte> tail) noexcept;
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return std::span(bytes_).first(used_); }
  void clear() noexcept { used_ = 0; }

 private:
  alignas(16) std::array<std::byte, kRecordBytes + kTailMax> bytes_;
  std::size_t used_ = 0;
};

// SO_PASSCRED and, where the kernel has it, SO_PASSPIDFD: every later message names its sender.
[[nodiscard]] Result<void> enable_identity(int socket);
// Once the sender is known: the kernel makes a descriptor for each message otherwise.
void disable_identity(int socket) noexcept;

// The file of a listening socket. Its folder is held open: a chdir() changes nothing.
struct SocketFile {
  UniqueFd folder; // empty: the name is a path
  std::string name;
  dev_t device = 0;
  ino_t inode = 0;
  // Unlinks it, unless something else is there now.
  void remove() const noexcept;
};

struct Listener {
  UniqueFd socket;
  SocketFile file; // stays until it is removed
};

// A socket path: at most 107 bytes; mode 0600; a stale file (nobody listens) is replaced, a live one is ADDRESS_IN_USE,
// a file that is no socket is INVALID and left alone. Non-blocking, CLOEXEC.
[[nodiscard]] Result<Listener> listen_at(const char* path);
// Empty when nobody waits.
[[nodiscard]] Result<UniqueFd> accept_one(int listener);
// CONNECT with the errno when nobody listens, UID when the socket is another user's, INVALID for a folder that is closed to this one. Waits for a full backlog until the deadline (TIMEOUT).
[[nodiscard]] Result<UniqueFd> connect_to(const char* path, std::uint64_t deadline_ns);
// INVALID unless `fd` is a connected AF_UNIX SOCK_SEQPACKET socket; sets CLOEXEC and non-blocking.
[[nodiscard]] Result<void> check_inherited(int fd);

} // namespace gpuloan::channel
