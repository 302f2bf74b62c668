// SPDX-License-Identifier: MIT
//
// The driver's ABI as gpuloan declares it, against numbers read from a real header.
//
// Read from cuda.h of CUDA 13.0 (CUDA_VERSION 13000), Linux x86-64, by a C program that printed sizeof, offsetof and
// the values; the same run compared the number, size and kind of every parameter in symbols.inc with the prototype of
// the exported name. The header is not needed here: only its numbers are.
#include <doctest/doctest.h>

#include <driver/driver.hpp>

#include <cstring>
#include <set>
#include <string>

using namespace gpuloan::cuda;

namespace {

struct Number {
  const char* header; // the name in cuda.h
  long long ours;
  long long theirs;
};

void compare(const Number* begin, const Number* end) {
  for (const Number* row = begin; row != end; ++row) {
    CAPTURE(row->header);
    CHECK(row->ours == row->theirs);
  }
}

template <std::size_t N>
void compare(const Number (&rows)[N]) {
  compare(rows, rows + N);
}

long long size(std::size_t bytes) { return static_cast<long long>(bytes); }

} // namespace

// H9
TEST_CASE("sizes and offsets") {
  const Number rows[] = {
      {"CUdevice", size(sizeof(Device)), 4},
      {"CUdeviceptr", size(sizeof(DevicePtr)), 8},
      {"CUmemGenericAllocationHandle", size(sizeof(MemHandle)), 8},
      {"CUcontext", size(sizeof(Context)), 8},
      {"CUstream", size(sizeof(Stream)), 8},
      {"CUevent", size(sizeof(Event)), 8},
      {"CUresult", size(sizeof(CuResult)), 4},
      {"CUuuid", size(sizeof(Uuid)), 16},
      {"CUipcEventHandle", size(sizeof(IpcEventHandle)), 64},
      {"CUipcMemHandle", size(sizeof(IpcMemHandle)), 64},
      {"CUmemPoolPtrExportData", size(sizeof(PoolPointer)), 64},
      {"CUmemPoolProps", size(sizeof(PoolProps)), 88},
      {"CUmemPoolProps.handleTypes", size(offsetof(PoolProps, handle_types)), 4},
      {"CUmemPoolProps.location", size(offsetof(PoolProps, location)), 8},
      {"CUmemPoolProps.win32SecurityAttributes", size(offsetof(PoolProps, win32_security)), 16},
      {"CUmemPoolProps.maxSize", size(offsetof(PoolProps, max_size)), 24},
      {"CUmemPoolProps.usage", size(offsetof(PoolProps, usage)), 32},
      {"CUmemPoolProps.reserved", size(offsetof(PoolProps, reserved)), 34},
      {"CUmemLocation", size(sizeof(Location)), 8},
      {"CUmemLocation.type", size(offsetof(Location, type)), 0},
      {"CUmemLocation.id", size(offsetof(Location, id)), 4},
      {"CUmemAllocationProp", size(sizeof(AllocationProp)), 32},
      {"CUmemAllocationProp.type", size(offsetof(AllocationProp, type)), 0},
      {"CUmemAllocationProp.requestedHandleTypes", size(offsetof(AllocationProp, requested_handle_types)), 4},
      {"CUmemAllocationProp.location", size(offsetof(AllocationProp, location)), 8},
      {"CUmemAllocationProp.win32HandleMetaData", size(offsetof(AllocationProp, win32_meta)), 16},
      {"CUmemAllocationProp.allocFlags", size(offsetof(AllocationProp, flags)), 24},
      {"CUmemAllocationProp.allocFlags.compressionType", size(offsetof(AllocationProp, flags.compression)), 24},
      {"CUmemAllocationProp.allocFlags.gpuDirectRDMACapable", size(offsetof(AllocationProp, flags.gpu_direct_rdma)), 25},
      {"CUmemAllocationProp.allocFlags.usage", size(offsetof(AllocationProp, flags.usage)), 26},
      {"CUmemAllocationProp.allocFlags.reserved", size(offsetof(AllocationProp, flags.reserved)), 28},
      {"CUmemAccessDesc", size(sizeof(AccessDesc)), 12},
      {"CUmemAccessDesc.location", size(offsetof(AccessDesc, location)), 0},
      {"CUmemAccessDesc.flags", size(offsetof(AccessDesc, flags)), 8},
  };
  compare(rows);
}

TEST_CASE("results") {
  const Number rows[] = {
      {"CUDA_SUCCESS", Success, 0},
      {"CUDA_ERROR_INVALID_VALUE", InvalidValue, 1},
      {"CUDA_ERROR_OUT_OF_MEMORY", OutOfMemory, 2},
      {"CUDA_ERROR_NOT_INITIALIZED", NotInitialized, 3},
      {"CUDA_ERROR_DEINITIALIZED", Deinitialized, 4},
      {"CUDA_ERROR_STUB_LIBRARY", StubLibrary, 34},
      {"CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", CallRequiresNewerDriver, 36},
      {"CUDA_ERROR_DEVICE_UNAVAILABLE", DeviceUnavailable, 46},
      {"CUDA_ERROR_NO_DEVICE", NoDevice, 100},
      {"CUDA_ERROR_INVALID_DEVICE", InvalidDevice, 101},
      {"CUDA_ERROR_INVALID_CONTEXT", InvalidContext, 201},
      {"CUDA_ERROR_ALREADY_MAPPED", AlreadyMapped, 208},
      {"CUDA_ERROR_NOT_MAPPED", NotMapped, 211},
      {"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", PeerAccessUnsupported, 217},
      {"CUDA_ERROR_OPERATING_SYSTEM", OperatingSystem, 304},
      {"CUDA_ERROR_INVALID_HANDLE", InvalidHandle, 400},
      {"CUDA_ERROR_ILLEGAL_STATE", IllegalState, 401},
      {"CUDA_ERROR_NOT_FOUND", NotFound, 500},
      {"CUDA_ERROR_NOT_READY", NotReady, 600},
      {"CUDA_ERROR_ILLEGAL_ADDRESS", IllegalAddress, 700},
      {"CUDA_ERROR_CONTEXT_IS_DESTROYED", ContextIsDestroyed, 709},
      {"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", HostMemoryAlreadyRegistered, 712},
      {"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", HostMemoryNotRegistered, 713},
      {"CUDA_ERROR_LAUNCH_FAILED", LaunchFailed, 719},
      {"CUDA_ERROR_NOT_PERMITTED", NotPermitted, 800},
      {"CUDA_ERROR_NOT_SUPPORTED", NotSupported, 801},
      {"CUDA_ERROR_SYSTEM_NOT_READY", SystemNotReady, 802},
      {"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", SystemDriverMismatch, 803},
      {"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", CompatNotSupportedOnDevice, 804},
      {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", StreamCaptureUnsupported, 900},
      {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", StreamCaptureInvalidated, 901},
      {"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", StreamCaptureImplicit, 906},
      {"CUDA_ERROR_UNKNOWN", Unknown, 999},
  };
  compare(rows);
}

TEST_CASE("attributes") {
  const Number rows[] = {
      {"CU_DEVICE_ATTRIBUTE_INTEGRATED", AttrIntegrated, 18},
      {"CU_DEVICE_ATTRIBUTE_COMPUTE_MODE", AttrComputeMode, 20},
      {"CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING", AttrUnifiedAddressing, 41},
      {"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", AttrComputeCapabilityMajor, 75},
      {"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR", AttrComputeCapabilityMinor, 76},
      {"CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", AttrHostPointerForRegistered, 91},
      {"CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED", AttrHostRegister, 99},
      {"CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", AttrVmm, 102},
      {"CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", AttrVmmPosixFd, 103},
      {"CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED", AttrMemoryPools, 115},
      {"CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES", AttrPoolHandleTypes, 119},
      {"CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS", AttrMemOps64, 122},
      {"CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED", AttrIpcEvents, 125},
      {"CU_POINTER_ATTRIBUTE_CONTEXT", PointerContext, 1},
      {"CU_POINTER_ATTRIBUTE_MEMORY_TYPE", PointerMemoryType, 2},
      {"CU_POINTER_ATTRIBUTE_BUFFER_ID", PointerBufferId, 7},
      {"CU_POINTER_ATTRIBUTE_IS_MANAGED", PointerIsManaged, 8},
      {"CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL", PointerDeviceOrdinal, 9},
      {"CU_DEVICE_ATTRIBUTE_MPS_ENABLED", AttrMpsEnabled, 133},
      {"CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE", PointerLegacyIpcCapable, 10},
      {"CU_POINTER_ATTRIBUTE_MAPPED", PointerMapped, 13},
      {"CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES", PointerAllowedHandleTypes, 14},
      {"CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE", PointerMemPool, 17},
      {"CU_MEMPOOL_ATTR_RELEASE_THRESHOLD", PoolReleaseThreshold, 4},
      {"CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT", PoolReservedBytes, 5},
      {"CU_MEMPOOL_ATTR_USED_MEM_CURRENT", PoolUsedBytes, 7},
      {"CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS", IpcMemLazyPeerAccess, 1},
      {"CU_POINTER_ATTRIBUTE_RANGE_START_ADDR", PointerRangeStart, 11},
      {"CU_POINTER_ATTRIBUTE_RANGE_SIZE", PointerRangeSize, 12},
      {"CU_MEMORYTYPE_HOST", MemoryHost, 1},
      {"CU_MEMORYTYPE_DEVICE", MemoryDevice, 2},
  };
  compare(rows);
}

TEST_CASE("flags and modes") {
  const Number rows[] = {
      {"CU_STREAM_DEFAULT", StreamDefault, 0},
      {"CU_STREAM_NON_BLOCKING", StreamNonBlocking, 1},
      {"CU_EVENT_DEFAULT", EventDefault, 0},
      {"CU_EVENT_BLOCKING_SYNC", EventBlockingSync, 1},
      {"CU_EVENT_DISABLE_TIMING", EventDisableTiming, 2},
      {"CU_EVENT_INTERPROCESS", EventInterprocess, 4},
      {"CU_STREAM_WAIT_VALUE_GEQ", WaitGeq, 0},
      {"CU_STREAM_WAIT_VALUE_EQ", WaitEq, 1},
      {"CU_STREAM_WRITE_VALUE_DEFAULT", WriteDefault, 0},
      {"CU_MEMHOSTREGISTER_PORTABLE", RegisterPortable, 1},
      {"CU_MEMHOSTREGISTER_DEVICEMAP", RegisterDeviceMap, 2},
      {"CU_STREAM_CAPTURE_STATUS_NONE", CaptureNone, 0},
      {"CU_STREAM_CAPTURE_STATUS_ACTIVE", CaptureActive, 1},
      {"CU_STREAM_CAPTURE_STATUS_INVALIDATED", CaptureInvalidated, 2},
      {"CU_STREAM_CAPTURE_MODE_GLOBAL", CaptureGlobal, 0},
      {"CU_STREAM_CAPTURE_MODE_THREAD_LOCAL", CaptureThreadLocal, 1},
      {"CU_STREAM_CAPTURE_MODE_RELAXED", CaptureRelaxed, 2},
      {"CU_MEM_ALLOCATION_TYPE_PINNED", AllocationPinned, 1},
      {"CU_MEM_HANDLE_TYPE_NONE", HandleNone, 0},
      {"CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", HandlePosixFd, 1},
      {"CU_MEM_LOCATION_TYPE_DEVICE", LocationDevice, 1},
      {"CU_MEM_ACCESS_FLAGS_PROT_NONE", AccessNone, 0},
      {"CU_MEM_ACCESS_FLAGS_PROT_READ", AccessRead, 1},
      {"CU_MEM_ACCESS_FLAGS_PROT_READWRITE", AccessReadWrite, 3},
      {"CU_MEM_ALLOC_GRANULARITY_MINIMUM", GranularityMinimum, 0},
      {"CU_MEM_ALLOC_GRANULARITY_RECOMMENDED", GranularityRecommended, 1},
  };
  compare(rows);
  CHECK(reinterpret_cast<std::uintptr_t>(legacy_stream()) == 1);
  CHECK(reinterpret_cast<std::uintptr_t>(per_thread_stream()) == 2);
}

// The columns of the table fit together: an exported name is the base name, or that plus _v2, and versions are ones
// that CUDA had.
TEST_CASE("symbols") {
  struct Row {
    int since;
    const char* name;
    const char* exported;
  };
  const Row rows[] = {
#define GPULOAN_CUDA(need, since, group, name, exported, params) {since, #name, #exported},
#include <driver/symbols.inc>
#undef GPULOAN_CUDA
  };
  std::set<std::string> names;
  for (const Row& row : rows) {
    CAPTURE(row.name);
    CHECK(names.insert(row.name).second);
    CHECK(std::strncmp(row.exported, row.name, std::strlen(row.name)) == 0);
    const std::string suffix = row.exported + std::strlen(row.name);
    CHECK((suffix.empty() || suffix == "_v2"));
    CHECK(row.since >= 2000);
    CHECK(row.since < 20000);
    CHECK(row.since % 10 == 0);
  }
}
