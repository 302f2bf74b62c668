// SPDX-License-Identifier: MIT
//
// The state of a capture is a field of its stream; what is here decides which calls it swallows, fails or does not
// bear.
#include <sim/api.hpp>
#include <sim/capture.hpp>

#include <utility>

namespace gpuloan::sim {
namespace {

// Captures going on in the whole process, so that the everyday call costs one load.
std::atomic<unsigned> captures{0};

thread_local int thread_mode = CaptureGlobal;

bool capturing(const StreamState& stream) noexcept { return stream.capture != CaptureNone; }

void invalidate(StreamState& stream) noexcept { stream.capture = CaptureInvalidated; }

// With the context locked.
bool invalidate_if(ContextState& context, bool (*matches)(const StreamState&)) noexcept {
  bool any = false;
  for (const StreamRef& stream : context.streams) {
    if (!matches(*stream)) continue;
    invalidate(*stream);
    any = true;
  }
  return any;
}

// The legacy stream would have to wait for these.
bool captures_and_blocks(const StreamState& stream) noexcept { return stream.blocking() && capturing(stream); }

bool blocking_capture_exists(const ContextState& context) noexcept {
  for (const StreamRef& stream : context.streams) {
    if (captures_and_blocks(*stream)) return true;
  }
  return false;
}

bool prohibits(const StreamState& stream) noexcept {
  if (!capturing(stream) || stream.capture_mode == CaptureRelaxed) return false;
  if (stream.capture_thread == std::this_thread::get_id()) return true;
  return thread_mode == CaptureGlobal && stream.capture_mode == CaptureGlobal;
}

} // namespace

CuResult capture_submit(StreamState& stream, bool& swallowed) {
  swallowed = false;
  if (captures.load(std::memory_order_acquire) == 0) return Success;
  if (stream.capture == CaptureInvalidated) return StreamCaptureInvalidated;
  swallowed = stream.capture == CaptureActive;
  if (stream.kind == StreamKind::Legacy && invalidate_if(*stream.context, captures_and_blocks))
    return StreamCaptureImplicit;
  return Success;
}

CuResult capture_forbids(StreamState& stream) {
  if (captures.load(std::memory_order_acquire) == 0) return Success;
  if (capturing(stream)) {
    invalidate(stream);
    return StreamCaptureUnsupported;
  }
  if (stream.kind == StreamKind::Legacy && invalidate_if(*stream.context, captures_and_blocks))
    return StreamCaptureImplicit;
  return Success;
}

void capture_abandon(StreamState& stream) {
  if (capturing(stream)) captures.fetch_sub(1, std::memory_order_release);
  stream.capture = CaptureNone;
}

CuResult capture_forbids_unsafe_call() {
  if (captures.load(std::memory_order_acquire) == 0 || thread_mode == CaptureRelaxed) return Success;
  bool any = false;
  for (const ContextRef& context : all_contexts()) {
    const std::lock_guard lock(context->mutex);
    any = invalidate_if(*context, prohibits) || any;
  }
  return any ? StreamCaptureUnsupported : Success;
}

CuResult capture_forbids_context(ContextState& context) {
  if (captures.load(std::memory_order_acquire) == 0) return Success;
  const std::lock_guard lock(context.mutex);
  return invalidate_if(context, capturing) ? StreamCaptureUnsupported : Success;
}

namespace api {

CuResult cuStreamIsCapturing(Stream stream, int* status) {
  if (status == nullptr) return InvalidValue;
  StreamRef found;
  if (const CuResult result = resolve_stream(stream, found)) return result;
  const std::lock_guard lock(found->context->mutex);
  // Documented: asked about the legacy stream while a blocking one captures, it says so and leaves the capture alone.
  if (found->kind == StreamKind::Legacy && blocking_capture_exists(*found->context)) return StreamCaptureImplicit;
  *status = found->capture;
  return Success;
}

CuResult cuThreadExchangeStreamCaptureMode(int* mode) {
  if (mode == nullptr || *mode < CaptureGlobal || *mode > CaptureRelaxed) return InvalidValue;
  *mode = std::exchange(thread_mode, *mode);
  return Success;
}

CuResult cuStreamBeginCapture(Stream stream, int mode) {
  if (mode < CaptureGlobal || mode > CaptureRelaxed) return InvalidValue;
  StreamRef found;
  if (const CuResult result = resolve_stream(stream, found)) return result;
  if (found->kind == StreamKind::Legacy) return StreamCaptureUnsupported;
  const std::lock_guard lock(found->context->mutex);
  if (capturing(*found)) return IllegalState;
  found->capture = CaptureActive;
  found->capture_mode = mode;
  found->capture_thread = std::this_thread::get_id();
  captures.fetch_add(1, std::memory_order_release);
  return Success;
}

CuResult cuStreamEndCapture(Stream stream, void** graph) {
  StreamRef found;
  if (const CuResult result = resolve_stream(stream, found)) return result;
  const std::lock_guard lock(found->context->mutex);
  if (!capturing(*found)) return IllegalState;
  const bool valid = found->capture == CaptureActive;
  capture_abandon(*found);
  static char token; // a graph that holds nothing and that nothing here takes
  if (graph != nullptr) *graph = valid ? &token : nullptr;
  return valid ? Success : StreamCaptureInvalidated;
}

} // namespace api
} // namespace gpuloan::sim
