// SPDX-License-Identifier: MIT
//
// A CUresult as a sentence and as a status. The driver's own name and text come first, since it knows codes that are
// newer than this file; a short list of names stands in where it knows none (a stub answers every call with 34).
#include <driver/lifetime.hpp>
#include <driver/loader.hpp>

#include <base/log.hpp>

#include <atomic>

namespace gpuloan::driver {
namespace {

// Codes without a name in types.hpp: those that end a context, that belong to a capture, that MPS gives.
enum MoreCodes : int {
  InsufficientDriver = 35,
  EccUncorrectable = 214,
  NvlinkUncorrectable = 220,
  Contained = 226,
  LaunchTimeout = 702,
  AssertFailed = 710,
  HardwareStackError = 714,
  IllegalInstruction = 715,
  MisalignedAddress = 716,
  InvalidAddressSpace = 717,
  InvalidProgramCounter = 718,
  TensorMemoryLeak = 721,
  MpsConnectionFailed = 805,
  MpsClientTerminated = 810,
  StreamCaptureWrongThread = 908,
};

const char* fallback_name(CuResult code) noexcept {
  switch (code) {
    case InvalidValue: return "CUDA_ERROR_INVALID_VALUE";
    case OutOfMemory: return "CUDA_ERROR_OUT_OF_MEMORY";
    case NotInitialized: return "CUDA_ERROR_NOT_INITIALIZED";
    case Deinitialized: return "CUDA_ERROR_DEINITIALIZED";
    case StubLibrary: return "CUDA_ERROR_STUB_LIBRARY";
    case InsufficientDriver: return "CUDA_ERROR_INSUFFICIENT_DRIVER";
    case CallRequiresNewerDriver: return "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER";
    case DeviceUnavailable: return "CUDA_ERROR_DEVICE_UNAVAILABLE";
    case NoDevice: return "CUDA_ERROR_NO_DEVICE";
    case InvalidDevice: return "CUDA_ERROR_INVALID_DEVICE";
    case InvalidContext: return "CUDA_ERROR_INVALID_CONTEXT";
    case OperatingSystem: return "CUDA_ERROR_OPERATING_SYSTEM";
    case NotReady: return "CUDA_ERROR_NOT_READY";
    case IllegalAddress: return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case LaunchFailed: return "CUDA_ERROR_LAUNCH_FAILED";
    case NotSupported: return "CUDA_ERROR_NOT_SUPPORTED";
    case SystemNotReady: return "CUDA_ERROR_SYSTEM_NOT_READY";
    case SystemDriverMismatch: return "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
    case CompatNotSupportedOnDevice: return "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE";
    case Unknown: return "CUDA_ERROR_UNKNOWN";
    default: return "CUresult";
  }
}

// After these no call in the context succeeds any more; only a new process helps.
bool is_sticky(CuResult code) noexcept {
  switch (code) {
    case EccUncorrectable:
    case NvlinkUncorrectable:
    case Contained:
    case IllegalAddress:
    case LaunchTimeout:
    case ContextIsDestroyed:
    case AssertFailed:
    case HardwareStackError:
    case IllegalInstruction:
    case MisalignedAddress:
    case InvalidAddressSpace:
    case InvalidProgramCounter:
    case LaunchFailed:
    case TensorMemoryLeak:
    case MpsClientTerminated: return true;
    default: return false;
  }
}

// After these no work of the context runs any more: it failed, or it was destroyed.
bool ends_work(CuResult code) noexcept { return is_sticky(code) || code == InvalidContext || code == InvalidHandle || code == Deinitialized; }

bool is_capture(CuResult code) noexcept { return code >= StreamCaptureUnsupported && code <= StreamCaptureWrongThread; }

gpuloan_status status_of(CuResult code) noexcept {
  if (code == OutOfMemory) return GPULOAN_ERR_DEVICE_MEMORY;
  if (is_sticky(code)) return GPULOAN_ERR_DEVICE_LOST;
  if (is_capture(code)) return GPULOAN_ERR_CAPTURE;
  return GPULOAN_ERR_DRIVER;
}

const char* remedy(CuResult code, bool simulated) noexcept {
  if (is_sticky(code)) return "; this process's CUDA context is unusable: end the process and start it again";
  if (is_capture(code)) return "; a stream of this process is in graph capture: end the capture first";
  if (code >= MpsConnectionFailed && code < MpsClientTerminated) return "; look at the MPS control daemon and its log";
  switch (code) {
    case OutOfMemory: return "; free device memory in this or other processes";
    case NotInitialized: return "; CUDA cannot be used in a forked child: start workers with exec";
    case Deinitialized: return "; the driver is shutting down with the process";
    case DeviceUnavailable: return "; the device's compute mode is exclusive and another process has it, or prohibited: nvidia-smi -c DEFAULT lets all use it, and in exclusive mode MPS does";
    case InvalidContext: return "; the CUDA context was destroyed, or is not of this device";
    case OperatingSystem:
      if (simulated) return "; its line on stderr, \"gpuloan-sim: ...\", says what was refused: look at the file that GPULOAN_SIM_STATE names, and at RLIMIT_NOFILE";
      return "; look at RLIMIT_NOFILE and at the permissions of /dev/nvidia*";
    case NotPermitted: return "; the driver does not permit it to this user or container";
    case NotSupported: return "; this device or platform (WSL2, vGPU, an integrated GPU) does not support it";
    case SystemNotReady: return "; start nvidia-fabricmanager, or wait for it";
    case Unknown: return "; look for NVRM and Xid lines in the kernel log";
    default: return "";
  }
}

} // namespace

std::string code_text(const Driver& driver, CuResult code) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (calls_allowed()) {
    const Table& call = driver.call;
    if (call.cuGetErrorName == nullptr || call.cuGetErrorName(code, &name) != Success) name = nullptr;
    if (call.cuGetErrorString == nullptr || call.cuGetErrorString(code, &text) != Success) text = nullptr;
  }
  std::string sentence = std::string(name != nullptr ? name : fallback_name(code)) + " (" + std::to_string(code) + ")";
  if (text != nullptr) sentence += ": " + std::string(text);
  return sentence;
}

Result<bool> Driver::over(const char* function, CuResult code) const {
  if (code == Success) [[likely]] return true;
  if (code == NotReady) return false;
  if (ends_work(code)) return std::unexpected(error(function, code));
  static std::atomic<bool> said{false};
  if (!said.exchange(true)) {
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "the driver does not say whether work is over; it is asked again until it does: " + error(function, code).text);
  }
  return false;
}

Error Driver::error(const char* function, CuResult code) const {
  return Error{status_of(code), std::string(function) + ": " + code_text(*this, code) + " [" + describe() + "]" + remedy(code, simulated_)};
}

} // namespace gpuloan::driver
