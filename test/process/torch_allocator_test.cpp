// SPDX-License-Identifier: MIT
//
// The allocator for PyTorch, by its C functions, on the simulated driver. Each case is a process of its own, with its own driver,
// devices and faults. Lending such memory: test/contract/foreign_main.cpp.
#include <doctest/doctest.h>

#include <gpuloan/gpuloan.h>

#include "../sim/child.hpp"
#include "../sim/driver.hpp"

#include <chrono>
#include <set>
#include <string>
#include <thread>
#include <vector>

using namespace sim_test;

namespace {

std::vector<std::string> errors, warnings; // of the log

void collect(void*, gpuloan_log_level level, const char* line) { (level == GPULOAN_LOG_ERROR ? errors : warnings).emplace_back(line); }

// A process that uses devices as PyTorch would: the primary context of `device` is current.
const Driver& start_logged(Device device = 0) {
  gpuloan_log_set(collect, nullptr, GPULOAN_LOG_WARNING);
  return start(device);
}

DevicePtr address(void* pointer) { return reinterpret_cast<DevicePtr>(pointer); }

void check_nothing_left() {
  for (const std::string what : {"mappings", "handles", "reservations", "events", "allocations"}) {
    CAPTURE(what);
    CHECK(driver().live(what.c_str()) == 0);
  }
}

// NULL, and why: in the thread's text and in one line of the log.
void check_fails(std::size_t bytes, int device, const std::string& part) {
  errors.clear();
  CHECK(gpuloan_torch_malloc(bytes, device, nullptr) == nullptr);
  const std::string text = gpuloan_error_text();
  INFO(text);
  CHECK(text.find(part) != std::string::npos);
  REQUIRE(errors.size() == 1);
  CHECK(errors[0] == "gpuloan_torch_malloc: " + text);
}

double seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

} // namespace

TEST_CASE("one chunk for each block, and all of it comes back") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start_logged();
    const std::size_t before = used_bytes();
    void* small = gpuloan_torch_malloc(1, 0, nullptr);
    void* large = gpuloan_torch_malloc(20 * kMiB + 1, 0, nullptr);
    REQUIRE(small != nullptr);
    REQUIRE(large != nullptr);
    CHECK(used_bytes() == before + 24 * kMiB);
    CHECK(cuda.live("mappings") == 2);
    DevicePtr base = 0;
    std::size_t bytes = 0;
    REQUIRE(cuda.cuMemGetAddressRange(&base, &bytes, address(large) + 20 * kMiB) == Success);
    CHECK(base == address(large));
    CHECK(bytes == 22 * kMiB);
    write_word(address(small), 7);
    CHECK(read_word(address(small)) == 7);
    int fd = -1;
    MemHandle handle = 0;
    REQUIRE(cuda.cuMemRetainAllocationHandle(&handle, large) == Success);
    CHECK(cuda.cuMemExportToShareableHandle(&fd, handle, HandlePosixFd, 0) == Success);
    ::close(fd);
    REQUIRE(cuda.cuMemRelease(handle) == Success);
    gpuloan_torch_free(small, 1, 0, nullptr);
    gpuloan_torch_free(large, 20 * kMiB + 1, 0, nullptr);
    CHECK(used_bytes() == before);
    check_nothing_left();
    CHECK(cuda.live("contexts") == 1); // ours
    CHECK(errors.empty());
    CHECK(warnings.empty());
  });
}

TEST_CASE("0 bytes and NULL are nothing") {
  Machine machine;
  in_child([] {
    start_logged();
    CHECK(gpuloan_torch_malloc(0, 0, nullptr) == nullptr);
    gpuloan_torch_free(nullptr, 0, 0, nullptr);
    CHECK(errors.empty());
    CHECK(driver().calls("cuMemCreate") == 0);
  });
}

TEST_CASE("out of memory, and sizes that no device has") {
  Machine machine;
  machine.set("GPULOAN_SIM_MEMORY_MIB", "64");
  in_child([] {
    start_logged();
    void* most = gpuloan_torch_malloc(60 * kMiB, 0, nullptr);
    REQUIRE(most != nullptr);
    check_fails(6 * kMiB, 0, "CUDA_ERROR_OUT_OF_MEMORY");
    check_fails(6 * kMiB, 0, "asked for " + std::to_string(6 * kMiB) + " bytes, " + std::to_string(4 * kMiB) + " of " + std::to_string(64 * kMiB) + " are free");
    for (const std::size_t bytes : {65 * kMiB, SIZE_MAX, SIZE_MAX - kMiB}) check_fails(bytes, 0, "are more than device 0 has");
    gpuloan_torch_free(most, 60 * kMiB, 0, nullptr);
    most = gpuloan_torch_malloc(64 * kMiB, 0, nullptr);
    CHECK(most != nullptr);
    gpuloan_torch_free(most, 64 * kMiB, 0, nullptr);
    check_nothing_left();
  });
}

TEST_CASE("a device that is not there, a driver without VMM, a call that fails") {
  Machine machine;
  in_child([] {
    start_logged();
    for (const int device : {-1, 1, 99}) check_fails(1, device, "device");
  });
  machine.set("GPULOAN_SIM_WITHOUT", "vmm");
  in_child([] {
    start_logged();
    check_fails(1, 0, "device 0 has no VMM memory that can be shared");
  });
  machine.set("GPULOAN_SIM_WITHOUT", "");
  for (const std::string fault : {"cuDevicePrimaryCtxRetain:2:999", "cuMemCreate:1:999", "cuMemAddressReserve:1:999", "cuMemMap:1:999", "cuMemSetAccess:1:999"}) {
    CAPTURE(fault);
    machine.set("GPULOAN_SIM_FAIL", fault.c_str());
    in_child([&] {
      start_logged();
      check_fails(1, 0, fault.substr(0, fault.find(':')));
      check_nothing_left();
      void* pointer = gpuloan_torch_malloc(1, 0, nullptr);
      CHECK(pointer != nullptr);
      gpuloan_torch_free(pointer, 1, 0, nullptr);
      check_nothing_left();
    });
  }
}

TEST_CASE("the ordinal says which device; contexts are the primary ones and the current one stays") {
  Machine machine;
  machine.set("GPULOAN_SIM_DEVICES", "2");
  in_child([] {
    const Driver& cuda = start_logged(0);
    const auto current = [&] {
      Context context = nullptr;
      REQUIRE(cuda.cuCtxGetCurrent(&context) == Success);
      return context;
    };
    const Context first = current();
    void* memory[2] = {gpuloan_torch_malloc(1, 0, nullptr), gpuloan_torch_malloc(1, 1, nullptr)};
    CHECK(current() == first);
    CHECK(cuda.live("contexts") == 2); // the second one is made for us
    for (int device = 0; device < 2; ++device) {
      int ordinal = -1;
      void* data[] = {&ordinal};
      const int attribute = 9; // DEVICE_ORDINAL
      REQUIRE(cuda.cuPointerGetAttributes(1, &attribute, data, address(memory[device])) == Success);
      CHECK(ordinal == device);
    }
    Context other = nullptr; // not a primary one
    REQUIRE(cuda.cuCtxCreate(&other, 0, 0) == Success);
    void* third = gpuloan_torch_malloc(1, 0, nullptr);
    CHECK(third != nullptr);
    CHECK(current() == other);
    gpuloan_torch_free(third, 1, 0, nullptr);
    CHECK(current() == other);
    REQUIRE(cuda.cuCtxDestroy(other) == Success);
    CHECK(current() == first);
    for (int device = 0; device < 2; ++device) gpuloan_torch_free(memory[device], 1, device, nullptr);
    CHECK(cuda.live("contexts") == 1);
    check_nothing_left();
  });
}

TEST_CASE("free waits for the work of its stream, and of no other") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start_logged();
    const Stream stream = make_stream(), stuck = make_stream();
    REQUIRE(cuda.stream_hold(stuck) == Success);
    void* memory = gpuloan_torch_malloc(kMiB, 0, stream);
    REQUIRE(cuda.stream_delay(stream, 50'000) == Success);
    REQUIRE(cuda.cuMemsetD32Async(address(memory), 1, kMiB / 4, stream) == Success); // 700 if it runs after the unmapping
    CHECK(seconds_of([&] { gpuloan_torch_free(memory, kMiB, 0, stream); }) >= 0.045);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    check_nothing_left();
    CHECK(warnings.empty());
    REQUIRE(cuda.stream_release(stuck) == Success);
  });
}

TEST_CASE("a stream that is stuck is waited for once and for a second; its memory comes back when it has passed") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start_logged();
    const Stream stuck = make_stream();
    std::vector<void*> blocks;
    for (int count = 0; count < 20; ++count) blocks.push_back(gpuloan_torch_malloc(kMiB, 0, stuck));
    REQUIRE(cuda.stream_hold(stuck) == Success);
    for (void* block : blocks) REQUIRE(cuda.cuMemsetD32Async(address(block), 1, kMiB / 4, stuck) == Success);
    const double seconds = seconds_of([&] {
      for (void* block : blocks) gpuloan_torch_free(block, kMiB, 0, stuck);
    });
    CHECK(seconds >= 0.99);
    CHECK(seconds < 3);
    CHECK(cuda.live("mappings") == 20);
    REQUIRE(warnings.size() == 1);
    CHECK(warnings[0].find("stay mapped until a later call") != std::string::npos);
    gpuloan_torch_free(blocks[0], kMiB, 0, stuck); // twice
    REQUIRE(errors.size() == 1);
    CHECK(errors[0].find("is not allocated") != std::string::npos);
    REQUIRE(cuda.stream_release(stuck) == Success);
    CHECK(cuda.cuStreamSynchronize(stuck) == Success);
    void* next = gpuloan_torch_malloc(kMiB, 0, nullptr); // a later call
    CHECK(cuda.live("mappings") == 1);
    gpuloan_torch_free(next, kMiB, 0, nullptr);
    check_nothing_left();
  });
}

TEST_CASE("memory that comes back is there for the next block at once") {
  Machine machine;
  machine.set("GPULOAN_SIM_MEMORY_MIB", "16");
  in_child([] {
    const Driver& cuda = start_logged();
    const Stream stream = make_stream();
    for (int round = 0; round < 20; ++round) {
      void* block = gpuloan_torch_malloc(12 * kMiB, 0, stream);
      REQUIRE(block != nullptr);
      REQUIRE(cuda.cuMemsetD32Async(address(block), 1, 12 * kMiB / 4, stream) == Success);
      gpuloan_torch_free(block, 12 * kMiB, 0, stream);
    }
    check_nothing_left();
  });
}

TEST_CASE("neither ends a graph capture") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start_logged();
    const Stream captured = make_stream(), blocking = make_stream(StreamDefault);
    for (const Stream stream : {captured, blocking}) {
      for (const int mode : {CaptureGlobal, CaptureThreadLocal, CaptureRelaxed}) {
        CAPTURE(mode);
        void* before = gpuloan_torch_malloc(kMiB, 0, stream);
        void* legacy = gpuloan_torch_malloc(kMiB, 0, nullptr);
        REQUIRE(cuda.cuStreamBeginCapture(stream, mode) == Success);
        void* inside = gpuloan_torch_malloc(kMiB, 0, stream);
        CHECK(inside != nullptr);
        REQUIRE(cuda.cuMemsetD32Async(address(inside), 1, kMiB / 4, stream) == Success);
        std::thread([&] { // as PyTorch's own threads may
          void* other = gpuloan_torch_malloc(kMiB, 0, captured);
          CHECK(other != nullptr);
          CHECK(seconds_of([&] { gpuloan_torch_free(other, kMiB, 0, stream); }) < 0.5);
        }).join();
        CHECK(seconds_of([&] { gpuloan_torch_free(before, kMiB, 0, stream); }) < 0.5); // is not waited for
        CHECK(seconds_of([&] { gpuloan_torch_free(legacy, kMiB, 0, nullptr); }) < 0.5);
        int status = -1;
        CHECK(cuda.cuStreamIsCapturing(stream, &status) == Success);
        CHECK(status == CaptureActive);
        int exchanged = CaptureGlobal; // the thread's mode is as it was
        CHECK(cuda.cuThreadExchangeStreamCaptureMode(&exchanged) == Success);
        CHECK(exchanged == CaptureGlobal);
        void* graph = nullptr;
        CHECK(cuda.cuStreamEndCapture(stream, &graph) == Success);
        gpuloan_torch_free(inside, kMiB, 0, stream); // finds the others: what they wait for is known from now on
        CHECK(cuda.cuCtxSynchronize() == Success);
        gpuloan_torch_free(gpuloan_torch_malloc(1, 0, stream), 1, 0, stream);
        check_nothing_left();
      }
    }
    CHECK(errors.empty());
  });
}

TEST_CASE("a forked child gets nothing and frees nothing") {
  Machine machine;
  in_child([] {
    start_logged();
    void* memory = gpuloan_torch_malloc(kMiB, 0, nullptr);
    write_word(address(memory), 9);
    in_child([&] {
      CHECK(gpuloan_torch_malloc(kMiB, 0, nullptr) == nullptr);
      CHECK(std::string(gpuloan_error_text()).find("forked") != std::string::npos);
      gpuloan_torch_free(memory, kMiB, 0, nullptr);
      CHECK(errors.empty());
    });
    CHECK(read_word(address(memory)) == 9);
    gpuloan_torch_free(memory, kMiB, 0, nullptr);
    check_nothing_left();
  });
}

TEST_CASE("many threads") {
  Machine machine;
  in_child([] {
    start_logged();
    const std::size_t before = used_bytes();
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 8; ++number) {
      threads.emplace_back([number] {
        Context context = nullptr;
        if (number % 2 == 0 && (driver().cuDevicePrimaryCtxRetain(&context, 0) != Success || driver().cuCtxPushCurrent(context) != Success)) std::abort();
        std::set<void*> mine;
        for (unsigned round = 0; round < 40; ++round) {
          void* block = gpuloan_torch_malloc((round % 3 + 1) * kMiB, 0, nullptr);
          if (block == nullptr || !mine.insert(block).second) std::abort();
          if (round % 2 == 1) {
            gpuloan_torch_free(*mine.begin(), 0, 0, nullptr);
            mine.erase(mine.begin());
          }
        }
        for (void* block : mine) gpuloan_torch_free(block, 0, 0, nullptr);
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(used_bytes() == before);
    check_nothing_left();
    CHECK(errors.empty());
    CHECK(warnings.empty());
  });
}
