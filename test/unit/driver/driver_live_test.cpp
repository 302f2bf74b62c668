// SPDX-License-Identifier: MIT
//
// The owners of driver objects on a driver that works: the one that GPULOAN_DRIVER names, else the simulated one of this
// build tree. Skipped (77) where neither can be opened. What is checked here is that the calls, as gpuloan makes them,
// are ones that a driver takes, and that bytes arrive; the driver's behaviour is the conformance suite's business.
#include <doctest/doctest.h>

#include <base/mapping.hpp>
#include <driver/handles.hpp>

#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>
#include <vector>

using namespace gpuloan;
using namespace gpuloan::driver;

namespace {

std::shared_ptr<const Driver> live;

std::shared_ptr<Gpu> open_gpu() {
  auto gpu = Gpu::open(live, 0);
  if (!gpu) FAIL(gpu.error().text);
  return *gpu;
}

// The value, or a failed test with the error's whole sentence.
template <typename T>
T need(Result<T> result) {
  if (!result) FAIL(result.error().text);
  return std::move(*result);
}

void need(const Result<void>& result) {
  if (!result) FAIL(result.error().text);
}

std::vector<unsigned> read_back(Gpu& gpu, DevicePtr from, std::size_t words) {
  const OwnedStream stream = need(OwnedStream::create(open_gpu()));
  const Gpu::Scope scope(gpu);
  std::vector<unsigned> out(words);
  need(GPULOAN_CU(gpu.driver(), cuMemcpyDtoHAsync, out.data(), from, words * sizeof(unsigned), stream.get()));
  need(GPULOAN_CU(gpu.driver(), cuStreamSynchronize, stream.get()));
  return out;
}

void fill(Gpu& gpu, DevicePtr to, unsigned value, std::size_t words) {
  const OwnedStream stream = need(OwnedStream::create(open_gpu()));
  const Gpu::Scope scope(gpu);
  need(GPULOAN_CU(gpu.driver(), cuMemsetD32Async, to, value, words, stream.get()));
  need(GPULOAN_CU(gpu.driver(), cuStreamSynchronize, stream.get()));
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

} // namespace

TEST_CASE("the driver and its first device") {
  MESSAGE(live->describe());
  for (unsigned i = 0; i < static_cast<unsigned>(Group::Count); ++i) CHECK(live->missing(static_cast<Group>(i)) == "");
  const Floors floors = need(probe_floors(*live, 0));
  MESSAGE(floors.name << ": " << floors.total_bytes << " bytes, floors " << floors.bits << " " << floors.reason);
  CHECK(floors.total_bytes > 0);
  CHECK_FALSE(floors.name.empty());
  CHECK(floors.uuid != Uuid{});
  CHECK(need(Driver::open(live->path().c_str())) == live);
}

TEST_CASE("an ordinal too many") {
  const auto floors = probe_floors(*live, 1000);
  REQUIRE_FALSE(floors.has_value());
  CHECK(floors.error().status == GPULOAN_ERR_NO_DEVICE);
}

TEST_CASE("a chunk: export, import, two mappings, one memory") {
  const auto gpu = open_gpu();
  if (!gpu->floors().has(GPULOAN_FLOOR_VMM)) return;
  { const OwnedStream warm = need(OwnedStream::create(gpu)); } // whatever the driver opens once is open now
  const std::size_t before = open_descriptors();
  {
    const std::size_t bytes = gpu->floors().granularity;
    VmmHandle handle = need(VmmHandle::create(gpu, bytes));
    UniqueFd fd = need(handle.export_fd());
    CHECK(fd.get() >= 3);
    CHECK((::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
    VmmHandle imported = need(VmmHandle::import_fd(gpu, fd.get(), bytes));
    fd.reset();
    const VmmMapping writable = need(VmmMapping::map(gpu, handle, AccessReadWrite));
    const VmmMapping readable = need(VmmMapping::map(gpu, imported, AccessRead));
    handle = VmmHandle();
    imported = VmmHandle(); // the memory lives in its mappings (V3)
    CHECK(writable.pointer() != readable.pointer());
    fill(*gpu, writable.pointer(), 0x5eed0001, bytes / 4);
    CHECK(read_back(*gpu, readable.pointer(), bytes / 4) == std::vector<unsigned>(bytes / 4, 0x5eed0001));
  }
  CHECK(open_descriptors() == before);
}

TEST_CASE("more device memory than there is") {
  const auto gpu = open_gpu();
  if (!gpu->floors().has(GPULOAN_FLOOR_VMM)) return;
  const std::size_t granularity = gpu->floors().granularity;
  const std::size_t bytes = (gpu->floors().total_bytes / granularity + 16) * granularity;
  const auto handle = VmmHandle::create(gpu, bytes);
  REQUIRE_FALSE(handle.has_value());
  CHECK(handle.error().status == GPULOAN_ERR_DEVICE_MEMORY);
  CHECK(handle.error().text.find("asked for " + std::to_string(bytes) + " bytes") != std::string::npos);
}

TEST_CASE("events") {
  const auto gpu = open_gpu();
  const OwnedStream stream = need(OwnedStream::create(gpu));
  const bool ipc = gpu->floors().has(GPULOAN_FLOOR_IPC_EVENTS);
  const OwnedEvent event = need(OwnedEvent::create(gpu, ipc ? EventInterprocess : EventDefault));
  CHECK(need(event.query())); // never recorded: success (S11)
  need(event.record(stream.get()));
  {
    const Gpu::Scope scope(*gpu);
    need(GPULOAN_CU(gpu->driver(), cuStreamSynchronize, stream.get()));
  }
  CHECK(need(event.query()));
  if (ipc) static_cast<void>(need(event.ipc_handle()));
}

TEST_CASE("registered host memory") {
  const auto gpu = open_gpu();
  if (!gpu->floors().has(GPULOAN_FLOOR_HOST_REGISTER)) return;
  const std::size_t bytes = 1u << 20;
  const UniqueFd fd = need(create_memfd("gpuloan-test", bytes));
  const Mapping memory = need(Mapping::map_shared(fd.get(), bytes));
  auto* words = reinterpret_cast<unsigned*>(memory.data());
  const HostRegistration registration = need(HostRegistration::create(gpu, memory.bytes()));
  fill(*gpu, registration.device_pointer(), 0x5eed0002, bytes / 4);
  CHECK(words[0] == 0x5eed0002);
  CHECK(words[bytes / 4 - 1] == 0x5eed0002);
  const auto again = HostRegistration::create(gpu, memory.bytes());
  REQUIRE_FALSE(again.has_value());
  CHECK(again.error().text.find("(712)") != std::string::npos);
}

int main(int count, char** words) {
  const char* choice = std::getenv("GPULOAN_DRIVER");
  auto driver = Driver::open(choice != nullptr && *choice != '\0' ? choice : "sim");
  if (!driver) {
    std::printf("skipped: %s\n", driver.error().text.c_str());
    return 77;
  }
  live = *driver;
  return doctest::Context(count, words).run();
}
