// SPDX-License-Identifier: MIT
//
// Host memory that the device reads and writes: rings and control words. Registering costs time per page (H1), so it is
// done once per mapping and not per loan.
#include <driver/handles.hpp>

#include <driver/require.hpp>
#include <driver/standing.hpp>

namespace gpuloan::driver {
namespace {

// Out of memory here is about pinned pages of the host.
Error register_error(const Driver& driver, CuResult code, std::size_t bytes) {
  Error error = driver.error("cuMemHostRegister", code);
  if (code == OutOfMemory) {
    error.status = GPULOAN_ERR_NO_MEMORY;
    error.text += "; asked to pin " + std::to_string(bytes) + " bytes of host memory: look at RLIMIT_MEMLOCK and free memory";
  }
  return error;
}

} // namespace

Result<HostRegistration> HostRegistration::create(std::shared_ptr<Gpu> gpu, std::span<std::byte> memory) {
  auto made = pin(gpu, memory);
  if (!made) gpu->pin_refused(made.error().text);
  return made;
}

HostRegistration HostRegistration::try_create(std::shared_ptr<Gpu> gpu, std::span<std::byte> memory) {
  if (!gpu->floors().has(GPULOAN_FLOOR_HOST_REGISTER)) {
    gpu->pin_refused("this device cannot register host memory");
    return {};
  }
  auto made = create(std::move(gpu), memory);
  return made ? std::move(*made) : HostRegistration();
}

Result<HostRegistration> HostRegistration::pin(std::shared_ptr<Gpu> gpu, std::span<std::byte> memory) {
  const Driver& driver = gpu->driver();
  GPULOAN_TRY(require(driver, Group::HostRegister));
  const Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  const unsigned flags = RegisterPortable | RegisterDeviceMap;
  if (const CuResult code = driver.call.cuMemHostRegister(memory.data(), memory.size(), flags); code != Success) {
    return std::unexpected(register_error(driver, code, memory.size()));
  }
  DevicePtr device = 0;
  if (auto found = GPULOAN_CU(driver, cuMemHostGetDevicePointer, &device, memory.data(), 0); !found) {
    driver.call.cuMemHostUnregister(memory.data());
    return forward(std::move(found.error()));
  }
  HostRegistration made;
  made.host_ = memory.data();
  made.device_ = device;
  made.gpu_ = std::move(gpu);
  return made;
}

HostRegistration::HostRegistration(HostRegistration&& other) noexcept
    : gpu_(std::move(other.gpu_)), host_(std::exchange(other.host_, nullptr)), device_(std::exchange(other.device_, 0)) {}

HostRegistration& HostRegistration::operator=(HostRegistration&& other) noexcept {
  HostRegistration taken(std::move(other));
  std::swap(gpu_, taken.gpu_);
  std::swap(host_, taken.host_);
  std::swap(device_, taken.device_);
  return *this;
}

HostRegistration::~HostRegistration() {
  if (host_ == nullptr || !calls_allowed()) return;
  const StandingCall standing;
  // Its owner unmaps the pages next, and other pages will have their address: while this one is registered, those cannot be.
  for (int attempt = 0; attempt < 2; ++attempt) {
    const Gpu::Scope scope(*gpu_);
    if (scope.ok() && gpu_->driver().call.cuMemHostUnregister(host_) == Success) return;
  }
}

} // namespace gpuloan::driver
