// SPDX-License-Identifier: MIT
//
// StreamUses: the streams that used one region, and whether the work they had when it was destroyed has passed (rule 11).
//
// Each use is Named (the stream has to be looked at), Recorded (an event stands behind its work) or Unknown (the driver no
// longer takes the stream: nothing about it can be proven); a use that passed is forgotten. A Named stream that is in
// graph capture is not touched and looked at again later.
//
// Streams must stay valid until the region is destroyed; one that is in capture at that time, until its capture has
// ended and the arena was swept.
#pragma once

#include <driver/handles.hpp>

#include <memory>
#include <vector>

namespace gpuloan::memory {

// Events that are done with, kept for the next use: recording one again is one driver call instead of three.
class EventPool {
 public:
  explicit EventPool(std::shared_ptr<driver::Gpu> gpu) : gpu_(std::move(gpu)) {}
  [[nodiscard]] Result<driver::OwnedEvent> take();
  void put(driver::OwnedEvent event) noexcept;

 private:
  static constexpr std::size_t kKept = 16;
  std::shared_ptr<driver::Gpu> gpu_;
  std::vector<driver::OwnedEvent> spare_;
};

class StreamUses {
 public:
  enum class Progress { Passed, Waiting, Unknown };

  // Remembers a stream, once.
  void note(driver::Stream stream);
  [[nodiscard]] bool empty() const noexcept { return uses_.empty(); }
  // Whether one that was not looked at yet is in capture, so that asking again at once is of no use.
  [[nodiscard]] bool in_capture(driver::Gpu& gpu) const;
  // The first call decides what "its work" is: what is in the streams now. Never blocks. Unknown: what is left can never
  // be proven to have passed.
  [[nodiscard]] Progress settle(driver::Gpu& gpu, EventPool& events) noexcept;

 private:
  enum class State { Named, Recorded, Unknown, Passed };
  struct Use {
    driver::Stream stream;
    State state = State::Named;
    driver::OwnedEvent event;
  };
  static void step(Use& use, driver::Gpu& gpu, EventPool& events);
  static void look(Use& use, driver::Gpu& gpu, EventPool& events);
  static void record(Use& use, const driver::Driver& driver, EventPool& events);
  static void query(Use& use, const driver::Driver& driver);
  static void lose(Use& use, const driver::Driver& driver, const char* function, driver::CuResult code);

  std::vector<Use> uses_;
};

} // namespace gpuloan::memory
