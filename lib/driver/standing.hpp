// SPDX-License-Identifier: MIT
//
// Calls that stand behind all queued work of their context, and what they must not stand behind (fact S10).
//
// cuIpcCloseMemHandle, cuMemHostUnregister and cuMemFree return when everything that is queued in their context is through. Until then
// no thread gets a launch, a copy, an event record or a registration done in it (`sim_answers DRIVER standing`). Behind a
// stream that waits for a peer's word that can be a deadlock: the peer may wait for what cannot be launched. So no such call begins
// while a stream of ours waits for a peer, and no stream begins to wait while such a call is under way. All of it for the whole
// process, since contexts of this library may share a CUDA context.
#pragma once

#include <optional>
#include <utility>

namespace gpuloan::driver {

// A stream waits for a peer, for as long as this lives.
class StreamWait {
 public:
  // None while a standing call is under way, or has waited for long: for 10 ms in 100 then.
  [[nodiscard]] static std::optional<StreamWait> begin() noexcept;
  StreamWait(StreamWait&& other) noexcept : begun_(std::exchange(other.begun_, false)) {}
  StreamWait& operator=(StreamWait&& other) noexcept {
    std::swap(begun_, other.begun_);
    return *this;
  }
  ~StreamWait();

 private:
  StreamWait() noexcept = default;
  bool begun_ = true;
};

// Around such a call. The constructor waits until no stream waits for a peer, so it is for threads that may.
class StandingCall {
 public:
  StandingCall() noexcept;
  StandingCall(const StandingCall&) = delete;
  StandingCall& operator=(const StandingCall&) = delete;
  ~StandingCall();
};

} // namespace gpuloan::driver
