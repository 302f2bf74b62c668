// SPDX-License-Identifier: MIT
//
// Peer: one connection to one process, as both sides see it. Guarded by its context's lock.
#pragma once

#include <channel/socket.hpp>
#include <gate/gate.hpp>
#include <memory/host_ring.hpp>

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace gpuloan::loan {

class Context;

// What the C interface hands out. While the count is not 0 the object keeps itself alive (Context::hold and drop), in a list of the
// context's.
class Handle {
 public:
  [[nodiscard]] bool held() const noexcept { return count_ != 0; }

 private:
  friend class Context;
  std::uint32_t count_ = 0;
  std::shared_ptr<void> self_;
  Handle* next_ = nullptr;
  Handle** link_ = nullptr; // what points to this one
};

struct Outgoing {
  std::vector<std::byte> message;
  std::vector<UniqueFd> fds;
};

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  enum class Phase : std::uint8_t { Hello, Welcome, Mapped, Sealed, Checked, Ready };
  static constexpr std::size_t kOutboxMax = 8192; // messages; a peer that lets more pile up does not read

  explicit Peer(std::shared_ptr<Context> owner) : context(std::move(owner)) {}
  virtual ~Peer() = default;
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  const std::shared_ptr<Context> context;
  Handle handle;
  std::uint64_t tag = 0;
  UniqueFd socket;
  UniqueFd pidfd;
  Phase phase = Phase::Hello;
  bool closed = false; // by this side's caller: its handle is gone
  bool lost = false;
  Error loss; // why, once lost
  bool loss_settled = false; // what hangs on the peer was told; the loop repeats that where there was no memory for it
  bool taken_out = false;    // lost, and no longer in the loop
  bool in_loop = false, pidfd_in_loop = false;
  bool stalled = false; // the outbox waits for something that writability does not tell of
  std::deque<Outgoing> outbox;
  std::uint16_t version = 0;
  bool takes_bundles = false; // messages of several records
  std::vector<channel::DeviceEntry> devices;
  bool sees_device = false; // by UUID: the exporter's device is the one that the importer works on, or that it sees beside it
  std::int32_t pid = 0;
  std::string account;
  gate::Words words;
  memory::RingEnds rings; // of the host rung
  std::mutex words_mutex; // registering the words: a driver call, made without the context's lock
};

} // namespace gpuloan::loan
