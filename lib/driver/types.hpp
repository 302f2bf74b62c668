// SPDX-License-Identifier: MIT
//
// The part of the CUDA driver ABI that gpuloan uses, declared by us so that no CUDA header is needed to build.
//
// Values and layouts are those of the driver API as published since 11.2; test/unit/driver/driver_types_test.cpp holds the
// tables that were read from real headers and compares every size, offset and constant here with them. Names keep the
// driver's spelling without the CU prefix noise only where a new name would not help a reader who knows CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpuloan::cuda {

using Device = int;
using DevicePtr = std::uint64_t;
using MemHandle = std::uint64_t; // CUmemGenericAllocationHandle

struct ContextRec;
struct StreamRec;
struct EventRec;
struct PoolRec;
using Context = ContextRec*;
using Stream = StreamRec*;
using Event = EventRec*;
using Pool = PoolRec*; // CUmemoryPool

// The two built-in streams. A NULL stream means the legacy default stream everywhere in gpuloan.
inline Stream legacy_stream() noexcept { return reinterpret_cast<Stream>(std::uintptr_t{0x1}); }
inline Stream per_thread_stream() noexcept { return reinterpret_cast<Stream>(std::uintptr_t{0x2}); }

enum Code : int {
  Success = 0,
  InvalidValue = 1,
  OutOfMemory = 2,
  NotInitialized = 3,
  Deinitialized = 4,
  StubLibrary = 34,
  CallRequiresNewerDriver = 36,
  DeviceUnavailable = 46,
  NoDevice = 100,
  InvalidDevice = 101,
  InvalidContext = 201,
  AlreadyMapped = 208,
  NotMapped = 211,
  PeerAccessUnsupported = 217,
  OperatingSystem = 304,
  InvalidHandle = 400,
  IllegalState = 401,
  NotFound = 500,
  NotReady = 600,
  IllegalAddress = 700,
  ContextIsDestroyed = 709,
  HostMemoryAlreadyRegistered = 712,
  HostMemoryNotRegistered = 713,
  LaunchFailed = 719,
  NotPermitted = 800,
  NotSupported = 801,
  SystemNotReady = 802,
  SystemDriverMismatch = 803,
  CompatNotSupportedOnDevice = 804,
  StreamCaptureUnsupported = 900,
  StreamCaptureInvalidated = 901,
  StreamCaptureImplicit = 906,
  Unknown = 999,
};
using CuResult = int; // a CUresult; compared with Code

struct Uuid {
  unsigned char bytes[16];
  friend bool operator==(const Uuid&, const Uuid&) = default;
};

struct IpcEventHandle {
  unsigned char reserved[64];
};

struct IpcMemHandle {
  unsigned char reserved[64];
};

struct PoolPointer { // CUmemPoolPtrExportData
  unsigned char reserved[64];
};

enum DeviceAttribute : int {
  AttrIntegrated = 18,
  AttrComputeMode = 20,
  AttrUnifiedAddressing = 41,
  AttrComputeCapabilityMajor = 75,
  AttrComputeCapabilityMinor = 76,
  AttrHostPointerForRegistered = 91, // device uses the host address of registered memory
  AttrHostRegister = 99,
  AttrVmm = 102,
  AttrVmmPosixFd = 103,
  AttrMemoryPools = 115,
  AttrPoolHandleTypes = 119,
  AttrMemOps64 = 122,
  AttrIpcEvents = 125,
  AttrMpsEnabled = 133,
};

enum ComputeMode : int { ModeDefault = 0, ModeProhibited = 2, ModeExclusiveProcess = 3 };
enum StreamFlags : unsigned { StreamDefault = 0, StreamNonBlocking = 1 };
enum EventFlags : unsigned { EventDefault = 0, EventBlockingSync = 1, EventDisableTiming = 2, EventInterprocess = 4 };
enum WaitValueFlags : unsigned { WaitGeq = 0, WaitEq = 1 };
enum WriteValueFlags : unsigned { WriteDefault = 0 };
enum HostRegisterFlags : unsigned { RegisterPortable = 1, RegisterDeviceMap = 2 };
enum CaptureStatus : int { CaptureNone = 0, CaptureActive = 1, CaptureInvalidated = 2 };
enum CaptureMode : int { CaptureGlobal = 0, CaptureThreadLocal = 1, CaptureRelaxed = 2 };

enum PointerAttribute : int {
  PointerContext = 1,
  PointerMemoryType = 2, // MemoryType
  PointerBufferId = 7,
  PointerIsManaged = 8,
  PointerDeviceOrdinal = 9,
  PointerLegacyIpcCapable = 10,
  PointerRangeStart = 11,
  PointerRangeSize = 12,
  PointerMapped = 13,
  PointerAllowedHandleTypes = 14, // HandleType bits
  PointerMemPool = 17,            // the Pool it came from, null for none
};
enum MemoryType : unsigned { MemoryHost = 1, MemoryDevice = 2 };

enum AllocationType : int { AllocationPinned = 1 };
enum HandleType : int { HandleNone = 0, HandlePosixFd = 1 };
enum LocationType : int { LocationDevice = 1 };
enum AccessFlags : int { AccessNone = 0, AccessRead = 1, AccessReadWrite = 3 };
enum GranularityFlags : int { GranularityMinimum = 0, GranularityRecommended = 1 };

struct Location {
  int type; // LocationType
  int id;
};

struct AllocationProp {
  int type;                   // AllocationType
  int requested_handle_types; // HandleType bits
  Location location;
  void* win32_meta;
  struct {
    unsigned char compression;
    unsigned char gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};

struct PoolProps { // CUmemPoolProps
  int type;         // AllocationType
  int handle_types; // HandleType bits
  Location location;
  void* win32_security;
  std::size_t max_size;
  unsigned short usage;
  unsigned char reserved[54];
};
enum PoolAttribute : int { PoolReleaseThreshold = 4, PoolReservedBytes = 5, PoolUsedBytes = 7 };
enum IpcMemFlags : unsigned { IpcMemLazyPeerAccess = 1 };

struct AccessDesc {
  Location location;
  int flags; // AccessFlags
};

} // namespace gpuloan::cuda
