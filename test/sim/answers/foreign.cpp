// SPDX-License-Identifier: MIT
//
// Questions about memory that gpuloan did not allocate: what the driver says about each kind of pointer, the older
// cuIpcMemHandle, and memory pools. The other process of a section answers for itself; both take turns.
#include "answers.hpp"

#include <cstring>
#include <string>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace answers {
namespace {

// Two processes that take turns; made before the driver is initialised.
class Pair {
 public:
  Pair() {
    constexpr int kFlags = MAP_SHARED | MAP_ANONYMOUS;
    shared_ = static_cast<Shared*>(::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, kFlags, -1, 0));
    if (::socketpair(AF_UNIX, SOCK_DGRAM, 0, ends_) != 0) need(Unknown, "socketpair");
    child_ = ::fork();
    if (child_ == 0) ::alarm(50);
  }
  [[nodiscard]] bool importer() const { return child_ == 0; }
  void pass(std::uint64_t step) { store(&shared_->step, step); }
  void until(std::uint64_t step) {
    while (__atomic_load_n(&shared_->step, __ATOMIC_ACQUIRE) < step) ::usleep(500);
  }
  template <typename Value>
  void put(const Value& value) {
    std::memcpy(shared_->bytes, &value, sizeof value);
  }
  template <typename Value>
  [[nodiscard]] Value take() const {
    Value value;
    std::memcpy(&value, shared_->bytes, sizeof value);
    return value;
  }
  void send_fd(int fd) {
    char byte = 0;
    iovec part = {&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    if (::sendmsg(ends_[0], &message, 0) != 1) need(Unknown, "sendmsg");
  }
  [[nodiscard]] int receive_fd() {
    char byte = 0;
    iovec part = {&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (::recvmsg(ends_[1], &message, 0) != 1) need(Unknown, "recvmsg");
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
  }
  [[noreturn]] static void leave() {
    std::fflush(stdout);
    ::_exit(0);
  }
  void wait() const { ::waitpid(child_, nullptr, 0); }

 private:
  struct Shared {
    std::uint64_t step;
    unsigned char bytes[256];
  };
  Shared* shared_;
  int ends_[2] = {};
  pid_t child_ = -1;
};

void put(const std::string& prefix, const char* what, long long answer) { say((prefix + what).c_str(), answer); }

// What tells the kinds apart, asked one by one so that one refusal hides nothing.
void say_kind(const std::string& prefix, DevicePtr pointer) {
  struct {
    int attribute;
    const char* name;
  } const questions[] = {{PointerMemoryType, ".type"},     {PointerIsManaged, ".managed"},
                         {PointerLegacyIpcCapable, ".legacy"}, {PointerRangeSize, ".size"},
                         {PointerMapped, ".mapped"},       {PointerAllowedHandleTypes, ".handle-types"},
                         {PointerMemPool, ".pool"},        {PointerDeviceOrdinal, ".ordinal"}};
  for (const auto& [attribute, name] : questions) {
    unsigned long long value = 0;
    void* data = &value;
    const CuResult result = cuda.cuPointerGetAttributes(1, &attribute, &data, pointer);
    if (result != Success) put(prefix, (std::string(name) + ".result").c_str(), result);
    else if (attribute == PointerMemPool) put(prefix, name, value != 0);
    else put(prefix, name, static_cast<int>(value & 0xFFFFFFFF));
  }
  DevicePtr base = 0;
  const int start = PointerRangeStart;
  void* data = &base;
  if (cuda.cuPointerGetAttributes(1, &start, &data, pointer) == Success)
    put(prefix, ".offset", base == 0 ? -1 : static_cast<long long>(pointer - base));
  unsigned long long id = 0;
  const int buffer = PointerBufferId;
  data = &id;
  if (cuda.cuPointerGetAttributes(1, &buffer, &data, pointer) == Success) put(prefix, ".id-is-0", id == 0);
  MemHandle handle = 0;
  const CuResult retained = cuda.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(pointer));
  put(prefix, ".retain", retained);
  if (retained == Success) {
    AllocationProp found = {};
    put(prefix, ".retain.prop", cuda.cuMemGetAllocationPropertiesFromHandle(&found, handle));
    put(prefix, ".retain.prop.handles", found.requested_handle_types);
    int fd = -1;
    const CuResult exported = cuda.cuMemExportToShareableHandle(&fd, handle, HandlePosixFd, 0);
    put(prefix, ".retain.export", exported);
    if (exported == Success) ::close(fd);
    put(prefix, ".retain.release", cuda.cuMemRelease(handle));
  }
  IpcMemHandle legacy = {};
  put(prefix, ".get-handle", cuda.cuIpcGetMemHandle(&legacy, pointer));
  PoolPointer shared = {};
  put(prefix, ".export-pointer", cuda.cuMemPoolExportPointer(&shared, pointer));
}

long long look(DevicePtr at) {
  unsigned value = 0;
  if (const CuResult result = cuda.cuMemcpyDtoHAsync(&value, at, 4, nullptr)) return -result;
  if (const CuResult result = cuda.cuStreamSynchronize(nullptr)) return -result;
  return value;
}

} // namespace

Pool make_pool(int handle_types) {
  PoolProps props = {};
  props.type = AllocationPinned;
  props.handle_types = handle_types;
  props.location = {LocationDevice, 0};
  Pool pool = nullptr;
  need(cuda.cuMemPoolCreate(&pool, &props), "cuMemPoolCreate");
  return pool;
}

DevicePtr from_pool(Pool pool, std::size_t bytes) {
  DevicePtr pointer = 0;
  need(cuda.cuMemAllocFromPoolAsync(&pointer, bytes, pool, nullptr), "cuMemAllocFromPoolAsync");
  need(cuda.cuStreamSynchronize(nullptr), "sync");
  return pointer;
}

int export_pool(Pool pool) {
  int fd = -1;
  need(cuda.cuMemPoolExportToShareableHandle(&fd, pool, HandlePosixFd, 0), "cuMemPoolExportToShareableHandle");
  return fd;
}

CuResult import_pool(int fd, Pool* pool) {
  void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  return cuda.cuMemPoolImportFromShareableHandle(pool, shareable, HandlePosixFd, 0);
}

void fill(DevicePtr at, unsigned value, std::size_t words) {
  need(cuda.cuMemsetD32Async(at, value, words, nullptr), "fill");
  need(cuda.cuStreamSynchronize(nullptr), "sync");
}

void ask_kinds() {
  start();
  DevicePtr pointer = 0;
  need(cuda.cuMemAlloc(&pointer, 3 * kMiB), "cuMemAlloc");
  say_kind("alloc", pointer);
  say_kind("alloc-view", pointer + kMiB);
  say_kind("pool-fd-unexported", from_pool(make_pool(HandlePosixFd), 3 * kMiB));
  const Pool pool = make_pool(HandlePosixFd);
  ::close(export_pool(pool));
  pointer = from_pool(pool, 3 * kMiB);
  say_kind("pool-fd", pointer);
  say_kind("pool-fd-view", pointer + kMiB);
  say_kind("pool-none", from_pool(make_pool(HandleNone), 3 * kMiB));
  need(cuda.cuMemAllocAsync(&pointer, 3 * kMiB, nullptr), "cuMemAllocAsync");
  say_kind("pool-default", pointer);
  say_kind("vmm-fd", map(create(), AccessReadWrite));
  AllocationProp wish = prop();
  wish.requested_handle_types = HandleNone;
  MemHandle closed = 0;
  need(cuda.cuMemCreate(&closed, 2 * kMiB, &wish, 0), "cuMemCreate");
  say_kind("vmm-none", map(closed, AccessReadWrite));
  need(cuda.cuMemAddressReserve(&pointer, 4 * kMiB, 0, 0, 0), "cuMemAddressReserve");
  need(cuda.cuMemMap(pointer, 2 * kMiB, 0, create(), 0), "cuMemMap");
  need(cuda.cuMemMap(pointer + 2 * kMiB, 2 * kMiB, 0, create(), 0), "cuMemMap");
  need(give(pointer, 4 * kMiB, AccessReadWrite), "cuMemSetAccess");
  say_kind("vmm-many", pointer + 3 * kMiB);
  need(cuda.cuMemAllocManaged(&pointer, 3 * kMiB, 1), "cuMemAllocManaged");
  say_kind("managed", pointer);
  void* host = nullptr;
  need(cuda.cuMemAllocHost(&host, 3 * kMiB), "cuMemAllocHost");
  say_kind("host-alloc", at(host));
  say_kind("host-registered", at(words()));
  int local = 0;
  say_kind("unknown", at(&local));
  say_kind("null", 0);
}

void ask_legacy() {
  Pair pair;
  if (pair.importer()) {
    start();
    pair.until(1);
    const auto handle = pair.take<IpcMemHandle>();
    DevicePtr opened = 0, again = 0;
    say("open.flags-0", cuda.cuIpcOpenMemHandle(&opened, handle, 0));
    if (opened != 0) say("open.flags-0.close", cuda.cuIpcCloseMemHandle(opened));
    say("open.flags-2", cuda.cuIpcOpenMemHandle(&again, handle, 2));
    need(cuda.cuIpcOpenMemHandle(&opened, handle, IpcMemLazyPeerAccess), "cuIpcOpenMemHandle");
    say("open.twice", cuda.cuIpcOpenMemHandle(&again, handle, IpcMemLazyPeerAccess));
    say("open.twice.same", again == opened);
    say("sees", look(opened));
    say("sees-view", look(opened + kMiB));
    say_kind("opened", opened);
    say_kind("opened-view", opened + kMiB);
    say("close.inside", cuda.cuIpcCloseMemHandle(opened + 4096));
    say("free.opened", cuda.cuMemFree(opened));
    say("close", cuda.cuIpcCloseMemHandle(opened));
    say("sees-after-one-close", look(opened));
    say("close.again", cuda.cuIpcCloseMemHandle(opened));
    say("close.third", cuda.cuIpcCloseMemHandle(opened));
    need(cuda.cuIpcOpenMemHandle(&opened, handle, IpcMemLazyPeerAccess), "cuIpcOpenMemHandle");
    // Behind a wait.
    std::uint64_t* page = words();
    const Stream stuck = stream();
    need(cuda.cuStreamWaitValue64(stuck, at(page), 1, WaitGeq), "wait");
    DevicePtr second = 0;
    const auto other = pair.take<IpcMemHandle>();
    const auto open_it = [&] { static_cast<void>(cuda.cuIpcOpenMemHandle(&second, other, IpcMemLazyPeerAccess)); };
    const auto close_it = [=] { static_cast<void>(cuda.cuIpcCloseMemHandle(opened)); };
    say("open.under-wait", ends_within_ms(patience_ms(), open_it));
    say("close.under-wait", ends_within_ms(patience_ms(), close_it));
    store(page, 1);
    need(cuda.cuStreamSynchronize(stuck), "sync");
    ::usleep(100'000);
    if (second != 0) static_cast<void>(cuda.cuIpcCloseMemHandle(second));
    need(cuda.cuIpcOpenMemHandle(&opened, handle, IpcMemLazyPeerAccess), "cuIpcOpenMemHandle");
    pair.pass(2);
    pair.until(3); // freed over there
    say("freed.sees", look(opened));
    say("freed.fill", cuda.cuMemsetD32Async(opened, 5, 1024, nullptr));
    say("freed.sync", cuda.cuStreamSynchronize(nullptr));
    say("freed.open-again", cuda.cuIpcOpenMemHandle(&again, handle, IpcMemLazyPeerAccess));
    say("freed.close", cuda.cuIpcCloseMemHandle(opened));
    say("freed.open-after-close", cuda.cuIpcOpenMemHandle(&again, handle, IpcMemLazyPeerAccess));
    pair.pass(4);
    pair.until(5);
    Pair::leave();
  }
  start();
  DevicePtr pointer = 0;
  need(cuda.cuMemAlloc(&pointer, 4 * kMiB), "cuMemAlloc");
  fill(pointer, 7);
  fill(pointer + kMiB, 8);
  IpcMemHandle handle = {}, view = {}, second = {};
  say("get", cuda.cuIpcGetMemHandle(&handle, pointer));
  say("get.again", cuda.cuIpcGetMemHandle(&second, pointer));
  say("get.again.same", std::memcmp(&handle, &second, sizeof handle) == 0);
  say("get.view", cuda.cuIpcGetMemHandle(&view, pointer + kMiB));
  say("get.view.same", std::memcmp(&handle, &view, sizeof handle) == 0);
  DevicePtr opened = 0;
  say("open.same-process", cuda.cuIpcOpenMemHandle(&opened, handle, IpcMemLazyPeerAccess));
  say("close.not-opened", cuda.cuIpcCloseMemHandle(pointer));
  IpcMemHandle nonsense = {};
  say("open.nonsense", cuda.cuIpcOpenMemHandle(&opened, nonsense, IpcMemLazyPeerAccess));
  pair.put(handle);
  pair.pass(1);
  pair.until(2);
  say("free-while-open", cuda.cuMemFree(pointer));
  DevicePtr next = 0;
  need(cuda.cuMemAlloc(&next, 4 * kMiB), "cuMemAlloc");
  fill(next, 11);
  pair.pass(3);
  pair.until(4);
  say("next.sees", look(next));
  pair.pass(5);
  pair.wait();
}

void ask_pools() {
  start();
  Pool pool = make_pool(HandlePosixFd);
  DevicePtr pointer = from_pool(pool, 3 * kMiB);
  PoolPointer shared = {}, again = {};
  say("pointer.before-pool", cuda.cuMemPoolExportPointer(&shared, pointer));
  int fd = -1;
  say("export.flags", cuda.cuMemPoolExportToShareableHandle(&fd, pool, HandlePosixFd, 1));
  say("export.type-2", cuda.cuMemPoolExportToShareableHandle(&fd, pool, 2, 0));
  say("export", cuda.cuMemPoolExportToShareableHandle(&fd, pool, HandlePosixFd, 0));
  ::close(fd);
  say("pointer", cuda.cuMemPoolExportPointer(&shared, pointer));
  say("pointer.again", cuda.cuMemPoolExportPointer(&again, pointer));
  say("pointer.again.same", std::memcmp(&shared, &again, sizeof shared) == 0);
  say("pointer.view", cuda.cuMemPoolExportPointer(&again, pointer + kMiB));
  say("export.none", cuda.cuMemPoolExportToShareableHandle(&fd, make_pool(HandleNone), HandlePosixFd, 0));
  Pool standard = nullptr, current = nullptr;
  say("default", cuda.cuDeviceGetDefaultMemPool(&standard, 0));
  say("current", cuda.cuDeviceGetMemPool(&current, 0));
  say("current.is-default", current == standard);
  say("default.export", cuda.cuMemPoolExportToShareableHandle(&fd, standard, HandlePosixFd, 0)); // R10
  say("default.destroy", cuda.cuMemPoolDestroy(standard));
  say("set", cuda.cuDeviceSetMemPool(0, pool));
  say("set.get", cuda.cuDeviceGetMemPool(&current, 0));
  say("set.same", current == pool);
  DevicePtr mine = 0;
  say("set.alloc", cuda.cuMemAllocAsync(&mine, kMiB, nullptr));
  say("set.alloc.export", cuda.cuMemPoolExportPointer(&again, mine));
  say("set.back", cuda.cuDeviceSetMemPool(0, standard));
  say("set.null", cuda.cuDeviceSetMemPool(0, nullptr));
  std::uint64_t value = 0;
  say("threshold.get", cuda.cuMemPoolGetAttribute(pool, PoolReleaseThreshold, &value));
  say("threshold", static_cast<long long>(value));
  value = UINT64_MAX;
  say("threshold.set", cuda.cuMemPoolSetAttribute(pool, PoolReleaseThreshold, &value));
  say("used.get", cuda.cuMemPoolGetAttribute(pool, PoolUsedBytes, &value));
  say("used", static_cast<long long>(value));
  say("reserved.get", cuda.cuMemPoolGetAttribute(pool, PoolReservedBytes, &value));
  say("reserved", static_cast<long long>(value));
  say("free", cuda.cuMemFree(pointer));
  say("free-async", cuda.cuMemFreeAsync(mine, nullptr));
  say("free-async.twice", cuda.cuMemFreeAsync(mine, nullptr));
  need(cuda.cuStreamSynchronize(nullptr), "sync");
  say("freed.export", cuda.cuMemPoolExportPointer(&again, pointer));
  static_cast<void>(cuda.cuMemPoolGetAttribute(pool, PoolReservedBytes, &value));
  say("freed.reserved", static_cast<long long>(value));
  say("trim", cuda.cuMemPoolTrimTo(pool, 0));
  static_cast<void>(cuda.cuMemPoolGetAttribute(pool, PoolReservedBytes, &value));
  say("trim.reserved", static_cast<long long>(value));
  say("size-0", cuda.cuMemAllocFromPoolAsync(&pointer, 0, pool, nullptr));
  say("destroy", cuda.cuMemPoolDestroy(pool));
  PoolProps props = {};
  say("create.type-0", cuda.cuMemPoolCreate(&pool, &props));
}

void ask_pool_import() {
  Pair pair;
  if (pair.importer()) {
    start();
    pair.until(1);
    const int fd = pair.receive_fd();
    Pool pool = nullptr, twice = nullptr;
    need(import_pool(fd, &pool), "cuMemPoolImportFromShareableHandle");
    say("import.twice", import_pool(fd, &twice));
    ::close(fd);
    auto shared = pair.take<PoolPointer>();
    DevicePtr first = 0, again = 0, made = 0;
    say("pointer", cuda.cuMemPoolImportPointer(&first, pool, &shared));
    say("sees", look(first));
    say("sees-view", look(first + kMiB));
    say_kind("imported", first);
    say_kind("imported-view", first + kMiB);
    say("pointer.twice", cuda.cuMemPoolImportPointer(&again, pool, &shared));
    say("pointer.twice.same", again == first);
    say("alloc", cuda.cuMemAllocFromPoolAsync(&made, kMiB, pool, nullptr));
    say("make-current", cuda.cuDeviceSetMemPool(0, pool));
    say("trim", cuda.cuMemPoolTrimTo(pool, 0));
    const AccessDesc read_only = {{LocationDevice, 0}, AccessRead};
    say("access.read", cuda.cuMemPoolSetAccess(pool, &read_only, 1));
    say("free", cuda.cuMemFree(first));
    say("free.again", cuda.cuMemFree(first));
    say("pointer.later", cuda.cuMemPoolImportPointer(&first, pool, &shared));
    say("pointer.later.sees", look(first));
    std::uint64_t* page = words();
    const Stream stuck = stream();
    need(cuda.cuStreamWaitValue64(stuck, at(page), 1, WaitGeq), "wait");
    say("free.under-wait", ends_within_ms(patience_ms(), [=] { static_cast<void>(cuda.cuMemFree(first)); }));
    store(page, 1);
    need(cuda.cuStreamSynchronize(stuck), "sync");
    ::usleep(100'000);
    need(cuda.cuMemPoolImportPointer(&first, pool, &shared), "cuMemPoolImportPointer");
    pair.pass(2);
    pair.until(3); // freed over there, and the same block is in use again
    say("stale.fill", cuda.cuMemsetD32Async(first, 99, 1024, nullptr));
    say("stale.sync", cuda.cuStreamSynchronize(nullptr));
    pair.pass(4);
    pair.until(5);
    say("destroy-with-pointer", cuda.cuMemPoolDestroy(pool));
    say("destroyed.sees", look(first) < 0 ? -1 : 0);
    pair.pass(6);
    Pair::leave();
  }
  start();
  const Pool pool = make_pool(HandlePosixFd);
  std::uint64_t keep = UINT64_MAX;
  need(cuda.cuMemPoolSetAttribute(pool, PoolReleaseThreshold, &keep), "threshold");
  const int fd = export_pool(pool);
  DevicePtr pointer = from_pool(pool, 3 * kMiB);
  fill(pointer, 7);
  fill(pointer + kMiB, 8);
  PoolPointer shared = {};
  need(cuda.cuMemPoolExportPointer(&shared, pointer), "cuMemPoolExportPointer");
  pair.put(shared);
  pair.send_fd(fd);
  pair.pass(1);
  pair.until(2);
  need(cuda.cuMemFree(pointer), "cuMemFree");
  const DevicePtr next = from_pool(pool, 3 * kMiB);
  say("reused-address", next == pointer);
  fill(next, 11);
  pair.pass(3);
  pair.until(4);
  say("stale.seen", look(next));
  pair.pass(5);
  pair.until(6);
  pair.wait();
}

} // namespace answers
