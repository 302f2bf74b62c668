// SPDX-License-Identifier: MIT
//
// A Gpu is shared by everything that works on one device. Its context is set once, by open() to the caller's current
// one (never released here) or by context() to the primary one (released by the destructor), and read without a lock.
// The lock only keeps two first uses from retaining twice.
#include <driver/gpu.hpp>

#include <base/log.hpp>
#include <driver/lifetime.hpp>

#include <utility>

namespace gpuloan::driver {
namespace {

// The ordinal of a CUdevice: the same number in every driver so far, but nothing promises it.
Result<int> ordinal_of(const Driver& driver, Device device) {
  int count = 0;
  GPULOAN_TRY(GPULOAN_CU(driver, cuDeviceGetCount, &count));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Device candidate = 0;
    GPULOAN_TRY(GPULOAN_CU(driver, cuDeviceGet, &candidate, ordinal));
    if (candidate == device) return ordinal;
  }
  return fail(GPULOAN_ERR_NO_DEVICE, "the device of the current CUDA context is none of the driver's " +
                                         std::to_string(count) + " device(s) [" + driver.describe() + "]");
}

} // namespace

Result<std::shared_ptr<Gpu>> Gpu::open(std::shared_ptr<const Driver> driver, int ordinal, bool exactly) {
  GPULOAN_TRY(check_calls_allowed());
  Context current = nullptr;
  GPULOAN_TRY(GPULOAN_CU(*driver, cuCtxGetCurrent, &current));
  if (current != nullptr) {
    Device device = 0;
    GPULOAN_TRY(GPULOAN_CU(*driver, cuCtxGetDevice, &device));
    auto found = ordinal_of(*driver, device);
    if (!found) return forward(std::move(found.error()));
    if (exactly && *found != ordinal) current = nullptr;
    else ordinal = *found;
  }
  return make(std::move(driver), ordinal, current);
}

Result<std::shared_ptr<Gpu>> Gpu::open_primary(std::shared_ptr<const Driver> driver, int ordinal) {
  GPULOAN_TRY(check_calls_allowed());
  return make(std::move(driver), ordinal, nullptr);
}

// Without a context it is the primary one, at its first use.
Result<std::shared_ptr<Gpu>> Gpu::make(std::shared_ptr<const Driver> driver, int ordinal, Context context) {
  std::shared_ptr<Gpu> gpu(new Gpu);
  auto floors = probe_floors(*driver, ordinal);
  if (!floors) return forward(std::move(floors.error()));
  GPULOAN_TRY(GPULOAN_CU(*driver, cuDeviceGet, &gpu->device_, ordinal));
  gpu->floors_ = std::move(*floors);
  gpu->ordinal_ = ordinal;
  gpu->context_.store(context, std::memory_order_relaxed);
  gpu->driver_ = std::move(driver);
  return gpu;
}

Gpu::~Gpu() {
  if (retained_ && calls_allowed()) driver_->call.cuDevicePrimaryCtxRelease(device_);
}

bool Gpu::context_made() const noexcept { return context_.load(std::memory_order_acquire) != nullptr; }

std::string Gpu::pin_refusal() const {
  const std::lock_guard lock(mutex_);
  return pin_refusal_;
}

void Gpu::pin_refused(const std::string& why) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = pin_refusal_.empty();
    pin_refusal_ = why;
  }
  if (first) GPULOAN_LOG(GPULOAN_LOG_WARNING, "host memory cannot be pinned, loans that need it are slower: " + why);
}

Result<Context> Gpu::context() {
  if (Context made = context_.load(std::memory_order_acquire); made != nullptr) return made;
  const std::lock_guard lock(mutex_);
  if (Context made = context_.load(std::memory_order_relaxed); made != nullptr) return made;
  Context fresh = nullptr;
  GPULOAN_TRY(GPULOAN_CU(*driver_, cuDevicePrimaryCtxRetain, &fresh, device_));
  retained_ = true;
  context_.store(fresh, std::memory_order_release);
  return fresh;
}

// The context is pushed before the capture mode is set, since that call may want one. Pushing does not disturb a
// capture. A context that is current already is left where it is.
thread_local const Gpu* Gpu::Scope::innermost_ = nullptr;

Gpu::Scope::Scope(Gpu& gpu) : gpu_(gpu), ok_(check_calls_allowed()) {
  if (!ok_ || innermost_ == &gpu) return;
  const Driver& driver = *gpu.driver_;
  auto context = gpu.context();
  if (!context) {
    ok_ = forward(std::move(context.error()));
    return;
  }
  Context current = nullptr;
  if (driver.call.cuCtxGetCurrent(&current) != Success || current != *context) {
    code_ = driver.call.cuCtxPushCurrent(*context);
    ok_ = driver.check("cuCtxPushCurrent", code_);
    pushed_ = ok_.has_value();
  }
  if (ok_ && driver.call.cuThreadExchangeStreamCaptureMode != nullptr) {
    code_ = driver.call.cuThreadExchangeStreamCaptureMode(&mode_);
    mode_set_ = code_ == Success;
    if (code_ != NotSupported) ok_ = driver.check("cuThreadExchangeStreamCaptureMode", code_); // else there are no modes to mind
  }
  entered_ = ok_.has_value();
  if (entered_) outer_ = std::exchange(innermost_, &gpu);
}

Result<bool> Gpu::Scope::over() const {
  if (gpu_.driver_->over("entering the context", code_)) return false;
  return forward(Error(ok_.error()));
}

Gpu::Scope::~Scope() {
  if (entered_) innermost_ = outer_;
  if (!calls_allowed()) return;
  const Table& call = gpu_.driver_->call;
  if (mode_set_) call.cuThreadExchangeStreamCaptureMode(&mode_);
  Context popped = nullptr;
  if (pushed_) call.cuCtxPopCurrent(&popped);
}

} // namespace gpuloan::driver
