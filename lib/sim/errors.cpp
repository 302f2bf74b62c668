// SPDX-License-Identifier: MIT
//
// Names and sentences of the result codes. An unknown code gives CUDA_ERROR_INVALID_VALUE and a null pointer.
#include <sim/api.hpp>
#include <sim/event_slot.hpp>

namespace gpuloan::sim {
namespace {

struct ErrorText {
  CuResult code;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {Success, "CUDA_SUCCESS", "no error"},
    {InvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {Deinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {StubLibrary, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {CallRequiresNewerDriver, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "API call requires a newer CUDA driver"},
    {DeviceUnavailable, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {NoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {InvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {InvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {MapFailed, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {AlreadyMapped, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {NotMapped, "CUDA_ERROR_NOT_MAPPED", "resource not mapped"},
    {PeerAccessUnsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {OperatingSystem, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {InvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {IllegalState, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {NotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {IllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {ContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {HostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {HostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {LaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {NotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {SystemNotReady, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {SystemDriverMismatch, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {CompatNotSupportedOnDevice, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
     "forward compatibility was attempted on non supported HW"},
    {StreamCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {StreamCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {StreamCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {Unknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* find(CuResult code) noexcept {
  for (const ErrorText& error : kErrors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

} // namespace

namespace api {

CuResult cuGetErrorName(CuResult code, const char** name) {
  if (name == nullptr) return InvalidValue;
  const ErrorText* error = find(code);
  *name = error != nullptr ? error->name : nullptr;
  return error != nullptr ? Success : InvalidValue;
}

CuResult cuGetErrorString(CuResult code, const char** text) {
  if (text == nullptr) return InvalidValue;
  const ErrorText* error = find(code);
  *text = error != nullptr ? error->text : nullptr;
  return error != nullptr ? Success : InvalidValue;
}

} // namespace api
} // namespace gpuloan::sim
