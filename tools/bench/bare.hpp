// SPDX-License-Identifier: MIT
//
// The floor: the same work by driver calls alone, written as tightly as we know how. Nothing of the library is used here.
//
// One process makes a chunk of VMM memory and a page of control words, the other imports both; a turn is then
//   spin:   parent stores READY; worker sees it, fills, lets the stream write DONE; parent sees it
//   socket: parent sends a record; worker fills, synchronises its stream, answers with a record
#pragma once

#include "../cuda.hpp"
#include "../files.hpp"

#include <atomic>

namespace gpuloan::tool::bench {

#define GPULOAN_BENCH_CALLS(X)                                                                                           \
  X(cuMemGetAllocationGranularity, granularity, (std::size_t*, const cuda::AllocationProp*, int))                        \
  X(cuMemGetInfo_v2, memory_info, (std::size_t*, std::size_t*))                                                          \
  X(cuMemCreate, mem_create, (cuda::MemHandle*, std::size_t, const cuda::AllocationProp*, unsigned long long))           \
  X(cuMemRelease, mem_release, (cuda::MemHandle))                                                                        \
  X(cuMemExportToShareableHandle, mem_export, (void*, cuda::MemHandle, int, unsigned long long))                         \
  X(cuMemImportFromShareableHandle, mem_import, (cuda::MemHandle*, void*, int))                                          \
  X(cuMemAddressReserve, reserve, (cuda::DevicePtr*, std::size_t, std::size_t, cuda::DevicePtr, unsigned long long))     \
  X(cuMemAddressFree, unreserve, (cuda::DevicePtr, std::size_t))                                                         \
  X(cuMemMap, map, (cuda::DevicePtr, std::size_t, std::size_t, cuda::MemHandle, unsigned long long))                     \
  X(cuMemUnmap, unmap, (cuda::DevicePtr, std::size_t))                                                                   \
  X(cuMemSetAccess, set_access, (cuda::DevicePtr, std::size_t, const cuda::AccessDesc*, std::size_t))                    \
  X(cuMemHostRegister_v2, host_register, (void*, std::size_t, unsigned))                                                 \
  X(cuMemHostUnregister, host_unregister, (void*))                                                                       \
  X(cuMemHostGetDevicePointer_v2, device_pointer, (cuda::DevicePtr*, void*, unsigned))                                   \
  X(cuStreamWriteValue64_v2, write_value, (cuda::Stream, cuda::DevicePtr, std::uint64_t, unsigned))

struct BareCalls {
  explicit BareCalls(const gpuloan_driver_info& info);
  void check(const char* call, cuda::CuResult code) const;
  [[nodiscard]] std::uint64_t free_bytes() const; // of the device
#define GPULOAN_BENCH_MEMBER(symbol, member, parameters) cuda::CuResult(*member) parameters = nullptr;
  GPULOAN_BENCH_CALLS(GPULOAN_BENCH_MEMBER)
#undef GPULOAN_BENCH_MEMBER
};

// Shared pages, pinned for this process's device.
class BarePages {
 public:
  BarePages(const BareCalls& calls, Fd fd, std::size_t bytes);
  ~BarePages();
  BarePages(const BarePages&) = delete;
  BarePages& operator=(const BarePages&) = delete;
  [[nodiscard]] static Fd make(std::size_t bytes); // a memfd
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::uint64_t& word(std::size_t index) const noexcept { return reinterpret_cast<std::uint64_t*>(data_)[index * 8]; } // a cache line each
  [[nodiscard]] cuda::DevicePtr pointer(std::size_t index) const noexcept { return pointer_ + index * 64; }

 private:
  const BareCalls& calls_;
  Fd fd_;
  std::byte* data_ = nullptr;
  std::size_t bytes_;
  cuda::DevicePtr pointer_ = 0;
};

enum { kReadyWord = 0, kDoneWord = 1 };

// A chunk of VMM memory, mapped for reading and writing.
class BareChunk {
 public:
  BareChunk(const BareCalls& calls, int device, std::uint64_t bytes);         // makes it
  BareChunk(const BareCalls& calls, int device, std::uint64_t bytes, Fd fd);  // imports it
  ~BareChunk();
  BareChunk(const BareChunk&) = delete;
  BareChunk& operator=(const BareChunk&) = delete;
  [[nodiscard]] Fd share() const;
  [[nodiscard]] cuda::DevicePtr pointer() const noexcept { return pointer_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; } // rounded up

 private:
  void map(int device); // the handle is given back when it fails
  const BareCalls& calls_;
  std::uint64_t bytes_;
  cuda::MemHandle handle_ = 0;
  cuda::DevicePtr pointer_ = 0;
};

// Spins until the word is at least `value`; Failure after a long while.
void spin_until(std::uint64_t& word, std::uint64_t value, const Deadline& deadline);

} // namespace gpuloan::tool::bench
