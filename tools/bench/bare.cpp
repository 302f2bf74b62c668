// SPDX-License-Identifier: MIT
#include "bare.hpp"

#include <cerrno>
#include <cstring>
#include <dlfcn.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

namespace gpuloan::tool::bench {
namespace {

constexpr std::uint32_t kSpins = 4000; // before the CPU is offered to others

cuda::AllocationProp chunk_of(int device) {
  cuda::AllocationProp prop = {};
  prop.type = cuda::AllocationPinned;
  prop.requested_handle_types = cuda::HandlePosixFd;
  prop.location = {cuda::LocationDevice, device};
  return prop;
}

inline void pause_cpu() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

} // namespace

BareCalls::BareCalls(const gpuloan_driver_info& info) {
  void* library = ::dlopen(info.path, RTLD_NOW | RTLD_NOLOAD); // gpuloan holds it open for the life of the process
  if (library == nullptr) throw Failure(ExitNoDriver, std::string("cannot open the driver library again: ") + ::dlerror());
#define GPULOAN_BENCH_RESOLVE(symbol, member, parameters)                                                                \
  member = reinterpret_cast<decltype(member)>(::dlsym(library, #symbol));                                                \
  if (member == nullptr) throw Failure(ExitNoDriver, std::string(info.path) + " lacks " #symbol ", which the bare floor needs");
  GPULOAN_BENCH_CALLS(GPULOAN_BENCH_RESOLVE)
#undef GPULOAN_BENCH_RESOLVE
}

void BareCalls::check(const char* call, cuda::CuResult code) const {
  if (code == cuda::Success) return;
  throw Failure(code == cuda::OutOfMemory ? ExitDeviceMemory : ExitNoDriver, std::string(call) + " of the bare floor: CUresult " + std::to_string(code));
}

std::uint64_t BareCalls::free_bytes() const {
  std::size_t free = 0, total = 0;
  check("cuMemGetInfo", memory_info(&free, &total));
  return free;
}

// ---- Pages --------------------------------------------------------------------------------------------------------

Fd BarePages::make(std::size_t bytes) {
  Fd fd(::memfd_create("gpuloan-bench", MFD_CLOEXEC));
  if (fd.get() < 0 || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw Failure(ExitSystem, std::string("memfd_create: ") + std::strerror(errno));
  }
  return fd;
}

BarePages::BarePages(const BareCalls& calls, Fd fd, std::size_t bytes) : calls_(calls), fd_(std::move(fd)), bytes_(bytes) {
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(), 0);
  if (mapped == MAP_FAILED) throw Failure(ExitSystem, std::string("mmap: ") + std::strerror(errno));
  data_ = static_cast<std::byte*>(mapped);
  try {
    calls_.check("cuMemHostRegister", calls_.host_register(data_, bytes, cuda::RegisterPortable | cuda::RegisterDeviceMap));
  } catch (...) {
    ::munmap(data_, bytes_);
    throw;
  }
  static_cast<void>(calls_.device_pointer(&pointer_, data_, 0));
}

BarePages::~BarePages() {
  static_cast<void>(calls_.host_unregister(data_));
  ::munmap(data_, bytes_);
}

// ---- Chunk --------------------------------------------------------------------------------------------------------

BareChunk::BareChunk(const BareCalls& calls, int device, std::uint64_t bytes) : calls_(calls), bytes_(bytes) {
  const cuda::AllocationProp prop = chunk_of(device);
  std::size_t step = 0;
  calls_.check("cuMemGetAllocationGranularity", calls_.granularity(&step, &prop, cuda::GranularityRecommended));
  bytes_ = (bytes + step - 1) / step * step;
  calls_.check("cuMemCreate", calls_.mem_create(&handle_, bytes_, &prop, 0));
  map(device);
}

BareChunk::BareChunk(const BareCalls& calls, int device, std::uint64_t bytes, Fd fd) : calls_(calls), bytes_(bytes) {
  calls_.check("cuMemImportFromShareableHandle",
               calls_.mem_import(&handle_, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd.get())), cuda::HandlePosixFd));
  map(device);
}

void BareChunk::map(int device) {
  const cuda::AccessDesc access = {{cuda::LocationDevice, device}, cuda::AccessReadWrite};
  bool mapped = false;
  try {
    calls_.check("cuMemAddressReserve", calls_.reserve(&pointer_, bytes_, 0, 0, 0));
    calls_.check("cuMemMap", calls_.map(pointer_, bytes_, 0, handle_, 0));
    mapped = true;
    calls_.check("cuMemSetAccess", calls_.set_access(pointer_, bytes_, &access, 1));
  } catch (...) {
    if (mapped) static_cast<void>(calls_.unmap(pointer_, bytes_));
    if (pointer_ != 0) static_cast<void>(calls_.unreserve(pointer_, bytes_));
    static_cast<void>(calls_.mem_release(handle_));
    throw;
  }
}

BareChunk::~BareChunk() {
  static_cast<void>(calls_.unmap(pointer_, bytes_));
  static_cast<void>(calls_.unreserve(pointer_, bytes_));
  static_cast<void>(calls_.mem_release(handle_));
}

Fd BareChunk::share() const {
  int fd = -1;
  calls_.check("cuMemExportToShareableHandle", calls_.mem_export(&fd, handle_, cuda::HandlePosixFd, 0));
  return Fd(fd);
}

void spin_until(std::uint64_t& word, std::uint64_t value, const Deadline& deadline) {
  std::uint32_t spins = 0;
  while (std::atomic_ref(word).load(std::memory_order_acquire) < value) {
    pause_cpu();
    if (++spins % kSpins != 0) continue;
    ::sched_yield();
    check_interrupted();
    if (deadline.passed()) throw Failure(ExitTimeout, "a control word of the bare floor was not written in time");
  }
}

} // namespace gpuloan::tool::bench
