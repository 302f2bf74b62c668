// SPDX-License-Identifier: MIT
//
// Registered host memory, and the seal tether that the exporter of a loan relies on.
#include "child.hpp"
#include "driver.hpp"

#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

using namespace sim_test;

namespace {

void* map_pages(std::size_t pages, int fd = -1) {
  const int flags = fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
  void* address = ::mmap(nullptr, pages * 4096, PROT_READ | PROT_WRITE, flags, fd, 0);
  REQUIRE(address != MAP_FAILED);
  return address;
}

} // namespace

TEST_CASE("registering: ranges, overlap, holes") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    auto* pages = static_cast<std::byte*>(map_pages(4));
    CHECK(cuda.cuMemHostRegister(nullptr, 4096, 0) == InvalidValue);
    CHECK(cuda.cuMemHostRegister(pages, 0, 0) == InvalidValue);
    CHECK(cuda.cuMemHostRegister(pages, 4096, 1024) == InvalidValue);
    CHECK(cuda.cuMemHostRegister(pages + 100, 5000, RegisterPortable | RegisterDeviceMap) == Success);
    CHECK(cuda.cuMemHostRegister(pages + 4096, 4096, 0) == HostMemoryAlreadyRegistered);
    CHECK(cuda.cuMemHostRegister(pages, 16384, 0) == HostMemoryAlreadyRegistered);
    DevicePtr device = 0;
    CHECK(cuda.cuMemHostGetDevicePointer(&device, pages + 200, 0) == Success);
    CHECK(device == reinterpret_cast<std::uintptr_t>(pages + 200));
    CHECK(cuda.cuMemHostGetDevicePointer(&device, pages + 8192, 0) == InvalidValue);
    CHECK(cuda.cuMemHostUnregister(pages) == HostMemoryNotRegistered);
    CHECK(cuda.cuMemHostUnregister(pages + 200) == InvalidValue);
    CHECK(cuda.cuMemHostUnregister(pages + 100) == Success);
    CHECK(cuda.cuMemHostUnregister(pages + 100) == HostMemoryNotRegistered);
    CHECK(::munmap(pages + 8192, 4096) == 0);
    CHECK(cuda.cuMemHostRegister(pages, 16384, 0) == InvalidValue);
    CHECK(cuda.cuMemHostRegister(reinterpret_cast<void*>(UINTPTR_MAX - 100), 4096, 0) == InvalidValue);
    DevicePtr reserved = 0;
    REQUIRE(cuda.cuMemAddressReserve(&reserved, 2 * kMiB, 0, 0, 0) == Success);
    CHECK(cuda.cuMemHostRegister(reinterpret_cast<void*>(reserved), 4096, 0) == InvalidValue);
    CHECK(::mprotect(pages, 4096, PROT_READ) == 0);
    CHECK(cuda.cuMemHostRegister(pages, 8192, 0) == InvalidValue);
    CHECK(cuda.cuMemHostRegister(pages, 8192, 8) == Success); // the device only reads
    CHECK(cuda.cuMemHostUnregister(pages) == Success);
    CHECK(cuda.live("host") == 0);
  });
}

TEST_CASE("the driver knows registered memory, and copies with it are asynchronous") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    auto* page = static_cast<std::byte*>(map_pages(1));
    REQUIRE(cuda.cuMemHostRegister(page, 4096, 0) == Success);
    const DevicePtr host = reinterpret_cast<std::uintptr_t>(page);
    unsigned type = 0;
    DevicePtr begin = 0;
    const int attributes[] = {PointerMemoryType, PointerRangeStart};
    void* data[] = {&type, &begin};
    CHECK(cuda.cuPointerGetAttributes(2, attributes, data, host + 8) == Success);
    CHECK(type == MemoryHost);
    CHECK(begin == host);
    DevicePtr device = 0;
    REQUIRE(cuda.cuMemAlloc(&device, 4096) == Success);
    const Stream stream = make_stream();
    CHECK(cuda.stream_hold(stream) == Success);
    page[0] = std::byte{1};
    CHECK(cuda.cuMemcpyHtoDAsync(device, page, 4096, stream) == Success);
    CHECK(cuda.cuMemcpyAsync(host + 2048, device, 8, stream) == Success);
    CHECK(cuda.cuMemcpyDtoHAsync(page + 3000, device, 8, stream) == Success);
    page[0] = std::byte{2}; // seen by the copy, which has not started
    CHECK(page[2048] == std::byte{0});
    CHECK(cuda.stream_release(stream) == Success);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(page[2048] == std::byte{2});
    CHECK(page[3000] == std::byte{2});
    CHECK(cuda.cuMemHostUnregister(page) == Success);
  });
}

TEST_CASE("allocated host memory") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    void* memory = nullptr;
    CHECK(cuda.cuMemAllocHost(&memory, 0) == Success);
    CHECK(memory == nullptr);
    REQUIRE(cuda.cuMemAllocHost(&memory, 10000) == Success);
    CHECK(cuda.cuMemHostUnregister(memory) == InvalidValue);
    CHECK(cuda.cuMemHostRegister(memory, 4096, 0) == InvalidValue);
    const Stream stream = make_stream();
    CHECK(cuda.cuMemsetD8Async(reinterpret_cast<std::uintptr_t>(memory), 0x5a, 10000, stream) == Success);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(static_cast<unsigned char*>(memory)[9999] == 0x5a);
    CHECK(cuda.cuMemFreeHost(memory) == Success);
    CHECK(cuda.cuMemFreeHost(memory) == InvalidValue);
  });
}

TEST_CASE("S17: the seal tether holds as long as the importer or a forked child of it lives") {
  Machine machine;
  Link link;
  const int tether = ::memfd_create("tether", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(::ftruncate(tether, 4096) == 0);
  Child importer([&] {
    const Driver& cuda = start();
    CHECK(cuda.cuMemHostRegister(map_pages(1, tether), 4096, 0) == Success);
    const pid_t child = fork_sleeper();
    link.left().say(static_cast<std::uint64_t>(child));
    ::pause();
  });
  const auto grandchild = static_cast<pid_t>(link.right().hear());
  const auto seal = [&] { return ::fcntl(tether, F_ADD_SEALS, F_SEAL_WRITE) == 0 ? 0 : errno; };
  CHECK(seal() == EBUSY);
  importer.kill();
  CHECK(seal() == EBUSY);
  kill_process(grandchild);
  CHECK(seal() == 0);
  ::close(tether);
}
