// SPDX-License-Identifier: MIT
//
// The owners of driver objects on the recorder: which calls, in which order, in which context, and what is left when any
// one of them fails.
#include <doctest/doctest.h>

#include "recorder.hpp"

#include <driver/handles.hpp>

#include <array>
#include <fcntl.h>
#include <functional>
#include <sys/wait.h>
#include <unistd.h>

using namespace gpuloan;
using namespace gpuloan::driver;
using recorder::state;

namespace {

constexpr std::size_t kBytes = 4u << 20;

std::shared_ptr<Gpu> open_gpu(const Table& table = recorder::fresh_table()) {
  auto gpu = Gpu::open(Driver::wrap(table), 0);
  REQUIRE(gpu.has_value());
  { const Gpu::Scope scope(**gpu); } // the primary context is made, so that later calls are only the object's
  state().calls.clear();
  state().modes_seen.clear();
  return *gpu;
}

// Nothing but the context is alive, and the thread is as it was.
void check_clean() {
  CHECK(state().alive == std::map<std::string, int>{{"primary", 1}});
  CHECK(state().contexts.empty());
  CHECK(state().capture_mode == CaptureGlobal);
}

// Runs `make` (which returns an Error or nothing) with its first call failing, then its second, and so on while the
// calls are ones that create. What the scope does at its end is not failed: there is no way back from that.
void check_each_failure(const char* last, const std::function<Result<void>(const std::shared_ptr<Gpu>&)>& make) {
  for (std::size_t k = 1;; ++k) {
    CAPTURE(k);
    const auto gpu = open_gpu();
    state().fail_at = k;
    const auto made = make(gpu);
    REQUIRE(state().calls.size() >= k);
    const std::string failed = state().calls[k - 1];
    CAPTURE(failed);
    // Without the current context the scope pushes, which is as good.
    if (failed != "cuCtxGetCurrent") {
      REQUIRE_FALSE(made.has_value());
      CHECK(made.error().status == GPULOAN_ERR_DRIVER);
      CHECK(made.error().text.find(failed + ": CUDA_ERROR_UNKNOWN (999)") == 0);
    }
    check_clean();
    if (failed == last) return;
  }
}

template <typename T>
Result<void> drop(Result<T> made) {
  if (!made) return forward(std::move(made.error()));
  return {};
}

} // namespace

// E11
TEST_CASE("mapping: calls, order, context, capture mode") {
  const auto gpu = open_gpu();
  {
    auto handle = VmmHandle::create(gpu, kBytes);
    REQUIRE(handle.has_value());
    CHECK(static_cast<bool>(*handle));
    CHECK(handle->bytes() == kBytes);
    CHECK(state().asked_bytes == kBytes);
    CHECK(state().asked_flags == HandlePosixFd);
    CHECK(state().asked_location == recorder::kDevice);
    CHECK(state().all() == "cuCtxGetCurrent cuCtxPushCurrent cuThreadExchangeStreamCaptureMode cuMemCreate "
                           "cuThreadExchangeStreamCaptureMode cuCtxPopCurrent");
    CHECK(state().modes_seen[3] == CaptureRelaxed);
    auto mapping = VmmMapping::map(gpu, *handle, AccessRead);
    REQUIRE(mapping.has_value());
    CHECK(mapping->bytes() == kBytes);
    CHECK(mapping->pointer() != 0);
    CHECK(state().asked_access == AccessRead);
    *handle = VmmHandle(); // the mapping outlives its handle
  }
  CHECK(state().work() == "cuMemCreate cuMemAddressReserve cuMemMap cuMemSetAccess cuMemRelease cuMemUnmap cuMemAddressFree");
  check_clean();
}

TEST_CASE("every failing call is rolled back") {
  check_each_failure("cuMemCreate", [](const auto& gpu) { return drop(VmmHandle::create(gpu, kBytes)); });
  check_each_failure("cuMemImportFromShareableHandle", [](const auto& gpu) { return drop(VmmHandle::import_fd(gpu, 5, kBytes)); });
  check_each_failure("cuMemSetAccess", [](const auto& gpu) {
    return drop(VmmMapping::map(gpu, VmmHandle(), AccessReadWrite));
  });
  check_each_failure("cuMemHostGetDevicePointer", [](const auto& gpu) {
    std::array<std::byte, 16> memory = {};
    return drop(HostRegistration::create(gpu, memory));
  });
  check_each_failure("cuStreamCreate", [](const auto& gpu) { return drop(OwnedStream::create(gpu)); });
  check_each_failure("cuEventCreate", [](const auto& gpu) { return drop(OwnedEvent::create(gpu, EventInterprocess)); });
  check_each_failure("cuIpcOpenEventHandle", [](const auto& gpu) { return drop(OwnedEvent::open_ipc(gpu, {{7}})); });
}

// J11
TEST_CASE("every failing call of a block or a pool is rolled back") {
  check_each_failure("cuIpcGetMemHandle", [](const auto& gpu) { return drop(IpcMapping::handle_of(*gpu, 0x8000)); });
  check_each_failure("cuIpcOpenMemHandle", [](const auto& gpu) { return drop(IpcMapping::open(gpu, {{7}})); });
  check_each_failure("cuMemPoolExportToShareableHandle", [](const auto& gpu) { return drop(export_pool(*gpu, nullptr)); });
  check_each_failure("cuMemPoolExportPointer", [](const auto& gpu) { return drop(export_pool_pointer(*gpu, 0x9000)); });
  check_each_failure("cuMemPoolImportFromShareableHandle", [](const auto& gpu) { return drop(ImportedPool::open(gpu, 5)); });
  check_each_failure("cuMemPoolImportPointer", [](const auto& gpu) { return drop(PoolMapping::open(gpu, nullptr, {}, nullptr)); });
  const auto gpu = open_gpu(); // and what does not fail is closed, once
  {
    const auto pool = ImportedPool::open(gpu, 5);
    REQUIRE(pool.has_value());
    CHECK(PoolMapping::open(gpu, pool->get(), {}, nullptr).has_value());
  }
  CHECK(IpcMapping::open(gpu, {{7}}).has_value());
  CHECK(state().work() == "cuMemPoolImportFromShareableHandle cuMemPoolImportPointer cuMemFree cuMemPoolDestroy cuIpcOpenMemHandle cuIpcCloseMemHandle");
  check_clean();
}

TEST_CASE("addresses that cannot be unmapped are not freed") {
  const auto gpu = open_gpu();
  state().fail["cuMemUnmap"] = Unknown;
  SUBCASE("in a rollback") {
    state().fail["cuMemSetAccess"] = InvalidValue;
    const auto mapping = VmmMapping::map(gpu, VmmHandle(), AccessRead);
    REQUIRE_FALSE(mapping.has_value());
    CHECK(mapping.error().text.find("cuMemSetAccess") == 0); // the first failure is the one that is told
  }
  SUBCASE("in the destructor") { CHECK(VmmMapping::map(gpu, VmmHandle(), AccessRead).has_value()); }
  CHECK(state().count("cuMemUnmap") == 1);
  CHECK(state().count("cuMemAddressFree") == 0);
}

// D8
TEST_CASE("out of memory has three causes") {
  const auto gpu = open_gpu();
  state().fail = {{"cuMemCreate", OutOfMemory}, {"cuMemAddressReserve", OutOfMemory}, {"cuMemHostRegister", OutOfMemory}};
  const auto handle = VmmHandle::create(gpu, kBytes);
  REQUIRE_FALSE(handle.has_value());
  CHECK(handle.error().status == GPULOAN_ERR_DEVICE_MEMORY);
  CHECK(handle.error().text.find("asked for 4194304 bytes, 1234 of 4096 are free") != std::string::npos);
  const auto mapping = VmmMapping::map(gpu, VmmHandle(), AccessRead);
  REQUIRE_FALSE(mapping.has_value());
  CHECK(mapping.error().status == GPULOAN_ERR_NO_MEMORY);
  CHECK(mapping.error().text.find("RLIMIT_AS") != std::string::npos);
  std::array<std::byte, 16> memory = {};
  const auto registration = HostRegistration::create(gpu, memory);
  REQUIRE_FALSE(registration.has_value());
  CHECK(registration.error().status == GPULOAN_ERR_NO_MEMORY);
  CHECK(registration.error().text.find("RLIMIT_MEMLOCK") != std::string::npos);
  check_clean();
}

TEST_CASE("exported descriptors are close-on-exec and at least 3") {
  const auto gpu = open_gpu();
  const auto handle = VmmHandle::create(gpu, kBytes);
  REQUIRE(handle.has_value());
  SUBCASE("an ordinary number") {}
  SUBCASE("standard input was closed") { state().close_on_export = true; }
  const auto fd = handle->export_fd();
  REQUIRE(fd.has_value());
  CHECK(fd->get() >= 3);
  CHECK((::fcntl(fd->get(), F_GETFD) & FD_CLOEXEC) != 0);
  if (!state().close_on_export) return;
  CHECK(::fcntl(0, F_GETFD) == -1); // the low number was not kept
  REQUIRE(::open("/dev/null", O_RDONLY | O_CLOEXEC) == 0);
}

TEST_CASE("events") {
  const auto gpu = open_gpu();
  {
    auto event = OwnedEvent::create(gpu, EventInterprocess);
    REQUIRE(event.has_value());
    CHECK(state().asked_flags == (EventInterprocess | EventDisableTiming));
    const auto handle = event->ipc_handle();
    REQUIRE(handle.has_value());
    const auto opened = OwnedEvent::open_ipc(gpu, *handle);
    REQUIRE(opened.has_value());
    CHECK(opened->record(nullptr).has_value());
    CHECK(opened->query().value());
    state().fail["cuEventQuery"] = NotReady;
    CHECK_FALSE(opened->query().value());
    for (const CuResult code : {OutOfMemory, NotSupported, Unknown}) { // says nothing of the work
      state().fail["cuEventQuery"] = code;
      CHECK_FALSE(opened->query().value());
    }
    for (const CuResult code : {LaunchFailed, ContextIsDestroyed}) { // the work ended with its context
      state().fail["cuEventQuery"] = code;
      CHECK(opened->query().error().status == GPULOAN_ERR_DEVICE_LOST);
    }
    for (const CuResult code : {InvalidContext, InvalidHandle}) {
      state().fail["cuEventQuery"] = code;
      CHECK(opened->query().error().status == GPULOAN_ERR_DRIVER);
    }
    state().fail["cuEventQuery"] = Success;
    state().fail["cuCtxPushCurrent"] = Unknown; // not asked at all
    CHECK_FALSE(opened->query().value());
    state().fail["cuCtxPushCurrent"] = ContextIsDestroyed;
    CHECK(opened->query().error().status == GPULOAN_ERR_DEVICE_LOST);
    state().fail["cuCtxPushCurrent"] = Success;
  }
  CHECK(state().count("cuEventDestroy") == 2);
}

TEST_CASE("moves: one owner, one release") {
  const auto gpu = open_gpu();
  {
    OwnedStream first = OwnedStream::create(gpu).value();
    OwnedStream second = OwnedStream::create(gpu).value();
    second = std::move(first);
    CHECK(state().count("cuStreamDestroy") == 1);
    OwnedStream third(std::move(second));
    CHECK(static_cast<bool>(third));
    VmmHandle handle = VmmHandle::create(gpu, kBytes).value();
    VmmHandle taken(std::move(handle));
    handle = std::move(taken);
    std::array<std::byte, 16> memory = {};
    HostRegistration registration = HostRegistration::create(gpu, memory).value();
    HostRegistration other(std::move(registration));
    CHECK(other.device_pointer() == 0x7000);
    CHECK(state().asked_flags == (RegisterPortable | RegisterDeviceMap));
    VmmMapping mapping = VmmMapping::map(gpu, handle, AccessRead).value();
    VmmMapping moved(std::move(mapping));
    mapping = std::move(moved);
    CHECK(static_cast<bool>(mapping));
    OwnedEvent event = OwnedEvent::create(gpu, EventDefault).value();
    OwnedEvent later(std::move(event));
    event = std::move(later);
  }
  CHECK(state().count("cuStreamDestroy") == 2);
  CHECK(state().count("cuMemRelease") == 1);
  CHECK(state().count("cuMemHostUnregister") == 1);
  CHECK(state().count("cuMemUnmap") == 1);
  CHECK(state().count("cuEventDestroy") == 1);
  check_clean();
}

TEST_CASE("without the symbols of a group") {
  Table table = recorder::fresh_table();
  table.cuMemMap = nullptr;
  table.cuIpcOpenEventHandle = nullptr;
  table.cuMemHostGetDevicePointer = nullptr;
  const auto gpu = open_gpu(table);
  std::array<std::byte, 16> memory = {};
  const Result<void> results[] = {
      drop(VmmHandle::create(gpu, kBytes)),        drop(VmmHandle::import_fd(gpu, 5, kBytes)),
      drop(VmmMapping::map(gpu, {}, AccessRead)),  drop(OwnedEvent::open_ipc(gpu, {{7}})),
      drop(OwnedEvent::create(gpu, EventInterprocess)), drop(HostRegistration::create(gpu, memory)),
  };
  for (const auto& result : results) {
    REQUIRE_FALSE(result.has_value());
    CHECK(result.error().status == GPULOAN_ERR_UNSUPPORTED);
    CHECK(result.error().text.find(" lacks cu") != std::string::npos);
  }
  CHECK(state().work().empty());
}

TEST_CASE("a destructor that cannot enter the context is silent") {
  const auto gpu = open_gpu();
  {
    const OwnedStream stream = OwnedStream::create(gpu).value();
    const VmmHandle handle = VmmHandle::create(gpu, kBytes).value();
    state().fail["cuCtxPushCurrent"] = ContextIsDestroyed;
  }
  CHECK(state().count("cuStreamDestroy") == 0);
  CHECK(state().count("cuMemRelease") == 0);
  CHECK(state().contexts.empty());
}

TEST_CASE("no call in a forked child") {
  const auto gpu = open_gpu();
  std::array<std::byte, 16> memory = {};
  auto stream = OwnedStream::create(gpu);
  auto event = OwnedEvent::create(gpu, EventDefault);
  auto handle = VmmHandle::create(gpu, kBytes);
  auto mapping = VmmMapping::map(gpu, *handle, AccessRead);
  auto registration = HostRegistration::create(gpu, memory);
  REQUIRE(registration.has_value());
  state().calls.clear();
  const pid_t child = ::fork();
  if (child == 0) {
    int wrong = calls_allowed() ? 1 : 0;
    const auto more = VmmHandle::create(gpu, kBytes);
    wrong += more.has_value() || more.error().status != GPULOAN_ERR_FORKED ? 1 : 0;
    wrong += event->query().has_value() || handle->export_fd().has_value() ? 1 : 0;
    wrong += Gpu::open(Driver::wrap(Table{}), 0).has_value() ? 1 : 0;
    *stream = OwnedStream();
    *event = OwnedEvent();
    *mapping = VmmMapping();
    *handle = VmmHandle();
    *registration = HostRegistration();
    wrong += state().calls.empty() ? 0 : 1;
    ::_exit(wrong);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(calls_allowed());
}
