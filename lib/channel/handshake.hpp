// SPDX-License-Identifier: MIT
//
// Who may connect: same user, same boot of the same host, a key, a common version. Pure checks and the key ring; the
// records themselves are sent by lib/loan.
#pragma once

#include <channel/socket.hpp>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace gpuloan::channel {

using BootId = std::array<unsigned char, 16>;
[[nodiscard]] Result<BootId> read_boot_id();

// Keys that were minted and not yet spent. A key is claimed by one connection, given back if that ends before WELCOME,
// spent at WELCOME. Comparison does not depend on how much of a key is right.
class KeyRing {
 public:
  static constexpr std::size_t kMaxKeys = 4096;
  // LIMIT at kMaxKeys outstanding keys; INVALID when the account name is too long.
  [[nodiscard]] Result<gpuloan_key> mint(std::string_view account);
  // KEY: unknown, spent, or claimed by another connection (three different sentences). Returns the account.
  [[nodiscard]] Result<std::string> claim(const unsigned char (&key)[GPULOAN_KEY_BYTES]);
  void give_back(const unsigned char (&key)[GPULOAN_KEY_BYTES]) noexcept;
  void spend(const unsigned char (&key)[GPULOAN_KEY_BYTES]) noexcept;
  [[nodiscard]] std::size_t outstanding() const noexcept;

 private:
  struct Entry {
    Entry() noexcept = default;
    Entry(Entry&&) noexcept = default;
    Entry& operator=(Entry&&) noexcept = default;
    ~Entry(); // wipes the key
    gpuloan_key key = {};
    std::string account;
    bool claimed = false;
  };
  static constexpr std::size_t kRemembered = 256; // spent keys, for the sentence only

  // Index in entries_, its size when there is none.
  [[nodiscard]] std::size_t find(const unsigned char (&key)[GPULOAN_KEY_BYTES]) const noexcept;

  std::vector<Entry> entries_;
  std::array<std::uint64_t, kRemembered> spent_ = {};
  std::size_t spent_next_ = 0;
};

struct HelloInfo {
  std::uint16_t version = 0;
  std::vector<DeviceEntry> devices;
  bool has_key = false;
  bool wants_device = false;
};
// Exporter: checks a HELLO in this order: sender known and same uid (UID), boot id (HOST), version range (VERSION),
// device list (PROTOCOL). The key is claimed by the caller after this.
[[nodiscard]] Result<HelloInfo> check_hello(const Received& received, uid_t own_uid, const BootId& own_boot);

struct WelcomeInfo {
  std::uint16_t version = 0;
  std::uint32_t slots = 0;
  std::vector<DeviceEntry> devices;
};
// Importer: what a REFUSED says, at whichever step of the handshake.
[[nodiscard]] Error refusal(const Received& received);
// Importer: WELCOME, or the error that a REFUSED carries.
[[nodiscard]] Result<WelcomeInfo> check_welcome(const Received& received);

// The text in a record's tail, fit for a log line: cut at GPULOAN_TEXT_MAX, control characters replaced.
[[nodiscard]] std::string readable_text(const Received& received);

// A pidfd of the process that sent `sender`'s message: its own SCM_PIDFD, else pidfd_open of a visible pid, else empty.
[[nodiscard]] UniqueFd peer_pidfd(Sender& sender) noexcept;

} // namespace gpuloan::channel
