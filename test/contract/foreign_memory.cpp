// SPDX-License-Identifier: MIT
#include "foreign_memory.hpp"

#include "../support/pattern.hpp"

#include <dlfcn.h>
#include <memory>
#include <sys/mman.h>
#include <sys/socket.h>

namespace loan_test {
namespace {

struct Makers {
  CuResult (*cuDeviceGetAttribute)(int* value, int attribute, cuda::Device device);
  CuResult (*cuMemAllocManaged)(cuda::DevicePtr* pointer, std::size_t bytes, unsigned flags);
  CuResult (*cuMemHostRegister)(void* pointer, std::size_t bytes, unsigned flags);
  CuResult (*cuMemHostUnregister)(void* pointer);
  CuResult (*cuMemPoolCreate)(cuda::Pool* pool, const cuda::PoolProps* props);
  CuResult (*cuMemPoolDestroy)(cuda::Pool pool);
  CuResult (*cuMemAllocFromPoolAsync)(cuda::DevicePtr* pointer, std::size_t bytes, cuda::Pool pool, cuda::Stream stream);
  CuResult (*cuMemFreeAsync)(cuda::DevicePtr pointer, cuda::Stream stream);
  CuResult (*cuMemCreate)(cuda::MemHandle* handle, std::size_t bytes, const cuda::AllocationProp* prop, unsigned long long flags);
  CuResult (*cuMemRelease)(cuda::MemHandle handle);
  CuResult (*cuMemAddressReserve)(cuda::DevicePtr* pointer, std::size_t bytes, std::size_t alignment, cuda::DevicePtr hint,
                                  unsigned long long flags);
  CuResult (*cuMemAddressFree)(cuda::DevicePtr pointer, std::size_t bytes);
  CuResult (*cuMemMap)(cuda::DevicePtr pointer, std::size_t bytes, std::size_t offset, cuda::MemHandle handle, unsigned long long flags);
  CuResult (*cuMemUnmap)(cuda::DevicePtr pointer, std::size_t bytes);
  CuResult (*cuMemSetAccess)(cuda::DevicePtr pointer, std::size_t bytes, const cuda::AccessDesc* access, std::size_t count);
  CuResult (*cuIpcGetMemHandle)(cuda::IpcMemHandle* handle, cuda::DevicePtr pointer);
  CuResult (*cuIpcOpenMemHandle)(cuda::DevicePtr* pointer, cuda::IpcMemHandle handle, unsigned flags);
  CuResult (*cuIpcCloseMemHandle)(cuda::DevicePtr pointer);
};

template <typename Function>
void find(void* library, const char* name, Function& out) {
  out = reinterpret_cast<Function>(::dlsym(library, name));
}

Makers resolve(const char* path) {
  void* library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL); // loaded already: another reference
  if (library == nullptr) fail(::dlerror());
  Makers found = {};
  find(library, "cuDeviceGetAttribute", found.cuDeviceGetAttribute);
  find(library, "cuMemAllocManaged", found.cuMemAllocManaged);
  find(library, "cuMemHostRegister_v2", found.cuMemHostRegister);
  find(library, "cuMemHostUnregister", found.cuMemHostUnregister);
  find(library, "cuMemPoolCreate", found.cuMemPoolCreate);
  find(library, "cuMemPoolDestroy", found.cuMemPoolDestroy);
  find(library, "cuMemAllocFromPoolAsync", found.cuMemAllocFromPoolAsync);
  find(library, "cuMemFreeAsync", found.cuMemFreeAsync);
  find(library, "cuMemCreate", found.cuMemCreate);
  find(library, "cuMemRelease", found.cuMemRelease);
  find(library, "cuMemAddressReserve", found.cuMemAddressReserve);
  find(library, "cuMemAddressFree", found.cuMemAddressFree);
  find(library, "cuMemMap", found.cuMemMap);
  find(library, "cuMemUnmap", found.cuMemUnmap);
  find(library, "cuMemSetAccess", found.cuMemSetAccess);
  find(library, "cuIpcGetMemHandle", found.cuIpcGetMemHandle);
  find(library, "cuIpcOpenMemHandle_v2", found.cuIpcOpenMemHandle);
  find(library, "cuIpcCloseMemHandle", found.cuIpcCloseMemHandle);
  return found;
}

const Makers& makers(const Gpu& gpu) {
  static const Makers found = resolve(gpu.info().path); // one driver in a process
  return found;
}

// What a driver or device does not have is no failure of the library's.
void need(CuResult result, const char* what) {
  if (result == cuda::NotSupported) throw Skip{std::string(what) + " is not supported here"};
  if (result != cuda::Success) fail(std::string(what) + " says " + std::to_string(result));
}

void present(bool found, const char* what) {
  if (!found) throw Skip{std::string("this driver has no ") + what};
}

#define LOAN_TEST_MAKE(function, ...)                               \
  do {                                                              \
    present(makers(bench_.gpu).function != nullptr, #function);     \
    need(makers(bench_.gpu).function(__VA_ARGS__), #function);      \
  } while (false)

constexpr std::uint64_t rounded(std::uint64_t bytes) { return (bytes + kChunk - 1) / kChunk * kChunk; }

unsigned char* host(std::uint64_t address) { return reinterpret_cast<unsigned char*>(static_cast<std::uintptr_t>(address)); }

} // namespace

Foreign::Foreign(const Bench& bench, Made made, const Shape& shape)
    : bench_(bench), block_(shape.before + shape.bytes + shape.after), before_(shape.before), bytes_(shape.bytes) {
  try {
    start(made);
  } catch (...) {
    drop();
    throw;
  }
}

Foreign::~Foreign() { drop(); }

void Foreign::start(Made made) {
  switch (made) {
    case Made::Alloc: return make_alloc();
    case Made::PoolShareable: return make_from_pool(cuda::HandlePosixFd);
    case Made::PoolPrivate: return make_from_pool(cuda::HandleNone);
    case Made::VmmOne: return make_vmm(cuda::HandlePosixFd, rounded(block_));
    case Made::VmmMany: return make_vmm(cuda::HandlePosixFd, kChunk);
    case Made::Torch: return make_torch();
    case Made::VmmPrivate: return make_vmm(cuda::HandleNone, rounded(block_));
    case Made::Managed: return make_managed();
    case Made::HostAlloc: return make_pinned();
    case Made::HostRegistered: return make_registered();
    case Made::Opened: return make_opened();
    case Made::Unknown: return make_unknown();
  }
}

void Foreign::drop() noexcept {
  try {
    free();
  } catch (const Failure&) { // the search for what is left behind finds it
  } catch (const Skip&) {
  }
}

void Foreign::free() {
  if (const auto end = std::exchange(free_, nullptr)) end();
}

std::uint64_t Foreign::exposed_bytes() const noexcept {
  if (bytes_ == 0) return 0;
  if (chunk_ == 0) return block_ - bytes_;
  const std::uint64_t first = before_ / chunk_;
  const std::uint64_t last = (before_ + bytes_ - 1) / chunk_;
  return (last - first + 1) * chunk_ - bytes_;
}

// ---- The makers ---------------------------------------------------------------------------------------------------

void Foreign::make_alloc() {
  base_ = bench_.gpu.alloc(block_);
  free_ = [this] { bench_.gpu.free(base_); };
}

void Foreign::make_from_pool(int handle_types) {
  cuda::PoolProps props = {};
  props.type = cuda::AllocationPinned;
  props.handle_types = handle_types;
  props.location = {cuda::LocationDevice, 0};
  cuda::Pool pool = nullptr;
  LOAN_TEST_MAKE(cuMemPoolCreate, &pool, &props);
  free_ = [this, pool] { need(makers(bench_.gpu).cuMemPoolDestroy(pool), "cuMemPoolDestroy"); };
  LOAN_TEST_MAKE(cuMemAllocFromPoolAsync, &base_, block_, pool, bench_.gpu.stream());
  bench_.gpu.sync();
  free_ = [this, pool] {
    need(makers(bench_.gpu).cuMemFreeAsync(base_, bench_.gpu.stream()), "cuMemFreeAsync");
    bench_.gpu.sync();
    need(makers(bench_.gpu).cuMemPoolDestroy(pool), "cuMemPoolDestroy");
  };
}

void Foreign::make_vmm(int handle_types, std::uint64_t chunk) {
  block_ = rounded(block_);
  chunk_ = chunk;
  LOAN_TEST_MAKE(cuMemAddressReserve, &base_, block_, 0, 0, 0);
  free_ = [this, chunk] {
    for (std::uint64_t at = 0; at < block_; at += chunk) need(makers(bench_.gpu).cuMemUnmap(base_ + at, chunk), "cuMemUnmap");
    need(makers(bench_.gpu).cuMemAddressFree(base_, block_), "cuMemAddressFree");
  };
  cuda::AllocationProp prop = {};
  prop.type = cuda::AllocationPinned;
  prop.requested_handle_types = handle_types;
  prop.location = {cuda::LocationDevice, 0};
  for (std::uint64_t at = 0; at < block_; at += chunk) {
    cuda::MemHandle handle = 0;
    LOAN_TEST_MAKE(cuMemCreate, &handle, chunk, &prop, 0);
    LOAN_TEST_MAKE(cuMemMap, base_ + at, chunk, 0, handle, 0);
    LOAN_TEST_MAKE(cuMemRelease, handle); // the mapping keeps the memory
  }
  const cuda::AccessDesc access = {{cuda::LocationDevice, 0}, cuda::AccessReadWrite};
  LOAN_TEST_MAKE(cuMemSetAccess, base_, block_, &access, 1);
}

void Foreign::make_torch() {
  void* block = gpuloan_torch_malloc(block_, bench_.gpu.ordinal(), bench_.gpu.stream());
  if (block == nullptr) fail(std::string("gpuloan_torch_malloc: ") + gpuloan_error_text());
  base_ = reinterpret_cast<std::uintptr_t>(block);
  block_ = chunk_ = rounded(block_);
  free_ = [this, block] { gpuloan_torch_free(block, block_, bench_.gpu.ordinal(), bench_.gpu.stream()); };
}

void Foreign::make_managed() {
  constexpr unsigned kAttachGlobal = 1;
  LOAN_TEST_MAKE(cuMemAllocManaged, &base_, block_, kAttachGlobal);
  free_ = [this] { bench_.gpu.free(base_); };
}

void Foreign::make_pinned() {
  void* data = nullptr;
  need(bench_.gpu.call.cuMemAllocHost(&data, block_), "cuMemAllocHost");
  base_ = reinterpret_cast<std::uintptr_t>(data);
  on_host_ = true;
  free_ = [this, data] { need(bench_.gpu.call.cuMemFreeHost(data), "cuMemFreeHost"); };
}

void Foreign::make_registered() {
  void* data = ::mmap(nullptr, block_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  expect(data != MAP_FAILED, "mmap");
  free_ = [this, data] { ::munmap(data, block_); };
  LOAN_TEST_MAKE(cuMemHostRegister, data, block_, cuda::RegisterPortable | cuda::RegisterDeviceMap);
  base_ = reinterpret_cast<std::uintptr_t>(data);
  on_host_ = true;
  free_ = [this, data] {
    need(makers(bench_.gpu).cuMemHostUnregister(data), "cuMemHostUnregister");
    ::munmap(data, block_);
  };
}

void Foreign::make_opened() {
  SocketPair control = make_socketpair();
  auto owner = std::make_shared<Process>(
      std::vector<std::string>{"--owner", std::to_string(control.right.get()), "--driver", bench_.cell.driver},
      std::vector<int>{control.right.get()});
  control.right.reset();
  auto end = std::make_shared<Fd>(std::move(control.left));
  free_ = [owner, end] { owner->kill(); };
  expect(::send(end->get(), &block_, sizeof block_, MSG_NOSIGNAL) == sizeof block_, "the owner is gone");
  cuda::IpcMemHandle handle = {};
  if (::recv(end->get(), &handle, sizeof handle, 0) != sizeof handle) throw Skip{"this driver gives no legacy handle"};
  LOAN_TEST_MAKE(cuIpcOpenMemHandle, &base_, handle, cuda::IpcMemLazyPeerAccess);
  free_ = [this, owner, end] {
    need(makers(bench_.gpu).cuIpcCloseMemHandle(base_), "cuIpcCloseMemHandle");
    end->reset();
    expect_equal(owner->wait(), 0, "exit status of the owner");
  };
}

void Foreign::make_unknown() {
  auto data = std::make_shared<std::vector<unsigned char>>(block_);
  base_ = reinterpret_cast<std::uintptr_t>(data->data());
  on_host_ = true;
  free_ = [data]() mutable { data.reset(); };
}

int run_owner(int control, const char* driver) {
  Gpu gpu(driver);
  std::uint64_t bytes = 0;
  if (::recv(control, &bytes, sizeof bytes, 0) != sizeof bytes) return 1;
  const Makers& call = makers(gpu);
  cuda::IpcMemHandle handle = {};
  const std::uint64_t pointer = gpu.alloc(bytes);
  const bool made = call.cuIpcGetMemHandle != nullptr && call.cuIpcGetMemHandle(&handle, pointer) == cuda::Success;
  if (made && ::send(control, &handle, sizeof handle, MSG_NOSIGNAL) != sizeof handle) return 1;
  char word = 0;
  if (made) static_cast<void>(::recv(control, &word, 1, 0)); // ends with the other side
  gpu.free(pointer);
  return 0;
}

// ---- The bytes ----------------------------------------------------------------------------------------------------

void Foreign::write(std::uint64_t offset, std::uint64_t bytes, std::uint64_t seed) const {
  if (on_host_) {
    write_pattern({host(base_ + offset), bytes}, seed);
  } else {
    bench_.gpu.upload(base_ + offset, bytes, seed);
  }
}

std::string Foreign::wrong(std::uint64_t offset, std::uint64_t bytes, std::uint64_t seed) const {
  if (!on_host_) return bench_.gpu.mismatch(base_ + offset, bytes, seed);
  const std::size_t at = pattern_mismatch({host(base_ + offset), bytes}, seed);
  if (at == bytes) return {};
  return "byte " + std::to_string(at) + " of " + std::to_string(bytes) + " is not that of pattern " + std::to_string(seed);
}

void Foreign::fill(std::uint64_t before, std::uint64_t middle, std::uint64_t after) const {
  write(0, before_, before);
  write(before_, bytes_, middle);
  write(before_ + bytes_, block_ - before_ - bytes_, after);
}

void Foreign::check(std::uint64_t before, std::uint64_t middle, std::uint64_t after, Where where) const {
  const std::string middle_wrong = wrong(before_, bytes_, middle);
  if (!middle_wrong.empty()) fail("what was lent: " + middle_wrong, where);
  const std::string before_wrong = wrong(0, before_, before);
  if (!before_wrong.empty()) fail("what lies before the lent bytes: " + before_wrong, where);
  const std::string after_wrong = wrong(before_ + bytes_, block_ - before_ - bytes_, after);
  if (!after_wrong.empty()) fail("what lies behind the lent bytes: " + after_wrong, where);
}

// ---- Others -------------------------------------------------------------------------------------------------------

Gap::Gap(const Bench& bench, std::uint64_t address) : bench_(bench), address_(address) { LOAN_TEST_MAKE(cuMemUnmap, address, kChunk); }

Gap::~Gap() {
  const Makers& call = makers(bench_.gpu);
  cuda::AllocationProp prop = {};
  prop.type = cuda::AllocationPinned;
  prop.requested_handle_types = cuda::HandlePosixFd;
  prop.location = {cuda::LocationDevice, 0};
  cuda::MemHandle handle = 0;
  if (call.cuMemCreate(&handle, kChunk, &prop, 0) != cuda::Success) return;
  call.cuMemMap(address_, kChunk, 0, handle, 0);
  call.cuMemRelease(handle);
}

bool under_mps(const Bench& bench) {
  int value = 0;
  const Makers& call = makers(bench.gpu);
  return call.cuDeviceGetAttribute != nullptr && call.cuDeviceGetAttribute(&value, cuda::AttrMpsEnabled, 0) == cuda::Success && value != 0;
}

cuda::IpcMemHandle legacy_handle(const Bench& bench, std::uint64_t block) {
  const Makers& call = makers(bench.gpu);
  present(call.cuIpcGetMemHandle != nullptr, "cuIpcGetMemHandle");
  cuda::IpcMemHandle handle = {};
  need(call.cuIpcGetMemHandle(&handle, block), "cuIpcGetMemHandle");
  return handle;
}

} // namespace loan_test
