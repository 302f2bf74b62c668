// SPDX-License-Identifier: MIT
//
// Holding a stream. The simulated driver has a hook for it. On the real one the stream waits for a word of pinned memory
// that release() stores: it can be held for as long as a test likes, where a queue of long work would end by itself. It
// counts as one of the waits that a context may have pending (S9), and cuMemFree must not be called meanwhile (S10).
#include "gpu.hpp"

#include "check.hpp"
#include "pattern.hpp"

#include <algorithm>
#include <cstdio>
#include <dlfcn.h>
#include <exception>
#include <unistd.h>

namespace loan_test {
namespace {

constexpr unsigned kHoldWords = 64;
constexpr std::size_t kScratchBytes = std::size_t{256} << 20; // the real driver's delay() fills it again and again

template <typename Function>
void find(void* library, const char* name, Function& out) {
  out = reinterpret_cast<Function>(::dlsym(library, name));
}

} // namespace

Gpu::Gpu(const char* driver, int ordinal) : ordinal_(ordinal) {
  resolve(driver);
  check(call.cuInit(0), "cuInit");
  check(call.cuDevicePrimaryCtxRetain(&context_, ordinal), "cuDevicePrimaryCtxRetain");
  check(call.cuCtxPushCurrent(context_), "cuCtxPushCurrent");
  if (!simulated()) {
    const Pinned words = pinned(kHoldWords * sizeof(std::uint64_t));
    hold_words_ = reinterpret_cast<volatile std::uint64_t*>(words.data);
    std::fill_n(words.data, kHoldWords * sizeof(std::uint64_t), static_cast<unsigned char>(0));
    scratch_ = alloc(kScratchBytes);
  }
}

Gpu::~Gpu() {
  for (auto& [index, slot] : streams_) {
    release(index);
    call.cuStreamSynchronize(slot.handle);
    for (const Pinned& buffer : slot.in_use) free_.push_back(buffer);
    call.cuStreamDestroy(slot.handle);
  }
  if (scratch_ != 0) call.cuMemFree(scratch_);
  if (pool_ != nullptr) call.cuMemPoolDestroy(pool_);
  for (const Pinned& buffer : free_) call.cuMemFreeHost(buffer.data);
  cuda::Context context = nullptr;
  call.cuCtxPopCurrent(&context);
  call.cuDevicePrimaryCtxRelease(ordinal_);
}

std::int64_t sim_live(const char* driver, const char* what) {
  auto info = init<gpuloan_driver_info>();
  expect_ok(gpuloan_driver_probe(driver, &info), "gpuloan_driver_probe");
  void* library = ::dlopen(info.path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(::dlerror());
  std::int64_t (*live)(const char*) = nullptr;
  find(library, "gpuloan_sim_live", live);
  const std::int64_t count = live != nullptr ? live(what) : -1;
  ::dlclose(library);
  return count;
}

void Gpu::resolve(const char* driver) {
  info_.size = sizeof info_;
  expect_ok(gpuloan_driver_probe(driver, &info_), "gpuloan_driver_probe");
  void* library = ::dlopen(info_.path, RTLD_NOW | RTLD_LOCAL); // loaded already: another reference
  if (library == nullptr) fail(::dlerror());
  find(library, "cuInit", call.cuInit);
  find(library, "cuDevicePrimaryCtxRetain", call.cuDevicePrimaryCtxRetain);
  find(library, "cuDevicePrimaryCtxRelease_v2", call.cuDevicePrimaryCtxRelease);
  find(library, "cuCtxPushCurrent_v2", call.cuCtxPushCurrent);
  find(library, "cuCtxPopCurrent_v2", call.cuCtxPopCurrent);
  find(library, "cuPointerGetAttributes", call.cuPointerGetAttributes);
  find(library, "cuStreamCreate", call.cuStreamCreate);
  find(library, "cuStreamDestroy_v2", call.cuStreamDestroy);
  find(library, "cuStreamQuery", call.cuStreamQuery);
  find(library, "cuStreamSynchronize", call.cuStreamSynchronize);
  find(library, "cuStreamWaitValue64_v2", call.cuStreamWaitValue64);
  find(library, "cuMemAlloc_v2", call.cuMemAlloc);
  find(library, "cuMemFree_v2", call.cuMemFree);
  find(library, "cuMemPoolCreate", call.cuMemPoolCreate);
  find(library, "cuMemPoolDestroy", call.cuMemPoolDestroy);
  find(library, "cuMemPoolExportToShareableHandle", call.cuMemPoolExportToShareableHandle);
  find(library, "cuMemAllocFromPoolAsync", call.cuMemAllocFromPoolAsync);
  find(library, "cuMemAllocHost_v2", call.cuMemAllocHost);
  find(library, "cuMemFreeHost", call.cuMemFreeHost);
  find(library, "cuMemGetInfo_v2", call.cuMemGetInfo);
  find(library, "cuMemcpyHtoDAsync_v2", call.cuMemcpyHtoDAsync);
  find(library, "cuMemcpyDtoHAsync_v2", call.cuMemcpyDtoHAsync);
  find(library, "cuMemsetD8Async", call.cuMemsetD8Async);
  find(library, "gpuloan_sim_stream_hold", call.sim_hold);
  find(library, "gpuloan_sim_stream_release", call.sim_release);
  find(library, "gpuloan_sim_context_fail", call.sim_context_fail);
  find(library, "gpuloan_sim_stream_delay", call.sim_delay);
  find(library, "gpuloan_sim_live", call.sim_live);
  find(library, "gpuloan_sim_calls", call.sim_calls);
  find(library, "gpuloan_sim_pin_limit", call.sim_pin_limit);
  expect(call.cuMemcpyHtoDAsync != nullptr && call.cuMemAllocHost != nullptr && call.cuMemsetD8Async != nullptr, "a driver without copies");
  if (!simulated()) expect(call.cuStreamWaitValue64 != nullptr, "a driver without cuStreamWaitValue64_v2");
}

void Gpu::check(CuResult result, const char* what) const {
  if (result != cuda::Success) fail(std::string(what) + " says " + std::to_string(result));
}

int Gpu::device_of(std::uint64_t pointer) const {
  int ordinal = -1;
  const int attribute = cuda::PointerDeviceOrdinal;
  void* out = &ordinal;
  check(call.cuPointerGetAttributes(1, &attribute, &out, pointer), "cuPointerGetAttributes");
  return ordinal;
}

std::string uuid_of(const char* driver, int ordinal) {
  auto info = init<gpuloan_device_info>();
  expect_ok(gpuloan_device_probe(driver, ordinal, &info), "gpuloan_device_probe");
  std::string text = "GPU";
  for (int index = 0; index < 16; ++index) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(info.uuid[index]));
    text += (index == 0 || index == 4 || index == 6 || index == 8 || index == 10 ? "-" : "") + std::string(digits);
  }
  return text;
}

OtherContext::OtherContext(Gpu& gpu, cuda::Context other) : gpu_(gpu), other_(other) {
  for (cuda::Context popped = nullptr; gpu.call.cuCtxPopCurrent(&popped) == cuda::Success && popped != nullptr;) put_aside_.push_back(popped);
  if (other != nullptr) gpu.call.cuCtxPushCurrent(other);
}

OtherContext::~OtherContext() noexcept(false) {
  std::vector<cuda::Context> left;
  for (cuda::Context popped = nullptr; gpu_.call.cuCtxPopCurrent(&popped) == cuda::Success && popped != nullptr;) left.push_back(popped);
  for (auto context = put_aside_.rbegin(); context != put_aside_.rend(); ++context) gpu_.call.cuCtxPushCurrent(*context);
  const bool as_it_was = other_ == nullptr ? left.empty() : left.size() == 1 && left.front() == other_;
  if (!as_it_was && std::uncaught_exceptions() == 0) fail("a call left another current context behind");
}

// ---- Streams ------------------------------------------------------------------------------------------------------

Gpu::StreamSlot& Gpu::slot(unsigned index) {
  StreamSlot& found = streams_[index];
  if (found.handle == nullptr) check(call.cuStreamCreate(&found.handle, cuda::StreamNonBlocking), "cuStreamCreate");
  return found;
}

cuda::Stream Gpu::stream(unsigned index) { return slot(index).handle; }

bool Gpu::idle(unsigned index) {
  const CuResult result = call.cuStreamQuery(stream(index));
  if (result != cuda::NotReady) check(result, "cuStreamQuery");
  return result == cuda::Success;
}

void Gpu::sync(unsigned index) {
  StreamSlot& which = slot(index);
  check(call.cuStreamSynchronize(which.handle), "cuStreamSynchronize");
  free_.insert(free_.end(), which.in_use.begin(), which.in_use.end());
  which.in_use.clear();
}

void Gpu::warm_up() {
  const std::uint64_t scratch = alloc(4096);
  upload(scratch, 4096, 1);
  check(call.cuMemsetD8Async(scratch, 0, 4096, stream()), "cuMemsetD8Async");
  sync();
  free(scratch);
}

void Gpu::hold(unsigned index) {
  StreamSlot& which = slot(index);
  which.held = true;
  if (simulated()) {
    check(call.sim_hold(which.handle), "gpuloan_sim_stream_hold");
    return;
  }
  expect(index < kHoldWords, "stream numbers end at 63");
  const auto word = reinterpret_cast<cuda::DevicePtr>(hold_words_ + index); // pinned memory has one address
  check(call.cuStreamWaitValue64(which.handle, word, ++which.waits, cuda::WaitGeq), "cuStreamWaitValue64");
}

void Gpu::release(unsigned index) noexcept {
  const auto found = streams_.find(index);
  if (found == streams_.end() || !found->second.held) return;
  found->second.held = false;
  if (simulated()) {
    call.sim_release(found->second.handle);
  } else {
    hold_words_[index] = found->second.waits;
  }
}

void Gpu::release_all() noexcept {
  for (const auto& [index, which] : streams_) release(index);
}

void Gpu::delay(unsigned index) {
  constexpr unsigned kMicroseconds = 20'000;
  StreamSlot& which = slot(index);
  if (simulated()) {
    check(call.sim_delay(which.handle, kMicroseconds), "gpuloan_sim_stream_delay");
    return;
  }
  for (int i = 0; i < 200; ++i) check(call.cuMemsetD8Async(scratch_, 0, kScratchBytes, which.handle), "cuMemsetD8Async");
}

// ---- Memory -------------------------------------------------------------------------------------------------------

Gpu::Pinned Gpu::pinned(std::uint64_t bytes) {
  const auto fits = std::find_if(free_.begin(), free_.end(), [bytes](const Pinned& buffer) { return buffer.bytes >= bytes; });
  if (fits != free_.end()) {
    const Pinned buffer = *fits;
    free_.erase(fits);
    return buffer;
  }
  void* data = nullptr;
  const std::size_t size = std::max<std::size_t>(bytes, 4096);
  check(call.cuMemAllocHost(&data, size), "cuMemAllocHost");
  ++pinned_;
  return {static_cast<unsigned char*>(data), size};
}

void Gpu::upload(std::uint64_t pointer, std::uint64_t bytes, std::uint64_t seed, unsigned index) {
  if (bytes == 0) return;
  const Pinned buffer = pinned(bytes);
  write_pattern({buffer.data, bytes}, seed);
  StreamSlot& which = slot(index);
  which.in_use.push_back(buffer);
  check(call.cuMemcpyHtoDAsync(pointer, buffer.data, bytes, which.handle), "cuMemcpyHtoDAsync");
}

std::string Gpu::mismatch(std::uint64_t pointer, std::uint64_t bytes, std::uint64_t seed, unsigned index) {
  if (bytes == 0) return {};
  const Pinned buffer = pinned(bytes);
  StreamSlot& which = slot(index);
  which.in_use.push_back(buffer);
  check(call.cuMemcpyDtoHAsync(buffer.data, pointer, bytes, which.handle), "cuMemcpyDtoHAsync");
  sync(index);
  const std::size_t at = pattern_mismatch({buffer.data, bytes}, seed);
  if (at == bytes) return {};
  return "byte " + std::to_string(at) + " of " + std::to_string(bytes) + " is not that of pattern " + std::to_string(seed);
}

std::uint64_t Gpu::alloc(std::uint64_t bytes) {
  cuda::DevicePtr pointer = 0;
  if (pool_ == nullptr) {
    check(call.cuMemAlloc(&pointer, bytes), "cuMemAlloc");
    return pointer;
  }
  check(call.cuMemAllocFromPoolAsync(&pointer, bytes, pool_, stream()), "cuMemAllocFromPoolAsync");
  sync();
  return pointer;
}

void Gpu::alloc_from_pool() {
  if (pool_ != nullptr) return;
  cuda::PoolProps props = {};
  props.type = cuda::AllocationPinned;
  props.handle_types = cuda::HandlePosixFd;
  props.location = {cuda::LocationDevice, ordinal_};
  check(call.cuMemPoolCreate(&pool_, &props), "cuMemPoolCreate");
  int fd = -1; // what its first export makes stays, and must not look like a leak
  check(call.cuMemPoolExportToShareableHandle(&fd, pool_, cuda::HandlePosixFd, 0), "cuMemPoolExportToShareableHandle");
  ::close(fd);
}

void Gpu::free(std::uint64_t pointer) {
  check(call.cuMemFree(pointer), "cuMemFree");
  settle_pool();
}

void Gpu::settle_pool() {
  if (pool_ != nullptr) sync(); // a pool gives memory back when something is waited for
}

std::uint64_t Gpu::used_bytes() const {
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  check(call.cuMemGetInfo(&free_bytes, &total), "cuMemGetInfo");
  return total - free_bytes;
}

std::map<std::string, std::int64_t> Gpu::live() const {
  std::map<std::string, std::int64_t> found;
  if (!simulated()) return found;
  for (const char* what : {"contexts", "streams", "events", "handles", "reservations", "mappings", "allocations", "imports", "host",
                           "waits", "pools"}) {
    found[what] = call.sim_live(what);
  }
  found["streams"] -= static_cast<std::int64_t>(streams_.size());
  found["host"] -= pinned_;
  return found;
}

} // namespace loan_test
