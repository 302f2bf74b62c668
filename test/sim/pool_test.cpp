// SPDX-License-Identifier: MIT
//
// Memory pools: reuse, what a pool gives back and when, and sharing across processes with all its pitfalls.
#include "child.hpp"
#include "driver.hpp"

#include <csignal>
#include <cstring>
#include <unistd.h>

using namespace sim_test;

namespace {

constexpr std::uint64_t kForever = UINT64_MAX;

Pool make_pool(std::uint64_t threshold = 0, int handle_types = HandlePosixFd) {
  PoolProps props = {};
  props.type = AllocationPinned;
  props.handle_types = handle_types;
  props.location = {LocationDevice, 0};
  Pool pool = nullptr;
  REQUIRE(driver().cuMemPoolCreate(&pool, &props) == Success);
  REQUIRE(driver().cuMemPoolSetAttribute(pool, PoolReleaseThreshold, &threshold) == Success);
  return pool;
}

DevicePtr allocate(Pool pool, std::size_t bytes) {
  DevicePtr pointer = 0;
  REQUIRE(driver().cuMemAllocFromPoolAsync(&pointer, bytes, pool, nullptr) == Success);
  return pointer;
}

void synchronize() { REQUIRE(driver().cuStreamSynchronize(nullptr) == Success); }

int export_pool(Pool pool) {
  int fd = -1;
  REQUIRE(driver().cuMemPoolExportToShareableHandle(&fd, pool, HandlePosixFd, 0) == Success);
  return fd;
}

CuResult try_import(int fd, Pool& out) {
  void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  return driver().cuMemPoolImportFromShareableHandle(&out, shareable, HandlePosixFd, 0);
}

PoolPointer export_pointer(DevicePtr pointer) {
  PoolPointer shared = {};
  REQUIRE(driver().cuMemPoolExportPointer(&shared, pointer) == Success);
  return shared;
}

CuResult try_import_pointer(Pool pool, PoolPointer shared, DevicePtr& out) {
  return driver().cuMemPoolImportPointer(&out, pool, &shared);
}

DevicePtr import_pointer(Pool pool, const PoolPointer& shared) {
  DevicePtr pointer = 0;
  REQUIRE(try_import_pointer(pool, shared, pointer) == Success);
  return pointer;
}

std::uint64_t attribute(Pool pool, int which) {
  std::uint64_t value = 99;
  REQUIRE(driver().cuMemPoolGetAttribute(pool, which, &value) == Success);
  return value;
}

std::uint64_t buffer_id(DevicePtr pointer) {
  std::uint64_t id = 0;
  const int which = PointerBufferId;
  void* data = &id;
  REQUIRE(driver().cuPointerGetAttributes(1, &which, &data, pointer) == Success);
  return id;
}

void send(const Link::End& to, const PoolPointer& shared) { to.send_bytes(&shared, sizeof shared); }

PoolPointer receive_pointer(const Link::End& from) {
  PoolPointer shared = {};
  from.receive_bytes(&shared, sizeof shared);
  return shared;
}

Pool receive_pool(const Link::End& from) {
  const int fd = from.receive_fd();
  Pool pool = nullptr;
  REQUIRE(try_import(fd, pool) == Success);
  ::close(fd);
  return pool;
}

// The exporting half of most cases: a pool that keeps its blocks, and one allocation in it.
struct Exported {
  Pool pool;
  DevicePtr pointer;
};

Exported lend(const Link::End& to, std::size_t bytes = 2 * kMiB, std::uint64_t threshold = kForever) {
  const Pool pool = make_pool(threshold);
  const int fd = export_pool(pool);
  to.send_fd(fd);
  ::close(fd);
  const DevicePtr pointer = allocate(pool, bytes);
  send(to, export_pointer(pointer));
  return {pool, pointer};
}

} // namespace

TEST_CASE("pool memory is kept up to the threshold until the next synchronisation") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const int before = open_fds();
    const Pool pool = make_pool(4 * kMiB);
    const DevicePtr first = allocate(pool, 3 * kMiB);
    const DevicePtr second = allocate(pool, 2 * kMiB);
    CHECK(used_bytes() == 5 * kMiB);
    CHECK(attribute(pool, PoolUsedBytes) == 5 * kMiB);
    CHECK(attribute(pool, PoolReservedBytes) == 32 * kMiB);
    CHECK(cuda.cuMemFree(first) == Success);
    CHECK(cuda.cuMemFree(first) == InvalidValue);
    CHECK(cuda.cuMemFreeAsync(second, nullptr) == Success);
    CHECK(cuda.cuMemFreeAsync(second, nullptr) == InvalidValue);
    CHECK(cuda.cuMemFree(second) == InvalidValue);
    synchronize();
    CHECK(used_bytes() == 5 * kMiB); // without the older block it were less than the pool may keep
    CHECK(allocate(pool, 2 * kMiB) == second);
    CHECK(allocate(pool, 3 * kMiB) == first);
    CHECK(cuda.cuMemFree(second) == Success);
    CHECK(cuda.cuMemFree(first) == Success);
    CHECK(cuda.cuMemPoolTrimTo(pool, 3 * kMiB) == Success);
    CHECK(used_bytes() == 3 * kMiB);
    CHECK(cuda.cuMemPoolTrimTo(pool, 0) == Success);
    CHECK(used_bytes() == 0);
    CHECK(attribute(pool, PoolReservedBytes) == 0);
    std::uint64_t nothing = 0;
    CHECK(cuda.cuMemPoolSetAttribute(pool, PoolReleaseThreshold, &nothing) == Success);
    CHECK(cuda.cuMemFree(allocate(pool, kMiB)) == Success);
    CHECK(used_bytes() == kMiB);
    CHECK(cuda.cuCtxSynchronize() == Success);
    CHECK(used_bytes() == 0);
    CHECK(cuda.cuMemPoolDestroy(pool) == Success);
    CHECK(cuda.cuMemPoolDestroy(pool) == InvalidValue);
    CHECK(cuda.live("pools") + cuda.live("allocations") + cuda.live("reservations") == 0);
    CHECK(open_fds() == before);
  });
}

TEST_CASE("memory freed in a stream is there for the work before") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Pool pool = make_pool(kForever);
    const DevicePtr pointer = allocate(pool, kMiB);
    const Stream stream = make_stream();
    CHECK(cuda.stream_hold(stream) == Success);
    CHECK(cuda.cuMemsetD32Async(pointer, 7, 1, stream) == Success);
    CHECK(cuda.cuMemFreeAsync(pointer, stream) == Success);
    CHECK(attribute(pool, PoolUsedBytes) == kMiB);
    const DevicePtr other = allocate(pool, kMiB);
    CHECK(other != pointer);
    CHECK(cuda.stream_release(stream) == Success);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(cuda.live("allocations") == 1);
    CHECK(read_word(allocate(pool, kMiB)) == 7); // the same block, as it was left
    CHECK(cuda.stream_hold(stream) == Success);
    CHECK(cuda.cuMemsetD32Async(pointer, 8, 1, stream) == Success);
    CHECK(cuda.cuMemFree(pointer) == Success); // waits for nothing, so what is under way fails
    CHECK(cuda.stream_release(stream) == Success);
    CHECK(cuda.cuStreamSynchronize(stream) == IllegalAddress);
  });
}

TEST_CASE("the current pool of a device, and pools that end with memory out") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    Pool standard = nullptr;
    Pool current = nullptr;
    CHECK(cuda.cuDeviceGetDefaultMemPool(&standard, 0) == Success);
    const Pool pool = make_pool();
    CHECK(cuda.cuDeviceSetMemPool(0, pool) == Success);
    DevicePtr pointer = 0;
    CHECK(cuda.cuMemAllocAsync(&pointer, kMiB, nullptr) == Success);
    CHECK(attribute(pool, PoolUsedBytes) == kMiB);
    const DevicePtr second = allocate(pool, kMiB);
    CHECK(cuda.cuMemPoolDestroy(pool) == Success);
    CHECK(cuda.cuMemFree(second) == Success);
    CHECK(cuda.cuDeviceGetMemPool(&current, 0) == Success);
    CHECK(current == standard);
    write_word(pointer, 1);
    CHECK(used_bytes() == kMiB);
    CHECK(cuda.cuMemFree(pointer) == Success);
    CHECK(used_bytes() == 0);
    CHECK(cuda.cuMemPoolDestroy(standard) == InvalidValue);
    CHECK(cuda.cuDeviceSetMemPool(0, nullptr) == InvalidValue);
    CHECK(cuda.cuDeviceSetMemPool(1, standard) == InvalidDevice);
    CHECK(cuda.live("pools") == 0);
  });
}

TEST_CASE("a pool takes no more than there is, and no more than it may") {
  Machine machine;
  machine.set("GPULOAN_SIM_MEMORY_MIB", "8");
  in_child([] {
    const Driver& cuda = start();
    const Pool pool = make_pool(kForever);
    CHECK(cuda.cuMemFree(allocate(pool, 6 * kMiB)) == Success);
    CHECK(used_bytes() == 6 * kMiB);
    const DevicePtr large = allocate(pool, 8 * kMiB); // what is idle makes room
    DevicePtr more = 0;
    CHECK(cuda.cuMemAllocFromPoolAsync(&more, kMiB, pool, nullptr) == OutOfMemory);
    CHECK(cuda.cuMemFree(large) == Success);
    CHECK(cuda.cuMemPoolDestroy(pool) == Success);
    PoolProps props = {};
    props.type = AllocationPinned;
    props.location = {LocationDevice, 0};
    props.max_size = 3 * kMiB;
    Pool small = nullptr;
    CHECK(cuda.cuMemPoolCreate(&small, &props) == Success);
    static_cast<void>(allocate(small, 2 * kMiB));
    CHECK(cuda.cuMemAllocFromPoolAsync(&more, 2 * kMiB, small, nullptr) == OutOfMemory);
    props.location.id = 1;
    CHECK(cuda.cuMemPoolCreate(&small, &props) == InvalidDevice);
  });
}

// R8, R13
TEST_CASE("P1, P2, P11: what can be exported of a pool") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Pool pool = make_pool();
    const DevicePtr pointer = allocate(pool, 2 * kMiB);
    PoolPointer shared = {};
    CHECK(cuda.cuMemPoolExportPointer(&shared, pointer) == InvalidValue); // P1
    ::close(export_pool(pool));
    CHECK(cuda.cuMemPoolExportPointer(&shared, pointer) == Success);
    CHECK(cuda.cuMemPoolExportPointer(&shared, pointer + 4096) == InvalidValue); // P2
    IpcMemHandle handle = {};
    CHECK(cuda.cuIpcGetMemHandle(&handle, pointer) == InvalidValue); // P11
    int fd = -1;
    CHECK(cuda.cuMemPoolExportToShareableHandle(&fd, make_pool(0, HandleNone), HandlePosixFd, 0) == InvalidValue);
    CHECK(fd == -1);
  });
}

TEST_CASE("P14: one block after the other at the same address is the same bytes and another buffer") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Pool pool = make_pool(kForever);
    ::close(export_pool(pool));
    DevicePtr pointer = allocate(pool, 2 * kMiB);
    const PoolPointer first = export_pointer(pointer);
    std::uint64_t id = buffer_id(pointer);
    for (int round = 0; round < 2; ++round) {
      CHECK(cuda.cuMemFree(pointer) == Success);
      const DevicePtr next = allocate(pool, 2 * kMiB);
      CHECK(next == pointer);
      const PoolPointer again = export_pointer(next);
      CHECK(std::memcmp(&first, &again, sizeof first) == 0);
      CHECK(buffer_id(next) > id);
      id = buffer_id(next);
    }
  });
}

// R2, R3
TEST_CASE("P6, P9: a pool and its memory in another process") {
  Machine machine;
  Link link;
  Child exporter([&] {
    start();
    const int before = open_fds();
    const Exported lent = lend(link.left());
    write_word(lent.pointer + kMiB, 7);
    link.left().say(1);
    CHECK(link.left().hear() == 2);
    CHECK(read_word(lent.pointer) == 8);
    CHECK(driver().cuMemFree(lent.pointer) == Success);
    CHECK(driver().cuMemPoolDestroy(lent.pool) == Success);
    CHECK(used_bytes() == 0);
    CHECK(open_fds() == before);
  });
  Child importer([&] {
    const Driver& cuda = start();
    const int before = open_fds();
    const Pool pool = receive_pool(link.right());
    const PoolPointer shared = receive_pointer(link.right());
    CHECK(link.right().hear() == 1);
    const DevicePtr pointer = import_pointer(pool, shared);
    CHECK(read_word(pointer + kMiB) == 7);
    write_word(pointer, 8);
    CHECK(used_bytes() == 2 * kMiB);
    CHECK(import_pointer(pool, shared) == pointer); // P6
    CHECK(cuda.cuMemPoolDestroy(pool) == InvalidValue); // memory is out
    DevicePtr none = 0;
    CHECK(cuda.cuMemAllocFromPoolAsync(&none, kMiB, pool, nullptr) == InvalidValue);
    CHECK(cuda.cuDeviceSetMemPool(0, pool) == InvalidValue);
    CHECK(cuda.cuMemPoolTrimTo(pool, 0) == InvalidValue); // P9
    CHECK(cuda.cuMemFree(pointer) == Success);
    CHECK(cuda.cuMemFree(pointer) == InvalidValue); // P6
    const DevicePtr again = import_pointer(pool, shared);
    CHECK(cuda.cuMemFreeAsync(again, nullptr) == Success); // P10
    synchronize();
    CHECK(cuda.live("imports") == 0);
    CHECK(cuda.cuMemPoolDestroy(pool) == Success);
    CHECK(open_fds() == before);
    link.right().say(2);
  });
  importer.finish();
  exporter.finish();
}

// R1
TEST_CASE("P7: a stale importer writes into the next owner's memory") {
  Machine machine;
  Link link;
  Child exporter([&] {
    start();
    const Exported lent = lend(link.left());
    CHECK(link.left().hear() == 1);
    CHECK(driver().cuMemFree(lent.pointer) == Success);
    synchronize();
    const DevicePtr next = allocate(lent.pool, 2 * kMiB);
    CHECK(next == lent.pointer);
    write_word(next, 11);
    link.left().say(2);
    CHECK(link.left().hear() == 3);
    CHECK(read_word(next) == 99);
  });
  Child importer([&] {
    start();
    const Pool pool = receive_pool(link.right());
    const DevicePtr pointer = import_pointer(pool, receive_pointer(link.right()));
    link.right().say(1);
    CHECK(link.right().hear() == 2);
    write_word(pointer, 99);
    link.right().say(3);
  });
  importer.finish();
  exporter.finish();
}

// R9
TEST_CASE("P3: importing an allocation over 5248 MiB is the end of the importer") {
  Machine machine;
  Link link;
  Child exporter([&] {
    start();
    const Exported lent = lend(link.left(), 5248 * kMiB);
    send(link.left(), export_pointer(allocate(lent.pool, 5250 * kMiB)));
    CHECK(link.left().hear() == 1);
  });
  Child importer([&] {
    start();
    const Pool pool = receive_pool(link.right());
    write_word(import_pointer(pool, receive_pointer(link.right())) + 5247 * kMiB, 1);
    const PoolPointer too_large = receive_pointer(link.right());
    link.right().say(1);
    ::signal(SIGSEGV, [](int) { ::_exit(0); });
    DevicePtr pointer = 0;
    static_cast<void>(try_import_pointer(pool, too_large, pointer));
    FAIL("survived");
  });
  importer.finish();
  exporter.finish();
}

TEST_CASE("the largest import and the end of a larger one can be chosen") {
  struct {
    const char* limit;
    std::size_t mebibytes;
    CuResult result;
  } const rows[] = {{"64:fails", 64, Success}, {"64:fails", 66, InvalidValue}, {"0", 6000, Success}};
  for (const auto& row : rows) {
    CAPTURE(row.limit);
    Machine machine;
    machine.set("GPULOAN_SIM_IMPORT_LIMIT_MIB", row.limit);
    Link link;
    Child exporter([&] {
      start();
      static_cast<void>(lend(link.left(), row.mebibytes * kMiB));
      CHECK(link.left().hear() == 1);
    });
    Child importer([&] {
      start();
      const Pool pool = receive_pool(link.right());
      DevicePtr pointer = 0;
      CHECK(try_import_pointer(pool, receive_pointer(link.right()), pointer) == row.result);
      link.right().say(1);
    });
    importer.finish();
    exporter.finish();
  }
}

TEST_CASE("memory that the exporter gave back stays with the importer, and cannot be imported any more") {
  Machine machine;
  Link link;
  Child exporter([&] {
    start();
    const Exported lent = lend(link.left(), 2 * kMiB, 0);
    write_word(lent.pointer, 41);
    CHECK(link.left().hear() == 1);
    CHECK(driver().cuMemFree(lent.pointer) == Success);
    synchronize();
    CHECK(attribute(lent.pool, PoolReservedBytes) == 0);
    CHECK(used_bytes() == 2 * kMiB);
    const DevicePtr next = allocate(lent.pool, 2 * kMiB);
    write_word(next, 5);
    link.left().say(2);
    CHECK(link.left().hear() == 3);
    CHECK(read_word(next) == 5);
    CHECK(used_bytes() == 2 * kMiB);
  });
  Child importer([&] {
    const Driver& cuda = start();
    const Pool pool = receive_pool(link.right());
    const PoolPointer shared = receive_pointer(link.right());
    DevicePtr pointer = import_pointer(pool, shared);
    link.right().say(1);
    CHECK(link.right().hear() == 2);
    CHECK(read_word(pointer) == 41);
    write_word(pointer, 42);
    CHECK(cuda.cuMemFree(pointer) == Success);
    CHECK(try_import_pointer(pool, shared, pointer) == InvalidValue);
    link.right().say(3);
  });
  importer.finish();
  exporter.finish();
}

TEST_CASE("S8: pool memory of a killed exporter stays with the importer") {
  Machine machine;
  Link link;
  Link tell;
  Child exporter([&] {
    start();
    const Exported lent = lend(link.left());
    write_word(lent.pointer, 7);
    send(link.left(), export_pointer(allocate(lent.pool, 4 * kMiB)));
    ::pause();
  });
  Child importer([&] {
    const Driver& cuda = start();
    const Pool pool = receive_pool(link.right());
    const DevicePtr pointer = import_pointer(pool, receive_pointer(link.right()));
    const PoolPointer other = receive_pointer(link.right());
    tell.right().say(1);
    CHECK(tell.right().hear() == 2);
    CHECK(used_bytes() == 2 * kMiB);
    CHECK(read_word(pointer) == 7);
    write_word(pointer, 8);
    DevicePtr none = 0;
    CHECK(try_import_pointer(pool, other, none) == InvalidValue);
    CHECK(cuda.cuMemFree(pointer) == Success);
    CHECK(cuda.cuMemPoolDestroy(pool) == Success);
    CHECK(used_bytes() == 0);
  });
  CHECK(tell.left().hear() == 1);
  exporter.kill();
  tell.left().say(2);
  importer.finish();
}

TEST_CASE("what a killed importer had of a pool is not taken any more") {
  Machine machine;
  Link link;
  Link tell;
  Child exporter([&] {
    start();
    const Exported lent = lend(link.left());
    CHECK(tell.left().hear() == 1);
    CHECK(driver().cuMemFree(lent.pointer) == Success);
    CHECK(driver().cuMemPoolDestroy(lent.pool) == Success);
    CHECK(used_bytes() == 2 * kMiB);
    tell.left().say(2);
    CHECK(tell.left().hear() == 3);
    CHECK(used_bytes() == 0);
  });
  Child importer([&] {
    start();
    const Pool pool = receive_pool(link.right());
    static_cast<void>(import_pointer(pool, receive_pointer(link.right())));
    link.right().say(1);
    ::pause();
  });
  CHECK(link.left().hear() == 1);
  tell.right().say(1);
  CHECK(tell.right().hear() == 2);
  importer.kill();
  tell.right().say(3);
  exporter.finish();
}

TEST_CASE("what is no pool, or no pointer of this pool, is refused") {
  Machine machine;
  Link link;
  Child exporter([&] {
    start();
    static_cast<void>(lend(link.left()));
    static_cast<void>(lend(link.left()));
    link.left().send_fd(export_fd(create_chunk(2 * kMiB)));
    CHECK(link.left().hear() == 1);
  });
  Child importer([&] {
    start();
    const Pool pool = receive_pool(link.right());
    const PoolPointer shared = receive_pointer(link.right());
    const Pool other = receive_pool(link.right());
    static_cast<void>(receive_pointer(link.right()));
    DevicePtr pointer = 0;
    CHECK(try_import_pointer(other, shared, pointer) == InvalidValue);
    CHECK(try_import_pointer(pool, {}, pointer) == InvalidValue);
    CHECK(try_import_pointer(make_pool(), shared, pointer) == InvalidValue);
    Pool none = nullptr;
    CHECK(try_import(link.right().receive_fd(), none) == Unknown); // VMM memory
    CHECK(try_import(-1, none) == Unknown);
    link.right().say(1);
  });
  importer.finish();
  exporter.finish();
}

TEST_CASE("pool memory is open to its own device, and to others that were given access") {
  Machine machine;
  machine.set("GPULOAN_SIM_DEVICES", "2");
  in_child([] {
    const Driver& cuda = start(0);
    const Pool pool = make_pool();
    const DevicePtr pointer = allocate(pool, kMiB);
    write_word(pointer, 3);
    start(1);
    std::uint32_t word = 0;
    CHECK(cuda.cuMemcpyDtoHAsync(&word, pointer, 4, nullptr) == InvalidValue);
    AccessDesc grant = {{LocationDevice, 1}, AccessRead};
    CHECK(cuda.cuMemPoolSetAccess(pool, &grant, 1) == NotSupported);
    grant.flags = AccessReadWrite;
    CHECK(cuda.cuMemPoolSetAccess(pool, &grant, 1) == Success);
    CHECK(read_word(pointer) == 3);
    grant = {{LocationDevice, 0}, AccessNone};
    CHECK(cuda.cuMemPoolSetAccess(pool, &grant, 1) == InvalidValue);
  });
}
