// SPDX-License-Identifier: MIT
//
// A peer made by hand: it speaks the wire itself, as wrongly as a test likes. The records are built here from their
// layout and not by the library's own helpers.
#pragma once

#include "../support/host.hpp"

#include <channel/records.hpp>
#include <gpuloan/gpuloan.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace loan_test {

namespace channel = gpuloan::channel;

[[nodiscard]] channel::Record raw_record(channel::Type type);
[[nodiscard]] channel::Record raw_hello(const gpuloan_key* key = nullptr);

class RawClient {
 public:
  struct Message {
    channel::Record record = {};
    std::vector<unsigned char> tail;
    std::vector<Fd> fds;
    [[nodiscard]] channel::Type type() const noexcept { return static_cast<channel::Type>(record.header.type); }
    [[nodiscard]] std::string text() const { return {tail.begin(), tail.end()}; }
  };

  RawClient() noexcept = default;
  explicit RawClient(Fd end) noexcept : socket_(std::move(end)) {}
  [[nodiscard]] static RawClient connect(const std::string& path);

  // As they are; the header's counts are the caller's to get right or wrong. false: the other end is gone.
  bool send_bytes(std::span<const unsigned char> bytes, std::span<const int> fds = {});
  bool send(const channel::Record& record, std::span<const unsigned char> tail = {}, std::span<const int> fds = {});
  // The next record; nothing once the other end has hung up.
  [[nodiscard]] std::optional<Message> receive();
  [[nodiscard]] Message expect_type(channel::Type type);
  // Reads until the other end hangs up; the last record was REFUSED with that status. Its sentence.
  std::string expect_refused(gpuloan_status status);
  // Reads until the other end hangs up, within the time that everything has.
  void expect_closed();
  // HELLO to PAGES_CHECKED.
  void shake_hands(const gpuloan_key* key = nullptr) { shake_hands(raw_hello(key)); }
  void shake_hands(const channel::Record& hello);
  // The exporter's side of the same, behind its WELCOME. Turn 1 of generation 1 is ready in every slot.
  void show_pages(const channel::Record& welcome);
  void send_refused(std::uint16_t version, gpuloan_status status, std::string_view why);
  void close() noexcept { socket_.reset(); }

 private:
  Fd socket_;
};

// An exporter made by hand: where an importer connects to.
class RawListener {
 public:
  explicit RawListener(const std::string& path);
  [[nodiscard]] RawClient accept();

 private:
  Fd socket_;
};

} // namespace loan_test
