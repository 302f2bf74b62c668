// SPDX-License-Identifier: MIT
//
// Device memory inside one process: VMM rules, plain allocations, access, and faults of work that runs.
#include "child.hpp"
#include "driver.hpp"

#include <cstdint>
#include <fcntl.h>
#include <unistd.h>
#include <vector>

using namespace sim_test;

namespace {

struct PointerInfo {
  Context context = nullptr;
  unsigned type = 99;
  std::uint64_t buffer_id = 99;
  unsigned managed = 99;
  int ordinal = 99;
  DevicePtr start = 99;
  std::size_t size = 99;
};

PointerInfo pointer_info(DevicePtr pointer) {
  PointerInfo info;
  const int attributes[] = {PointerContext,       PointerMemoryType, PointerBufferId, PointerIsManaged,
                            PointerDeviceOrdinal, PointerRangeStart, PointerRangeSize};
  void* data[] = {&info.context, &info.type, &info.buffer_id, &info.managed, &info.ordinal, &info.start, &info.size};
  REQUIRE(driver().cuPointerGetAttributes(7, attributes, data, pointer) == Success);
  return info;
}

CuResult set_access(DevicePtr address, std::size_t size, int flags) {
  const AccessDesc grant = {{LocationDevice, 0}, flags};
  return driver().cuMemSetAccess(address, size, &grant, 1);
}

// What the context says after a fill of one word there has run.
CuResult fill_result(DevicePtr address) {
  const Driver& cuda = driver();
  const Stream stream = make_stream();
  if (const CuResult result = cuda.cuMemsetD32Async(address, 1, 1, stream)) return result;
  return cuda.cuStreamSynchronize(stream);
}

} // namespace

TEST_CASE("V5: VMM memory comes in pieces of 2 MiB") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    AllocationProp prop = exportable();
    std::size_t bytes = 0;
    MemHandle handle = 0;
    CHECK(cuda.cuMemGetAllocationGranularity(&bytes, &prop, GranularityRecommended) == Success);
    CHECK(bytes == 2 * kMiB);
    CHECK(cuda.cuMemCreate(&handle, 2 * kMiB + 4096, &prop, 0) == InvalidValue);
    CHECK(cuda.cuMemCreate(&handle, 0, &prop, 0) == InvalidValue);
    prop.location.id = 1;
    CHECK(cuda.cuMemCreate(&handle, 2 * kMiB, &prop, 0) == InvalidDevice);
    prop = exportable();
    prop.type = 0;
    CHECK(cuda.cuMemCreate(&handle, 2 * kMiB, &prop, 0) == InvalidValue);
    CHECK(cuda.cuMemRelease(handle) == InvalidValue);
    DevicePtr address = 0;
    CHECK(cuda.cuMemAddressReserve(&address, kMiB, 0, 0, 0) == InvalidValue);
    CHECK(cuda.cuMemAddressReserve(&address, 2 * kMiB, 3, 0, 0) == InvalidValue);
    CHECK(cuda.cuMemAddressReserve(&address, 2 * kMiB, 64 * kMiB, 0, 0) == Success);
    CHECK(address % (64 * kMiB) == 0);
    CHECK(cuda.cuMemAddressFree(address, 4 * kMiB) == InvalidValue);
    CHECK(cuda.cuMemAddressFree(address, 2 * kMiB) == Success);
    CHECK(cuda.cuMemAddressFree(address, 2 * kMiB) == InvalidValue);
  });
}

TEST_CASE("V10: a chunk is mapped whole, and access is given for the whole mapping") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const MemHandle handle = create_chunk(4 * kMiB);
    DevicePtr address = 0;
    REQUIRE(cuda.cuMemAddressReserve(&address, 8 * kMiB, 0, 0, 0) == Success);
    CHECK(cuda.cuMemMap(address, 2 * kMiB, 0, handle, 0) == NotSupported);
    CHECK(cuda.cuMemMap(address, 2 * kMiB, 2 * kMiB, handle, 0) == NotSupported);
    CHECK(cuda.cuMemMap(address + 8 * kMiB, 4 * kMiB, 0, handle, 0) == InvalidValue);
    CHECK(cuda.cuMemMap(address + 6 * kMiB, 4 * kMiB, 0, handle, 0) == InvalidValue);
    CHECK(cuda.cuMemMap(address, 4 * kMiB, 0, handle, 0) == Success);
    CHECK(cuda.cuMemMap(address, 4 * kMiB, 0, handle, 0) == InvalidValue);
    CHECK(set_access(address, 2 * kMiB, AccessReadWrite) == InvalidValue);
    CHECK(set_access(address, 8 * kMiB, AccessReadWrite) == InvalidValue);
    CHECK(set_access(address, 4 * kMiB, AccessReadWrite) == Success);
    CHECK(cuda.cuMemAddressFree(address, 8 * kMiB) == InvalidValue);
    CHECK(cuda.cuMemUnmap(address, 2 * kMiB) == InvalidValue);
    CHECK(cuda.cuMemUnmap(address + 6 * kMiB, 4 * kMiB) == InvalidValue);
    CHECK(cuda.cuMemUnmap(address, 8 * kMiB) == Success); // the mapping and the nothing behind it
    CHECK(cuda.cuMemUnmap(address, 4 * kMiB) == Success);
    CHECK(cuda.cuMemAddressFree(address, 8 * kMiB) == Success);
    CHECK(cuda.cuMemRelease(handle) == Success);
    CHECK(cuda.live("handles") + cuda.live("mappings") + cuda.live("reservations") == 0);
    CHECK(used_bytes() == 0);
  });
}

TEST_CASE("V9: one chunk mapped twice with different access, and an upgrade") {
  Machine machine;
  in_child([] {
    start();
    const MemHandle handle = create_chunk(2 * kMiB);
    const DevicePtr writable = map_chunk(handle, 2 * kMiB);
    const DevicePtr readable = map_chunk(handle, 2 * kMiB, AccessRead);
    write_word(writable + 64, 0x1234);
    CHECK(read_word(readable + 64) == 0x1234);
    CHECK(set_access(readable, 2 * kMiB, AccessReadWrite) == Success);
    write_word(readable + 64, 0x5678);
    CHECK(read_word(writable + 64) == 0x5678);
    CHECK(set_access(readable, 2 * kMiB, AccessRead) == Success);
    CHECK(fill_result(readable) == InvalidValue);
    const Stream stream = make_stream();
    CHECK(driver().stream_hold(stream) == Success);
    CHECK(driver().cuMemsetD8Async(writable, 1, 4, stream) == Success);
    CHECK(set_access(writable, 2 * kMiB, AccessRead) == Success);
    CHECK(driver().stream_release(stream) == Success);
    CHECK(driver().cuStreamSynchronize(stream) == LaunchFailed);
  });
}

TEST_CASE("a mapping without access is not accessible") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const MemHandle handle = create_chunk(2 * kMiB);
    DevicePtr address = 0;
    REQUIRE(cuda.cuMemAddressReserve(&address, 2 * kMiB, 0, 0, 0) == Success);
    CHECK(fill_result(address) == InvalidValue);
    REQUIRE(cuda.cuMemMap(address, 2 * kMiB, 0, handle, 0) == Success);
    CHECK(fill_result(address) == InvalidValue);
    std::uint32_t word = 0;
    CHECK(cuda.cuMemcpyDtoHAsync(&word, address, 4, nullptr) == InvalidValue);
  });
}

TEST_CASE("V1: 100 GiB in one piece, and 3 GiB pieces, take no memory until touched") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const std::size_t size = 100 * kGiB;
    const MemHandle handle = create_chunk(size);
    const DevicePtr address = map_chunk(handle, size);
    write_word(address + size - 4, 7);
    CHECK(read_word(address + size - 4) == 7);
    CHECK(read_word(address + size / 2) == 0);
    for (int count = 0; count < 13; ++count) static_cast<void>(create_chunk(3 * kGiB));
    CHECK(used_bytes() == 139 * kGiB);
    MemHandle more = 0;
    const AllocationProp prop = exportable();
    CHECK(cuda.cuMemCreate(&more, 3 * kGiB, &prop, 0) == OutOfMemory);
    CHECK(cuda.cuMemCreate(&more, std::size_t{1} << 50, &prop, 0) == InvalidValue);
    unmap_chunk(address, size);
    CHECK(cuda.cuMemRelease(handle) == Success);
    CHECK(used_bytes() == 39 * kGiB);
  });
}

TEST_CASE("work may span mappings that follow each other, but no gap") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    DevicePtr address = 0;
    REQUIRE(cuda.cuMemAddressReserve(&address, 8 * kMiB, 0, 0, 0) == Success);
    for (const std::size_t offset : {0 * kMiB, 2 * kMiB, 6 * kMiB}) {
      REQUIRE(cuda.cuMemMap(address + offset, 2 * kMiB, 0, create_chunk(2 * kMiB), 0) == Success);
    }
    CHECK(set_access(address, 8 * kMiB, AccessReadWrite) == InvalidValue);
    CHECK(set_access(address, 4 * kMiB, AccessReadWrite) == Success);
    CHECK(set_access(address + 6 * kMiB, 2 * kMiB, AccessReadWrite) == Success);
    const Stream stream = make_stream();
    CHECK(cuda.cuMemsetD8Async(address + kMiB, 0xab, 3 * kMiB, stream) == Success);
    CHECK(cuda.cuMemsetD8Async(address + kMiB, 0xab, 4 * kMiB, stream) == InvalidValue);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(read_word(address + 4 * kMiB - 4) == 0xabababab);
    CHECK(read_word(address + 6 * kMiB) == 0);
    CHECK(cuda.cuMemUnmap(address, 4 * kMiB) == Success);
  });
}

// R22
TEST_CASE("memory unmapped under queued work is a fault of the context, not of the process") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const MemHandle handle = create_chunk(2 * kMiB);
    const DevicePtr address = map_chunk(handle, 2 * kMiB);
    const Stream stream = make_stream();
    CHECK(cuda.stream_hold(stream) == Success);
    CHECK(cuda.cuMemsetD8Async(address, 1, 2 * kMiB, stream) == Success);
    unmap_chunk(address, 2 * kMiB);
    CHECK(cuda.stream_release(stream) == Success);
    CHECK(cuda.cuStreamSynchronize(stream) == IllegalAddress);
    CHECK(cuda.cuMemAllocHost(nullptr, 1) == IllegalAddress);
  });
}

TEST_CASE("an unmap in the middle of work waits for no more than a slice, and nothing is written after it") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const std::size_t size = 512 * kMiB;
    const MemHandle handle = create_chunk(size);
    const DevicePtr address = map_chunk(handle, size);
    const DevicePtr alias = map_chunk(handle, size);
    const Stream stream = make_stream();
    CHECK(cuda.cuMemsetD8Async(address, 0xff, size, stream) == Success);
    while (read_word(alias) == 0) {
    }
    unmap_chunk(address, size);
    CHECK(cuda.cuStreamSynchronize(stream) == IllegalAddress);
  });
}

TEST_CASE("plain allocations: sizes, free, ranges and buffer ids") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    DevicePtr pointer = 0;
    CHECK(cuda.cuMemAlloc(&pointer, 0) == InvalidValue);
    REQUIRE(cuda.cuMemAlloc(&pointer, 1000) == Success);
    CHECK(used_bytes() == 1024);
    CHECK(read_word(pointer + 996) == 0);
    DevicePtr base = 0;
    std::size_t bytes = 0;
    CHECK(cuda.cuMemGetAddressRange(&base, &bytes, pointer + 999) == Success);
    CHECK(base == pointer);
    CHECK(bytes == 1000);
    CHECK(cuda.cuMemGetAddressRange(&base, &bytes, pointer + 1000) == NotFound);
    const std::uint64_t id = pointer_info(pointer).buffer_id;
    CHECK(cuda.cuMemFree(pointer + 512) == InvalidValue);
    CHECK(cuda.cuMemFree(pointer) == Success);
    CHECK(cuda.cuMemFree(pointer) == InvalidValue);
    CHECK(cuda.cuMemFree(0) == Success);
    CHECK(used_bytes() == 0);
    REQUIRE(cuda.cuMemAlloc(&pointer, 1000) == Success);
    CHECK(pointer_info(pointer).buffer_id > id);
    REQUIRE(cuda.cuMemAlloc(&pointer, 143359 * kMiB) == Success);
    CHECK(cuda.cuMemAlloc(&pointer, 2 * kMiB) == OutOfMemory);
  });
}

TEST_CASE("what is known about a pointer") {
  Machine machine;
  machine.set("GPULOAN_SIM_DEVICES", "2");
  in_child([] {
    const Driver& cuda = start(1);
    DevicePtr pointer = 0;
    REQUIRE(cuda.cuMemAlloc(&pointer, 4096) == Success);
    Context context = nullptr;
    REQUIRE(cuda.cuCtxGetCurrent(&context) == Success);
    const PointerInfo plain = pointer_info(pointer + 100);
    CHECK(plain.context == context);
    CHECK(plain.type == MemoryDevice);
    CHECK(plain.managed == 0);
    CHECK(plain.ordinal == 1);
    CHECK(plain.start == pointer);
    CHECK(plain.size == 4096);
    const DevicePtr mapped = map_chunk(create_chunk(2 * kMiB, 0), 2 * kMiB, AccessReadWrite, 1);
    CHECK(pointer_info(mapped).ordinal == 0);
    CHECK(pointer_info(mapped).size == 2 * kMiB);
    CHECK(pointer_info(mapped).buffer_id > plain.buffer_id);
    int on_stack = 0;
    const PointerInfo unknown = pointer_info(reinterpret_cast<std::uintptr_t>(&on_stack));
    CHECK(unknown.context == nullptr);
    CHECK(unknown.type == 0);
    CHECK(unknown.buffer_id == 0);
    CHECK(unknown.start == 99); // not written
    CHECK(unknown.size == 99);
  });
}

TEST_CASE("VMM memory of one device is usable by another that was given access") {
  Machine machine;
  machine.set("GPULOAN_SIM_DEVICES", "2").set("GPULOAN_SIM_MEMORY_MIB", "4");
  in_child([] {
    start(1);
    const MemHandle handle = create_chunk(2 * kMiB, 0);
    CHECK(used_bytes() == 0);
    const DevicePtr address = map_chunk(handle, 2 * kMiB, AccessReadWrite, 1);
    write_word(address, 9);
    CHECK(read_word(address) == 9);
    const DevicePtr closed = map_chunk(handle, 2 * kMiB, AccessReadWrite, 0);
    CHECK(fill_result(closed) == InvalidValue);
  });
}

TEST_CASE("only memory made for it can be exported, as a close-on-exec descriptor that cannot be resized") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    AllocationProp prop = exportable();
    prop.requested_handle_types = HandleNone;
    MemHandle handle = 0;
    REQUIRE(cuda.cuMemCreate(&handle, 2 * kMiB, &prop, 0) == Success);
    int fd = -1;
    CHECK(cuda.cuMemExportToShareableHandle(&fd, handle, HandlePosixFd, 0) == InvalidValue);
    prop.requested_handle_types = 8;
    CHECK(cuda.cuMemCreate(&handle, 2 * kMiB, &prop, 0) == InvalidValue);
    fd = export_fd(create_chunk(2 * kMiB));
    CHECK(fd >= 3);
    CHECK((::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK(::ftruncate(fd, 0) != 0);
    CHECK(::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) != 0);
    ::close(fd);
  });
}
