// SPDX-License-Identifier: MIT
//
// Legacy memory handles. The driver counts how often one process opened a block (measured on 580; older drivers refuse
// the second time with ALREADY_MAPPED), so each IpcMapping owns one opening.
#include <driver/handles.hpp>
#include <driver/lifetime.hpp>
#include <driver/require.hpp>
#include <driver/standing.hpp>

#include <utility>

namespace gpuloan::driver {

Result<IpcMemHandle> IpcMapping::handle_of(Gpu& gpu, DevicePtr pointer) {
  const Driver& driver = gpu.driver();
  GPULOAN_TRY(require(driver, Group::IpcMemory));
  const Gpu::Scope scope(gpu);
  GPULOAN_TRY(scope.ok());
  IpcMemHandle handle = {};
  GPULOAN_TRY(GPULOAN_CU(driver, cuIpcGetMemHandle, &handle, pointer));
  return handle;
}

Result<IpcMapping> IpcMapping::open(std::shared_ptr<Gpu> gpu, const IpcMemHandle& handle) {
  const Driver& driver = gpu->driver();
  GPULOAN_TRY(require(driver, Group::IpcMemory));
  const Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  DevicePtr pointer = 0;
  const CuResult code = driver.call.cuIpcOpenMemHandle(&pointer, handle, IpcMemLazyPeerAccess);
  if (auto opened = driver.check("cuIpcOpenMemHandle", code); !opened) {
    if (code == AlreadyMapped) opened.error().text += "; something else in this process has opened this block";
    if (code == InvalidContext) opened.error().text += "; a process cannot open its own memory this way";
    return forward(std::move(opened.error()));
  }
  IpcMapping made;
  made.pointer_ = pointer;
  made.gpu_ = std::move(gpu);
  return made;
}

IpcMapping::IpcMapping(IpcMapping&& other) noexcept
    : gpu_(std::move(other.gpu_)), pointer_(std::exchange(other.pointer_, 0)) {}

IpcMapping& IpcMapping::operator=(IpcMapping&& other) noexcept {
  IpcMapping taken(std::move(other));
  std::swap(gpu_, taken.gpu_);
  std::swap(pointer_, taken.pointer_);
  return *this;
}

IpcMapping::~IpcMapping() {
  if (pointer_ == 0 || !calls_allowed()) return;
  const StandingCall standing;
  const Gpu::Scope scope(*gpu_);
  if (scope.ok()) gpu_->driver().call.cuIpcCloseMemHandle(pointer_);
}

} // namespace gpuloan::driver
