// SPDX-License-Identifier: MIT
//
// Memory across processes: export and import, what keeps memory alive, and the device-wide accounting.
#include "child.hpp"
#include "driver.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace sim_test;

TEST_CASE("a chunk crosses by descriptor and both sides see the same bytes") {
  Machine machine;
  Link link;
  Child exporter([&] {
    start();
    const DevicePtr address = map_chunk(create_chunk(2 * kMiB), 2 * kMiB);
    write_word(address, 0xfeed);
    const MemHandle again = create_chunk(2 * kMiB);
    const int fd = export_fd(again);
    const DevicePtr lent = map_chunk(again, 2 * kMiB);
    write_word(lent, 0xcafe);
    link.left().send_fd(fd);
    CHECK(link.left().hear() == 1);
    CHECK(read_word(lent + 4) == 0xbeef);
    CHECK(read_word(address) == 0xfeed);
    CHECK(used_bytes() == 4 * kMiB);
  });
  Child importer([&] {
    start();
    const DevicePtr address = map_chunk(import_fd(link.right().receive_fd()), 2 * kMiB);
    CHECK(read_word(address) == 0xcafe);
    write_word(address + 4, 0xbeef);
    CHECK(used_bytes() == 4 * kMiB);
    link.right().say(1);
  });
  importer.finish();
  exporter.finish();
}

TEST_CASE("a descriptor that is no device memory is refused") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const auto import = [&](int fd) {
      MemHandle handle = 0;
      return cuda.cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                                 HandlePosixFd);
    };
    const int foreign = ::memfd_create("foreign", MFD_CLOEXEC);
    REQUIRE(::ftruncate(foreign, 2 * kMiB) == 0);
    CHECK(import(foreign) == Unknown);
    CHECK(import(-1) == Unknown);
    CHECK(import(0) == Unknown);
    ::close(foreign);
  });
}

TEST_CASE("one process imports what it exported, twice, and each import counts") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const MemHandle own = create_chunk(2 * kMiB);
    const MemHandle first = import_fd(export_fd(own));
    const MemHandle second = import_fd(export_fd(own));
    int none = -1;
    CHECK(cuda.cuMemExportToShareableHandle(&none, first, HandlePosixFd, 0) == InvalidValue); // an import is no export
    const DevicePtr here = map_chunk(own, 2 * kMiB);
    const DevicePtr there = map_chunk(second, 2 * kMiB);
    write_word(here, 3);
    CHECK(read_word(there) == 3);
    CHECK(used_bytes() == 2 * kMiB);
    unmap_chunk(here, 2 * kMiB);
    CHECK(cuda.cuMemRelease(own) == Success);
    CHECK(cuda.cuMemRelease(first) == Success);
    CHECK(cuda.cuMemRelease(second) == Success);
    CHECK(read_word(there) == 3);
    CHECK(used_bytes() == 2 * kMiB);
    unmap_chunk(there, 2 * kMiB);
    CHECK(used_bytes() == 0);
  });
}

TEST_CASE("V3: memory that the exporter released lives until the importer's last unmap") {
  Machine machine;
  machine.set("GPULOAN_SIM_MEMORY_MIB", "8");
  Link link;
  Child exporter([&] {
    const Driver& cuda = start();
    const MemHandle handle = create_chunk(4 * kMiB);
    const DevicePtr address = map_chunk(handle, 4 * kMiB);
    write_word(address, 41);
    const int fd = export_fd(handle);
    link.left().send_fd(fd);
    ::close(fd);
    CHECK(link.left().hear() == 1);
    unmap_chunk(address, 4 * kMiB);
    CHECK(cuda.cuMemRelease(handle) == Success);
    CHECK(used_bytes() == 4 * kMiB);
    const MemHandle other = create_chunk(4 * kMiB);
    const DevicePtr intact = map_chunk(other, 4 * kMiB);
    MemHandle more = 0;
    const AllocationProp prop = exportable();
    CHECK(cuda.cuMemCreate(&more, 2 * kMiB, &prop, 0) == OutOfMemory);
    link.left().say(2);
    CHECK(link.left().hear() == 3);
    CHECK(read_word(intact) == 0);
    CHECK(used_bytes() == 4 * kMiB);
  });
  Child importer([&] {
    const Driver& cuda = start();
    const MemHandle handle = import_fd(link.right().receive_fd());
    const DevicePtr address = map_chunk(handle, 4 * kMiB);
    CHECK(cuda.cuMemRelease(handle) == Success);
    link.right().say(1);
    CHECK(link.right().hear() == 2);
    CHECK(read_word(address) == 41);
    write_word(address, 42);
    unmap_chunk(address, 4 * kMiB);
    link.right().say(3);
  });
  importer.finish();
  exporter.finish();
}

TEST_CASE("the memory of a killed process comes back") {
  Machine machine;
  machine.set("GPULOAN_SIM_MEMORY_MIB", "8");
  Link link;
  Child victim([&] {
    const Driver& cuda = start();
    const MemHandle handle = create_chunk(4 * kMiB);
    static_cast<void>(map_chunk(handle, 4 * kMiB));
    DevicePtr pointer = 0;
    CHECK(cuda.cuMemAlloc(&pointer, 4 * kMiB) == Success);
    const int fd = export_fd(handle);
    link.left().send_fd(fd);
    ::pause();
  });
  Child survivor([&] {
    const Driver& cuda = start();
    static_cast<void>(link.right().receive_fd()); // a descriptor in our hands is not counted, an import is
    CHECK(used_bytes() == 8 * kMiB);
    DevicePtr pointer = 0;
    CHECK(cuda.cuMemAlloc(&pointer, 512) == OutOfMemory);
    link.right().say(1);
    CHECK(link.right().hear() == 2);
    CHECK(cuda.cuMemAlloc(&pointer, 8 * kMiB) == Success);
    CHECK(used_bytes() == 8 * kMiB);
  });
  CHECK(link.left().hear() == 1);
  victim.kill();
  link.left().say(2);
  survivor.finish();
}

TEST_CASE("a process killed at any moment leaves a machine that works") {
  Machine machine;
  for (int round = 0; round < 25; ++round) {
    Link link;
    Child victim([&] {
      const Driver& cuda = start();
      while (true) {
        const MemHandle handle = create_chunk(2 * kMiB);
        const DevicePtr address = map_chunk(import_fd(export_fd(handle)), 2 * kMiB);
        const Event event = make_event(EventDisableTiming | EventInterprocess);
        link.left().say(1);
        REQUIRE(cuda.cuEventDestroy(event) == Success);
        unmap_chunk(address, 2 * kMiB);
        REQUIRE(cuda.cuMemRelease(handle) == Success);
      }
    });
    for (int turn = 0; turn < 1 + round % 7; ++turn) CHECK(link.right().hear() == 1);
    victim.kill();
  }
  in_child([] {
    start();
    CHECK(used_bytes() == 0);
    static_cast<void>(create_chunk(100 * kGiB));
    for (int count = 0; count < 4096; ++count) static_cast<void>(make_event(EventDisableTiming | EventInterprocess));
  });
}

TEST_CASE("V12: the memory of a killed process stays taken while a forked child of it lives") {
  Machine machine;
  Link link;
  Link tell;
  Child victim([&] {
    start();
    static_cast<void>(map_chunk(create_chunk(64 * kMiB), 64 * kMiB));
    const pid_t child = fork_sleeper();
    tell.left().say(static_cast<std::uint64_t>(child));
    ::pause();
  });
  Child observer([&] {
    start();
    for (int round = 0; round < 3; ++round) {
      static_cast<void>(link.right().hear());
      link.right().say(used_bytes());
    }
  });
  const auto ask = [&] {
    link.left().say(0);
    return link.left().hear();
  };
  const auto grandchild = static_cast<pid_t>(tell.right().hear());
  CHECK(ask() == 64 * kMiB);
  victim.kill();
  CHECK(ask() == 64 * kMiB);
  kill_process(grandchild);
  CHECK(ask() == 0);
  observer.finish();
}

TEST_CASE("a descriptor on its way keeps the memory, uncounted, until it is imported") {
  Machine machine;
  machine.set("GPULOAN_SIM_MEMORY_MIB", "4");
  in_child([] {
    const Driver& cuda = start();
    const MemHandle handle = create_chunk(2 * kMiB);
    const DevicePtr address = map_chunk(handle, 2 * kMiB);
    write_word(address, 77);
    const int fd = export_fd(handle);
    unmap_chunk(address, 2 * kMiB);
    REQUIRE(cuda.cuMemRelease(handle) == Success);
    CHECK(used_bytes() == 0);
    const MemHandle large = create_chunk(4 * kMiB);
    MemHandle back = 0;
    void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
    CHECK(cuda.cuMemImportFromShareableHandle(&back, shareable, HandlePosixFd) == OutOfMemory);
    REQUIRE(cuda.cuMemRelease(large) == Success);
    const DevicePtr again = map_chunk(import_fd(fd), 2 * kMiB);
    CHECK(read_word(again) == 77);
    CHECK(used_bytes() == 2 * kMiB);
  });
}

TEST_CASE("machines of different state files know nothing of each other") {
  Machine one;
  Link link;
  Child exporter([&] {
    start();
    link.left().send_fd(export_fd(create_chunk(2 * kMiB)));
    CHECK(link.left().hear() == 1);
  });
  Machine two;
  Child importer([&] {
    const Driver& cuda = start();
    const int fd = link.right().receive_fd();
    MemHandle handle = 0;
    CHECK(cuda.cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                              HandlePosixFd) == Unknown);
    CHECK(used_bytes() == 0);
    link.right().say(1);
  });
  importer.finish();
  exporter.finish();
}

TEST_CASE("memory of a device that the importer cannot see") {
  Machine machine;
  machine.set("GPULOAN_SIM_DEVICES", "2");
  Link link;
  Child exporter([&] {
    start();
    link.left().send_fd(export_fd(create_chunk(2 * kMiB, 0)));
    CHECK(link.left().hear() == 1);
  });
  machine.set("CUDA_VISIBLE_DEVICES", "1");
  Child importer([&] {
    const Driver& cuda = start();
    MemHandle handle = 0;
    void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(link.right().receive_fd()));
    CHECK(cuda.cuMemImportFromShareableHandle(&handle, shareable, HandlePosixFd) == InvalidDevice);
    link.right().say(1);
  });
  importer.finish();
  exporter.finish();
}

TEST_CASE("a state file that is not safe is refused") {
  Machine machine;
  const auto refused = [] {
    CHECK(driver().cuInit(0) == OperatingSystem);
    int count = 0;
    CHECK(driver().cuDeviceGetCount(&count) == NotInitialized);
  };
  in_child([] { CHECK(driver().cuInit(0) == Success); });
  struct stat info = {};
  CHECK(::stat(machine.state().c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
  CHECK(::chmod(machine.state().c_str(), 0644) == 0);
  in_child(refused);
  CHECK(::unlink(machine.state().c_str()) == 0);
  CHECK(::symlink("/dev/null", machine.state().c_str()) == 0);
  in_child(refused);
  machine.set("GPULOAN_SIM_STATE", "/dev/null");
  in_child(refused);
  machine.set("GPULOAN_SIM_STATE", "/nowhere/state");
  in_child(refused);
}

TEST_CASE("a file of another layout, or damaged, begins anew where nobody uses it; another program's file is left alone") {
  Machine machine;
  const auto starts = [](CuResult wanted) {
    return [wanted] { CHECK(driver().cuInit(0) == wanted); };
  };
  const auto put = [&](off_t at, std::uint64_t word) {
    const int fd = ::open(machine.state().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(::pwrite(fd, &word, sizeof word, at) == static_cast<ssize_t>(sizeof word));
    ::close(fd);
  };
  const auto first_word = [&] {
    const int fd = ::open(machine.state().c_str(), O_RDONLY | O_CLOEXEC);
    std::uint64_t word = 0;
    CHECK(::pread(fd, &word, sizeof word, 0) == static_cast<ssize_t>(sizeof word));
    ::close(fd);
    return word;
  };
  in_child(starts(Success));
  const std::uint64_t mine = first_word(), older = mine - (std::uint64_t{1} << 56);
  for (const bool version : {true, false}) {
    const auto spoil = [&] { version ? put(0, older) : put(8, ~std::uint64_t{0}); }; // 8: how many allocations there are
    spoil();
    in_child(starts(Success));
    CHECK(first_word() == mine);
    Link link;
    Child user([&] {
      start();
      static_cast<void>(create_chunk(2 * kMiB));
      link.left().say(1);
      CHECK(link.left().hear() == 2);
    });
    CHECK(link.right().hear() == 1);
    spoil();
    in_child(starts(OperatingSystem));
    link.right().say(2);
    user.finish();
    in_child(starts(Success));
  }
  CHECK(::unlink(machine.state().c_str()) == 0);
  put(0, 0x2121212165656565U);
  in_child(starts(OperatingSystem));
  CHECK(first_word() == 0x2121212165656565U);
  struct stat info = {};
  CHECK(::stat(machine.state().c_str(), &info) == 0);
  CHECK(info.st_size == 8);
}
