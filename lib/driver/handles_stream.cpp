// SPDX-License-Identifier: MIT
//
// Streams and events. Both end in their own context: a destructor that cannot enter it (a sticky error, a context that
// the caller destroyed) leaves the object, which went with the context.
#include <driver/handles.hpp>

#include <driver/require.hpp>

#include <chrono>
#include <thread>

namespace gpuloan::driver {
namespace {

// Where the driver does not sleep, for whatever reason.
template <typename Queried>
Result<void> poll(const Queried& what) {
  while (true) {
    const auto over = what.query();
    if (!over) return forward(Error(over.error()));
    if (*over) return {};
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

} // namespace

Result<OwnedStream> OwnedStream::create(std::shared_ptr<Gpu> gpu) {
  const Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  Stream stream = nullptr;
  GPULOAN_TRY(GPULOAN_CU(gpu->driver(), cuStreamCreate, &stream, StreamNonBlocking));
  OwnedStream made;
  made.stream_ = stream;
  made.gpu_ = std::move(gpu);
  return made;
}

OwnedStream::OwnedStream(OwnedStream&& other) noexcept
    : gpu_(std::move(other.gpu_)), stream_(std::exchange(other.stream_, nullptr)) {}

OwnedStream& OwnedStream::operator=(OwnedStream&& other) noexcept {
  OwnedStream taken(std::move(other));
  std::swap(gpu_, taken.gpu_);
  std::swap(stream_, taken.stream_);
  return *this;
}

OwnedStream::~OwnedStream() {
  if (stream_ == nullptr || !calls_allowed()) return;
  const Gpu::Scope scope(*gpu_);
  if (scope.ok()) gpu_->driver().call.cuStreamDestroy(stream_);
}

Result<bool> OwnedStream::query() const {
  const Gpu::Scope scope(*gpu_);
  if (!scope.ok()) return scope.over();
  return gpu_->driver().over("cuStreamQuery", gpu_->driver().call.cuStreamQuery(stream_));
}

Result<void> OwnedStream::synchronize() const {
  const Gpu::Scope scope(*gpu_);
  if (scope.ok() && gpu_->driver().call.cuStreamSynchronize(stream_) == Success) return {};
  return poll(*this);
}

Result<OwnedEvent> OwnedEvent::create(std::shared_ptr<Gpu> gpu, unsigned flags) {
  if ((flags & EventInterprocess) != 0) GPULOAN_TRY(require(gpu->driver(), Group::IpcEvents));
  const Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  Event event = nullptr;
  GPULOAN_TRY(GPULOAN_CU(gpu->driver(), cuEventCreate, &event, flags | EventDisableTiming));
  OwnedEvent made;
  made.event_ = event;
  made.blocking_ = (flags & EventBlockingSync) != 0;
  made.gpu_ = std::move(gpu);
  return made;
}

Result<OwnedEvent> OwnedEvent::open_ipc(std::shared_ptr<Gpu> gpu, const IpcEventHandle& handle) {
  GPULOAN_TRY(require(gpu->driver(), Group::IpcEvents));
  const Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  Event event = nullptr;
  GPULOAN_TRY(GPULOAN_CU(gpu->driver(), cuIpcOpenEventHandle, &event, handle));
  OwnedEvent made;
  made.event_ = event;
  made.gpu_ = std::move(gpu);
  return made;
}

OwnedEvent::OwnedEvent(OwnedEvent&& other) noexcept
    : gpu_(std::move(other.gpu_)), event_(std::exchange(other.event_, nullptr)), blocking_(other.blocking_) {}

OwnedEvent& OwnedEvent::operator=(OwnedEvent&& other) noexcept {
  OwnedEvent taken(std::move(other));
  std::swap(gpu_, taken.gpu_);
  std::swap(event_, taken.event_);
  std::swap(blocking_, taken.blocking_);
  return *this;
}

OwnedEvent::~OwnedEvent() {
  if (event_ == nullptr || !calls_allowed()) return;
  const Gpu::Scope scope(*gpu_);
  if (scope.ok()) gpu_->driver().call.cuEventDestroy(event_);
}

Result<IpcEventHandle> OwnedEvent::ipc_handle() const {
  GPULOAN_TRY(require(gpu_->driver(), Group::IpcEvents));
  const Gpu::Scope scope(*gpu_);
  GPULOAN_TRY(scope.ok());
  IpcEventHandle handle = {};
  GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuIpcGetEventHandle, &handle, event_));
  return handle;
}

Result<void> OwnedEvent::record(Stream stream) const {
  const Gpu::Scope scope(*gpu_);
  GPULOAN_TRY(scope.ok());
  return GPULOAN_CU(gpu_->driver(), cuEventRecord, event_, stream);
}

Result<bool> OwnedEvent::query() const {
  const Gpu::Scope scope(*gpu_);
  if (!scope.ok()) return scope.over();
  return gpu_->driver().over("cuEventQuery", gpu_->driver().call.cuEventQuery(event_));
}

Result<void> OwnedEvent::synchronize() const {
  if (!blocking_) return poll(*this); // the driver would spin
  const Gpu::Scope scope(*gpu_);
  if (scope.ok() && gpu_->driver().call.cuEventSynchronize(event_) == Success) return {};
  return poll(*this);
}

} // namespace gpuloan::driver
