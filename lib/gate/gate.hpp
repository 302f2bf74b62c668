// SPDX-License-Identifier: MIT
//
// Gates: what orders one side's work after the other's.
//
//   memop  the stream writes the control word behind its work (cuStreamWriteValue64, flags 0: it fences the earlier
//          writes of that stream, S12); a stream that is idle costs no driver work, the CPU stores the word
//   event  an interprocess event is recorded behind the work; it counts only after the peer's record said so and a
//          query made after that succeeded, since a query alone proves nothing (S11), and no stream ever waits on it (S5)
//   host   the stream is synchronised, then the CPU stores the word
//
// A word that has the value has passed under every gate, so CPU work needs no stream, and a released slot needs no event.
#pragma once

#include <gate/words.hpp>

#include <span>

namespace gpuloan::gate {

using driver::Gpu;
using driver::OwnedEvent;
using Stream = cuda::Stream;

// GPULOAN_STREAM_CPU: no stream at all.
[[nodiscard]] inline bool is_cpu(Stream stream) noexcept { return reinterpret_cast<void*>(stream) == GPULOAN_STREAM_CPU; }

// CAPTURE when the stream is in graph capture; asks nothing else of it, since a query would invalidate the capture.
[[nodiscard]] Result<void> refuse_capture(Gpu& gpu, Stream stream);
// True when the stream has no unfinished work. Not for the legacy stream: it is never called idle.
[[nodiscard]] bool is_idle(Gpu& gpu, Stream stream) noexcept;
// Records `event` behind what was just queued in `stream`. Where the driver refuses, that is waited for before the error is returned:
// the caller undoes the rest, and nothing may come late.
[[nodiscard]] Result<void> record_or_wait(Gpu& gpu, const OwnedEvent& event, Stream stream);
// Makes `stream` wait for what is now in `others` (local events only).
[[nodiscard]] Result<void> join(const std::shared_ptr<Gpu>& gpu, Stream stream, std::span<const Stream> others);

enum class Posted {
  Now,   // passed already: the word has its value
  Queued // the device will write the word, or complete the event, behind the stream's work
};

// One end of a gate: where a side says that its turn is ready or done.
struct Post {
  Words& words;
  std::uint32_t slot;
  Word word;
  std::uint64_t value;
  gpuloan_gate gate;       // memop, event or host
  const OwnedEvent* event; // event gate only
  bool busy = false;       // the stream most likely has work, so it is not asked
  const OwnedEvent* ahead = nullptr; // memop: recorded behind the work and in front of the word, where the device writes that
};
// Orders the word behind the work now in `stream`. The host gate blocks until that work is complete. Where `written` is
// given and the device will write the word, an event is recorded there behind that write: the word itself proves nothing,
// since the peer can write it too.
[[nodiscard]] Result<Posted> post(const std::shared_ptr<Gpu>& gpu, Stream stream, const Post& target, OwnedEvent* written = nullptr);

// The other end. `recorded`: the peer's record for this turn has come. An event that can't be queried is an error.
[[nodiscard]] Result<bool> passed(const Post& target, bool recorded);

// Makes `stream` wait for the word on the device. The caller counts it against the cap and owes the release.
[[nodiscard]] Result<void> wait_on_stream(Gpu& gpu, Stream stream, const Post& target);

} // namespace gpuloan::gate
