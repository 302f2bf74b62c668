// SPDX-License-Identifier: MIT
//
// How a stream is asked, in this order:
//   1. cuStreamIsCapturing, where the floor is there: a query would invalidate a capture.
//   2. cuStreamQuery: an idle stream needs no event. Not for the legacy stream, whose query says nothing of the other
//      blocking streams that it stands for.
//   3. an event behind its work, queried now and at every sweep. A stream of another context takes no event of ours;
//      its query is repeated instead, which proves more than is needed and is therefore right, only later.
// The per-thread stream is another one in every thread, and a region may be destroyed or swept by any of them, so the
// legacy stream stands for it: an event there is behind all blocking streams, per-thread ones included.
//
// A sticky error ends the context's work along with the context, so it counts as passed. An invalid stream or context
// proves nothing.
#include <memory/arena_streams.hpp>

#include <base/log.hpp>

#include <algorithm>

namespace gpuloan::memory {
namespace {

bool is_capture(driver::CuResult code) noexcept {
  return code >= driver::StreamCaptureUnsupported && code < driver::StreamCaptureUnsupported + 10;
}

bool is_dead_handle(driver::CuResult code) noexcept {
  return code == driver::InvalidHandle || code == driver::InvalidValue || code == driver::InvalidContext ||
         code == driver::ContextIsDestroyed;
}

bool is_sticky(const driver::Driver& driver, const char* function, driver::CuResult code) {
  return code != driver::ContextIsDestroyed && driver.error(function, code).status == GPULOAN_ERR_DEVICE_LOST;
}

// Also when the driver will not say: for the legacy stream it refuses while any blocking stream is in capture (906).
bool is_capturing(const driver::Gpu& gpu, driver::Stream stream) {
  if (!gpu.floors().has(GPULOAN_FLOOR_CAPTURE_QUERY)) return false;
  int status = driver::CaptureNone;
  const driver::CuResult code = gpu.driver().call.cuStreamIsCapturing(stream, &status);
  return code == driver::Success ? status != driver::CaptureNone : is_capture(code);
}

} // namespace

Result<driver::OwnedEvent> EventPool::take() {
  if (spare_.empty()) return driver::OwnedEvent::create(gpu_, driver::EventDisableTiming);
  driver::OwnedEvent event = std::move(spare_.back());
  spare_.pop_back();
  return event;
}

void EventPool::put(driver::OwnedEvent event) noexcept {
  if (!event || spare_.size() >= kKept) return;
  try {
    spare_.push_back(std::move(event));
  } catch (...) { // no memory for the list: the event is destroyed
  }
}

void StreamUses::note(driver::Stream stream) {
  if (stream == nullptr || stream == driver::per_thread_stream()) stream = driver::legacy_stream();
  const bool known = std::any_of(uses_.begin(), uses_.end(), [=](const Use& use) { return use.stream == stream; });
  if (!known) uses_.push_back({stream, State::Named, {}});
}

bool StreamUses::in_capture(driver::Gpu& gpu) const {
  const driver::Gpu::Scope scope(gpu);
  return scope.ok() && std::any_of(uses_.begin(), uses_.end(), [&](const Use& use) { return use.state == State::Named && is_capturing(gpu, use.stream); });
}

void StreamUses::lose(Use& use, const driver::Driver& driver, const char* function, driver::CuResult code) {
  use.state = State::Unknown;
  GPULOAN_LOG(GPULOAN_LOG_WARNING,
              "a stream that used a region or a block, or its context, is no longer valid, so those bytes stay unused until "
              "the peer's arena, or the process, ends (destroy streams after the memory they used): " +
                  driver.error(function, code).text);
}

StreamUses::Progress StreamUses::settle(driver::Gpu& gpu, EventPool& events) noexcept {
  if (uses_.empty()) return Progress::Passed;
  try {
    const driver::Gpu::Scope scope(gpu);
    if (!scope.ok()) return Progress::Unknown; // for now: asked again at the next sweep
    for (Use& use : uses_) step(use, gpu, events);
  } catch (...) { // no host memory for an event or a message: tried again at the next sweep
  }
  std::erase_if(uses_, [&](Use& use) {
    if (use.state == State::Passed) events.put(std::move(use.event));
    return use.state == State::Passed;
  });
  if (uses_.empty()) return Progress::Passed;
  const bool waiting = std::any_of(uses_.begin(), uses_.end(), [](const Use& use) { return use.state != State::Unknown; });
  return waiting ? Progress::Waiting : Progress::Unknown;
}

void StreamUses::step(Use& use, driver::Gpu& gpu, EventPool& events) {
  if (use.state == State::Named) look(use, gpu, events);
  if (use.state == State::Recorded) query(use, gpu.driver());
}

void StreamUses::look(Use& use, driver::Gpu& gpu, EventPool& events) {
  const driver::Driver& driver = gpu.driver();
  if (is_capturing(gpu, use.stream)) return;
  if (use.stream == driver::legacy_stream()) return record(use, driver, events);
  const driver::CuResult code = driver.call.cuStreamQuery(use.stream);
  if (code == driver::Success || is_sticky(driver, "cuStreamQuery", code)) {
    use.state = State::Passed;
  } else if (is_dead_handle(code)) {
    lose(use, driver, "cuStreamQuery", code);
  } else if (code == driver::NotReady) {
    record(use, driver, events);
  }
}

// Failures leave the use Named.
void StreamUses::record(Use& use, const driver::Driver& driver, EventPool& events) {
  auto event = events.take();
  if (!event) return;
  if (driver.call.cuEventRecord(event->get(), use.stream) != driver::Success) return events.put(std::move(*event));
  use.event = std::move(*event);
  use.state = State::Recorded;
}

void StreamUses::query(Use& use, const driver::Driver& driver) {
  const driver::CuResult code = driver.call.cuEventQuery(use.event.get());
  if (code == driver::NotReady) return;
  if (code == driver::Success || is_sticky(driver, "cuEventQuery", code)) {
    use.state = State::Passed;
  } else if (is_dead_handle(code)) {
    lose(use, driver, "cuEventQuery", code);
  }
}

} // namespace gpuloan::memory
