// SPDX-License-Identifier: MIT
//
// The older cuIpcMemHandle across processes: what opening counts, what keeps memory alive, and when a handle is void.
#include "child.hpp"
#include "driver.hpp"

#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

using namespace sim_test;

namespace {

DevicePtr allocate(std::size_t bytes) {
  DevicePtr pointer = 0;
  REQUIRE(driver().cuMemAlloc(&pointer, bytes) == Success);
  return pointer;
}

IpcMemHandle handle_of(DevicePtr pointer) {
  IpcMemHandle handle = {};
  REQUIRE(driver().cuIpcGetMemHandle(&handle, pointer) == Success);
  return handle;
}

CuResult try_open(const IpcMemHandle& handle, DevicePtr& out) {
  return driver().cuIpcOpenMemHandle(&out, handle, IpcMemLazyPeerAccess);
}

DevicePtr open(const IpcMemHandle& handle) {
  DevicePtr pointer = 0;
  REQUIRE(try_open(handle, pointer) == Success);
  return pointer;
}

void send(const Link::End& to, const IpcMemHandle& handle) { to.send_bytes(&handle, sizeof handle); }

IpcMemHandle receive_handle(const Link::End& from) {
  IpcMemHandle handle = {};
  from.receive_bytes(&handle, sizeof handle);
  return handle;
}

} // namespace

// R11
TEST_CASE("a memory handle crosses as bytes, stands for the whole allocation, and leaves nothing behind") {
  Machine machine;
  Link link;
  Child exporter([&] {
    start();
    const int before = open_fds();
    const DevicePtr pointer = allocate(4 * kMiB + 1000);
    write_word(pointer + kMiB, 0xfeed);
    const IpcMemHandle handle = handle_of(pointer);
    const IpcMemHandle inside = handle_of(pointer + kMiB);
    CHECK(std::memcmp(&handle, &inside, sizeof handle) == 0);
    send(link.left(), handle);
    CHECK(link.left().hear() == 1);
    CHECK(read_word(pointer) == 0xbeef);
    CHECK(driver().cuMemFree(pointer) == Success);
    CHECK(used_bytes() == 0);
    CHECK(open_fds() == before);
  });
  Child importer([&] {
    const Driver& cuda = start();
    const int before = open_fds();
    const DevicePtr pointer = open(receive_handle(link.right()));
    DevicePtr base = 0;
    std::size_t bytes = 0;
    CHECK(cuda.cuMemGetAddressRange(&base, &bytes, pointer + kMiB) == Success);
    CHECK(base == pointer);
    CHECK(bytes == 4 * kMiB + 1000);
    CHECK(read_word(pointer + kMiB) == 0xfeed);
    write_word(pointer, 0xbeef);
    CHECK(used_bytes() < 5 * kMiB); // taken once
    CHECK(cuda.live("imports") == 1);
    CHECK(open_fds() == before);
    CHECK(cuda.cuIpcCloseMemHandle(pointer) == Success);
    CHECK(cuda.live("imports") == 0);
    link.right().say(1);
  });
  importer.finish();
  exporter.finish();
}

// R12
TEST_CASE("opening is counted, and goes on after the exporter freed the memory") {
  Machine machine;
  Link link;
  Link late;
  Child exporter([&] {
    start();
    const DevicePtr pointer = allocate(2 * kMiB);
    write_word(pointer, 41);
    send(link.left(), handle_of(pointer));
    send(late.left(), handle_of(pointer));
    CHECK(link.left().hear() == 1);
    CHECK(driver().cuMemFree(pointer) == Success);
    CHECK(used_bytes() == 2 * kMiB);
    const DevicePtr other = allocate(2 * kMiB);
    link.left().say(2);
    CHECK(link.left().hear() == 3);
    CHECK(read_word(other) == 0);
    CHECK(used_bytes() == 2 * kMiB);
  });
  Child importer([&] {
    const Driver& cuda = start();
    const IpcMemHandle handle = receive_handle(link.right());
    const DevicePtr pointer = open(handle);
    CHECK(open(handle) == pointer);
    link.right().say(1);
    CHECK(link.right().hear() == 2);
    late.left().say(1);
    CHECK(late.left().hear() == 2);
    CHECK(cuda.cuIpcCloseMemHandle(pointer) == Success);
    CHECK(open(handle) == pointer); // not gone, so it can be had again
    CHECK(cuda.cuIpcCloseMemHandle(pointer) == Success);
    write_word(pointer, 42);
    CHECK(read_word(pointer) == 42);
    CHECK(cuda.cuIpcCloseMemHandle(pointer) == Success);
    CHECK(cuda.cuIpcCloseMemHandle(pointer) == InvalidValue);
    DevicePtr again = 0;
    CHECK(try_open(handle, again) == InvalidValue);
    link.right().say(3);
  });
  Child stranger([&] { // that others have the memory open is of no use to a process that has not
    start();
    const IpcMemHandle handle = receive_handle(late.right());
    CHECK(late.right().hear() == 1);
    DevicePtr pointer = 0;
    CHECK(try_open(handle, pointer) == InvalidValue);
    late.right().say(2);
  });
  stranger.finish();
  importer.finish();
  exporter.finish();
}

// R12, R13
TEST_CASE("what is not to be had by memory handle") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    IpcMemHandle handle = {};
    const DevicePtr mapped = map_chunk(create_chunk(2 * kMiB), 2 * kMiB);
    DevicePtr pointer = 0;
    DevicePtr out = 0;
    CHECK(cuda.cuIpcGetMemHandle(&handle, mapped) == InvalidValue);
    REQUIRE(cuda.cuMemAllocManaged(&pointer, kMiB, 1) == Success);
    CHECK(cuda.cuIpcGetMemHandle(&handle, pointer) == InvalidValue);
    CHECK(cuda.cuMemFree(pointer) == Success);
    CHECK(try_open(handle, out) == InvalidValue); // all zeros
    pointer = allocate(kMiB);
    handle = handle_of(pointer);
    CHECK(try_open(handle, out) == InvalidContext); // ours
    CHECK(cuda.cuIpcOpenMemHandle(&out, handle, 0) == InvalidValue);
    CHECK(cuda.cuIpcOpenMemHandle(&out, handle, 3) == InvalidValue);
    CHECK(cuda.cuIpcCloseMemHandle(pointer) == InvalidValue);
    CHECK(out == 0);
  });
}

TEST_CASE("memory that was opened is not freed, and its handle is not passed on") {
  Machine machine;
  Link link;
  Child exporter([&] {
    start();
    send(link.left(), handle_of(allocate(2 * kMiB)));
    CHECK(link.left().hear() == 1);
  });
  Child importer([&] {
    const Driver& cuda = start();
    const DevicePtr pointer = open(receive_handle(link.right()));
    IpcMemHandle again = {};
    CHECK(cuda.cuMemFree(pointer) == InvalidValue);
    CHECK(cuda.cuMemFreeAsync(pointer, nullptr) == InvalidValue);
    CHECK(cuda.cuIpcCloseMemHandle(pointer + 4096) == InvalidValue);
    CHECK(cuda.cuIpcGetMemHandle(&again, pointer) == InvalidValue);
    CHECK(cuda.cuDevicePrimaryCtxRelease(0) == Success); // and with the context it is gone
    CHECK(cuda.live("imports") == 0);
    link.right().say(1);
  });
  importer.finish();
  exporter.finish();
}

TEST_CASE("the number in a handle may stand for another file by now") {
  Machine machine;
  Link link;
  Child exporter([&] {
    start();
    const DevicePtr pointer = allocate(2 * kMiB);
    send(link.left(), handle_of(pointer));
    CHECK(driver().cuMemFree(pointer) == Success);
    int pipes[2] = {};
    for (int count = 0; count < 8; ++count) REQUIRE(::pipe(pipes) == 0);
    const DevicePtr other = allocate(2 * kMiB);
    link.left().say(1);
    CHECK(link.left().hear() == 2);
    CHECK(read_word(other) == 0);
  });
  Child importer([&] {
    start();
    const IpcMemHandle handle = receive_handle(link.right());
    CHECK(link.right().hear() == 1);
    DevicePtr pointer = 0;
    CHECK(try_open(handle, pointer) == InvalidValue);
    link.right().say(2);
  });
  importer.finish();
  exporter.finish();
}

TEST_CASE("closing waits for the context's work, opening does not") {
  Machine machine;
  Link link;
  Child exporter([&] {
    start();
    send(link.left(), handle_of(allocate(2 * kMiB)));
    send(link.left(), handle_of(allocate(2 * kMiB)));
    CHECK(link.left().hear() == 1);
  });
  Child importer([&] {
    const Driver& cuda = start();
    const DevicePtr pointer = open(receive_handle(link.right()));
    const Stream stream = make_stream();
    CHECK(cuda.stream_hold(stream) == Success);
    CHECK(cuda.cuMemsetD8Async(pointer, 1, 4, stream) == Success);
    static_cast<void>(open(receive_handle(link.right())));
    std::atomic<bool> closed{false};
    std::thread closer([&] {
      CHECK(cuda.cuIpcCloseMemHandle(pointer) == Success);
      closed = true;
    });
    ::usleep(50'000);
    CHECK(!closed);
    CHECK(cuda.stream_release(stream) == Success);
    closer.join();
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    link.right().say(1);
  });
  importer.finish();
  exporter.finish();
}

TEST_CASE("S8: memory of a killed exporter stays with the importer, and its handle is void for others") {
  Machine machine;
  Link link;
  Link tell;
  Child exporter([&] {
    start();
    const DevicePtr pointer = allocate(2 * kMiB);
    write_word(pointer, 7);
    send(link.left(), handle_of(pointer));
    send(link.left(), handle_of(allocate(4 * kMiB)));
    ::pause();
  });
  Child importer([&] {
    const Driver& cuda = start();
    const DevicePtr pointer = open(receive_handle(link.right()));
    const IpcMemHandle other = receive_handle(link.right());
    CHECK(used_bytes() == 6 * kMiB);
    tell.right().say(1);
    CHECK(tell.right().hear() == 2);
    CHECK(used_bytes() == 2 * kMiB);
    CHECK(read_word(pointer) == 7);
    write_word(pointer, 8);
    CHECK(read_word(pointer) == 8);
    DevicePtr none = 0;
    CHECK(try_open(other, none) == InvalidValue);
    CHECK(cuda.cuIpcCloseMemHandle(pointer) == Success);
    CHECK(used_bytes() == 0);
  });
  CHECK(tell.left().hear() == 1);
  exporter.kill();
  tell.left().say(2);
  importer.finish();
}

TEST_CASE("what a killed importer had open is not taken any more") {
  Machine machine;
  Link link;
  Link tell;
  Child exporter([&] {
    start();
    const DevicePtr pointer = allocate(2 * kMiB);
    send(link.left(), handle_of(pointer));
    CHECK(tell.left().hear() == 1);
    CHECK(driver().cuMemFree(pointer) == Success);
    CHECK(used_bytes() == 2 * kMiB); // still over there
    tell.left().say(2);
    CHECK(tell.left().hear() == 3);
    CHECK(used_bytes() == 0);
  });
  Child importer([&] {
    start();
    static_cast<void>(open(receive_handle(link.right())));
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

TEST_CASE("the chunks of VMM memory can be had from its addresses, one by one") {
  Machine machine;
  Link link;
  Child exporter([&] {
    const Driver& cuda = start();
    DevicePtr segment = 0;
    REQUIRE(cuda.cuMemAddressReserve(&segment, 64 * kMiB, 0, 0, 0) == Success);
    for (const std::size_t offset : {0 * kMiB, 20 * kMiB}) { // as an expandable segment grows (fact V8)
      const MemHandle chunk = create_chunk(20 * kMiB);
      REQUIRE(cuda.cuMemMap(segment + offset, 20 * kMiB, 0, chunk, 0) == Success);
      REQUIRE(cuda.cuMemRelease(chunk) == Success);
    }
    const AccessDesc grant = {{LocationDevice, 0}, AccessReadWrite};
    REQUIRE(cuda.cuMemSetAccess(segment, 40 * kMiB, &grant, 1) == Success);
    DevicePtr base = 0;
    std::size_t bytes = 0;
    CHECK(cuda.cuMemGetAddressRange(&base, &bytes, segment + 30 * kMiB) == Success);
    CHECK(base == segment + 20 * kMiB);
    CHECK(bytes == 20 * kMiB);
    write_word(segment + 30 * kMiB, 7);
    MemHandle handle = 0;
    REQUIRE(cuda.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(segment + 30 * kMiB)) == Success);
    link.left().send_fd(export_fd(handle));
    AllocationProp prop = {};
    CHECK(cuda.cuMemGetAllocationPropertiesFromHandle(&prop, handle) == Success);
    CHECK(prop.requested_handle_types == HandlePosixFd);
    CHECK(cuda.cuMemRelease(handle) == Success);
    CHECK(cuda.cuMemGetAllocationPropertiesFromHandle(&prop, handle) == InvalidValue);
    CHECK(cuda.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(segment + 40 * kMiB)) == InvalidValue);
    const DevicePtr plain = allocate(kMiB);
    CHECK(cuda.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(plain)) == InvalidValue); // V6
    CHECK(cuda.live("handles") == 0);
    CHECK(link.left().hear() == 1);
  });
  Child importer([&] {
    const Driver& cuda = start();
    const DevicePtr pointer = map_chunk(import_fd(link.right().receive_fd()), 20 * kMiB);
    CHECK(read_word(pointer + 10 * kMiB) == 7);
    MemHandle again = 0;
    CHECK(cuda.cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(pointer + kMiB)) == Success);
    int fd = -1;
    CHECK(cuda.cuMemExportToShareableHandle(&fd, again, HandlePosixFd, 0) == InvalidValue); // an import is no export
    CHECK(read_word(map_chunk(again, 20 * kMiB) + 10 * kMiB) == 7);
    link.right().say(1);
  });
  importer.finish();
  exporter.finish();
}
