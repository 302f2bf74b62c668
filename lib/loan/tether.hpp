// SPDX-License-Identifier: MIT
//
// Tether: the proof that nobody of a peer is left.
//
// A pidfd tells that the process which spoke is dead, not that its GPU work has ended, nor that no forked child goes on
// (S13). The tether is one page of a memfd that the exporter never maps. The importer maps it for writing and registers it
// with its device, and a fork inherits that; the page can be sealed against writing only once no process maps it and
// nothing pins it (S17).
#pragma once

#include <base/unique_fd.hpp>

#include <chrono>
#include <functional>
#include <memory>

namespace gpuloan::loan {

inline constexpr std::size_t kTetherBytes = 4096;
// Between two tries of the seal, twice as long each time: what waits for the proof shall be back within a second of it.
inline constexpr std::chrono::milliseconds kTetherFirstPause{10}, kTetherLongestPause{250};

class Tether {
 public:
  Tether() noexcept = default;
  [[nodiscard]] static Result<Tether> create();
  [[nodiscard]] Result<UniqueFd> for_peer() const { return UniqueFd::dup(fd_.get()); }
  // Tries the seal; true once it holds. Takes up to 160 ms where something pins the page: never on the loop or with a lock.
  [[nodiscard]] bool let_go() const noexcept;
  [[nodiscard]] explicit operator bool() const noexcept { return static_cast<bool>(fd_); }

 private:
  UniqueFd fd_;
};

// For what outlives its exporter: calls `gone` on a thread of its own once `pidfd` tells that the process is dead and the tether was
// let go. Without a pidfd, or where no thread can be had, it is never called.
void keep_until_gone(UniqueFd pidfd, std::shared_ptr<const Tether> tether, std::function<void()> gone) noexcept;

} // namespace gpuloan::loan
