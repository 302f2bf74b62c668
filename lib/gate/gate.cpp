// SPDX-License-Identifier: MIT
#include <gate/gate.hpp>

namespace gpuloan::gate {
namespace {

[[nodiscard]] bool is_legacy(Stream stream) noexcept { return stream == nullptr || stream == cuda::legacy_stream(); }

[[nodiscard]] Result<Posted> post_memop(const std::shared_ptr<Gpu>& shared, Stream stream, const Post& target, OwnedEvent* written) {
  Gpu& gpu = *shared;
  if (!target.busy && is_idle(gpu, stream)) {
    target.words.store(target.slot, target.word, target.value);
    return Posted::Now;
  }
  if (target.ahead != nullptr) GPULOAN_TRY(target.ahead->record(stream));
  GPULOAN_TRY(GPULOAN_CU(gpu.driver(), cuStreamWriteValue64, stream, target.words.device(target.slot, target.word),
                         target.value, cuda::WriteDefault));
  if (written != nullptr) {
    auto event = OwnedEvent::create(shared, cuda::EventDisableTiming);
    if (!event) return forward(std::move(event.error()));
    GPULOAN_TRY(record_or_wait(gpu, *event, stream));
    *written = std::move(*event);
  }
  return Posted::Queued;
}

[[nodiscard]] Result<Posted> post_host(Gpu& gpu, Stream stream, const Post& target) {
  GPULOAN_TRY(GPULOAN_CU(gpu.driver(), cuStreamSynchronize, stream));
  target.words.store(target.slot, target.word, target.value);
  return Posted::Now;
}

} // namespace

Result<void> refuse_capture(Gpu& gpu, Stream stream) {
  if (is_cpu(stream) || !gpu.floors().has(GPULOAN_FLOOR_CAPTURE_QUERY)) return {};
  int status = cuda::CaptureNone;
  const cuda::CuResult code = gpu.driver().call.cuStreamIsCapturing(stream, &status);
  // The legacy stream answers with an error while a blocking stream of the context is in capture.
  if (code == cuda::StreamCaptureImplicit || (code == cuda::Success && status != cuda::CaptureNone)) {
    return fail(GPULOAN_ERR_CAPTURE, "the stream is in graph capture; gpuloan does not enqueue into captures: call it "
                                     "before the capture begins or after it ends, or pass another stream");
  }
  if (code == cuda::NotSupported) return {}; // no captures, then
  return gpu.driver().check("cuStreamIsCapturing", code);
}

bool is_idle(Gpu& gpu, Stream stream) noexcept {
  return !is_legacy(stream) && gpu.driver().call.cuStreamQuery(stream) == cuda::Success;
}

Result<void> record_or_wait(Gpu& gpu, const OwnedEvent& event, Stream stream) {
  auto recorded = event.record(stream);
  if (!recorded) static_cast<void>(gpu.driver().call.cuStreamSynchronize(stream));
  return recorded;
}

Result<void> join(const std::shared_ptr<Gpu>& gpu, Stream stream, std::span<const Stream> others) {
  Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  for (const Stream other : others) {
    if (other == stream || is_cpu(other)) continue;
    GPULOAN_TRY(refuse_capture(*gpu, other)); // a record would go into the capture
    auto event = OwnedEvent::create(gpu, cuda::EventDisableTiming);
    if (!event) return forward(std::move(event.error()));
    GPULOAN_TRY(event->record(other));
    // The driver keeps a destroyed event alive until the wait that names it is over.
    GPULOAN_TRY(GPULOAN_CU(gpu->driver(), cuStreamWaitEvent, stream, event->get(), 0));
  }
  return {};
}

Result<Posted> post(const std::shared_ptr<Gpu>& gpu, Stream stream, const Post& target, OwnedEvent* written) {
  if (is_cpu(stream) || gpu == nullptr) {
    target.words.store(target.slot, target.word, target.value);
    return Posted::Now;
  }
  Gpu::Scope scope(*gpu); // the loop's thread has no context of its own
  GPULOAN_TRY(scope.ok());
  switch (target.gate) {
    case GPULOAN_GATE_MEMOP:
      return post_memop(gpu, stream, target, written);
    case GPULOAN_GATE_EVENT:
      GPULOAN_TRY(target.event->record(stream));
      return Posted::Queued;
    default:
      return post_host(*gpu, stream, target);
  }
}

Result<bool> passed(const Post& target, bool recorded) {
  if (reached(target.words.load(target.slot, target.word), target.value)) return true;
  if (target.gate != GPULOAN_GATE_EVENT || !recorded || target.event == nullptr) return false;
  return target.event->query();
}

Result<void> wait_on_stream(Gpu& gpu, Stream stream, const Post& target) {
  return GPULOAN_CU(gpu.driver(), cuStreamWaitValue64, stream, target.words.device(target.slot, target.word),
                    target.value, cuda::WaitGeq);
}

} // namespace gpuloan::gate
