// SPDX-License-Identifier: MIT
//
// Streams: order, lag, the default streams, and ends.
#include "child.hpp"
#include "driver.hpp"

#include <cstdlib>
#include <cstring>
#include <thread>
#include <unistd.h>
#include <vector>

using namespace sim_test;

namespace {

// One word of registered memory, which the CPU may look at while streams work.
struct Word {
  alignas(8) std::uint32_t value = 0;
  Word() { REQUIRE(driver().cuMemHostRegister(&value, sizeof value, 0) == Success); }
  Word(const Word&) = delete;
  Word& operator=(const Word&) = delete;
  ~Word() { CHECK(driver().cuMemHostUnregister(&value) == Success); }
  [[nodiscard]] DevicePtr address() const { return reinterpret_cast<std::uintptr_t>(&value); }
};

const Driver* exit_driver = nullptr;
Stream exit_stream = nullptr;

struct CallsAtExit {
  ~CallsAtExit() {
    if (exit_driver == nullptr) return;
    if (exit_driver->cuStreamQuery(exit_stream) != NotReady) std::abort();
    if (exit_driver->cuStreamQuery(per_thread_stream()) != Success) std::abort();
    if (exit_driver->cuStreamDestroy(exit_stream) != Success) std::abort();
  }
} calls_at_exit;

} // namespace

TEST_CASE("work lags behind the call, so a read without waiting sees old bytes") {
  Machine machine;
  machine.set("GPULOAN_SIM_LAG_US", "2000000");
  in_child([] {
    const Driver& cuda = start();
    const Stream stream = make_stream();
    Word word;
    CHECK(cuda.cuMemsetD32Async(word.address(), 5, 1, stream) == Success);
    CHECK(word.value == 0);
    CHECK(cuda.cuStreamQuery(stream) == NotReady);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(word.value == 5);
  });
}

TEST_CASE("a stream runs its work in order, and holds") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream stream = make_stream();
    const Stream other = make_stream();
    Word word;
    CHECK(cuda.stream_hold(stream) == Success);
    for (std::uint32_t value = 1; value <= 100; ++value) {
      CHECK(cuda.cuMemsetD32Async(word.address(), value, 1, stream) == Success);
    }
    CHECK(cuda.cuStreamSynchronize(other) == Success);
    CHECK(cuda.cuStreamQuery(stream) == NotReady);
    CHECK(word.value == 0);
    CHECK(cuda.stream_release(stream) == Success);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(word.value == 100);
    CHECK(cuda.cuStreamQuery(stream) == Success);
  });
}

TEST_CASE("pageable memory is read and written when the call returns") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream stream = make_stream();
    DevicePtr device = 0;
    for (const std::size_t size : {std::size_t{64}, 8 * kMiB}) {
      REQUIRE(cuda.cuMemAlloc(&device, size) == Success);
      std::vector<unsigned char> bytes(size, 0x11);
      CHECK(cuda.cuMemcpyHtoDAsync(device, bytes.data(), size, stream) == Success);
      std::memset(bytes.data(), 0x22, size);
      CHECK(cuda.cuMemcpyDtoHAsync(bytes.data(), device, size, stream) == Success);
      CHECK(bytes == std::vector<unsigned char>(size, 0x11));
      CHECK(cuda.cuMemcpyAsync(device, reinterpret_cast<std::uintptr_t>(bytes.data()), size, stream) == Success);
      CHECK(cuda.cuMemFree(device) == Success);
    }
  });
}

TEST_CASE("addresses that the call can see to be wrong are refused there") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    DevicePtr device = 0;
    REQUIRE(cuda.cuMemAlloc(&device, 4096) == Success);
    std::uint32_t host = 0;
    const auto host_address = reinterpret_cast<std::uintptr_t>(&host);
    CHECK(cuda.cuMemcpyDtoDAsync(device, host_address, 4, nullptr) == InvalidValue);
    CHECK(cuda.cuMemcpyHtoDAsync(device + 4094, &host, 4, nullptr) == InvalidValue);
    CHECK(cuda.cuMemcpyHtoDAsync(device, nullptr, 4, nullptr) == InvalidValue);
    CHECK(cuda.cuMemcpyAsync(device, 0x1000, 4, nullptr) == InvalidValue);
    CHECK(cuda.cuMemsetD32Async(device + 2, 0, 1, nullptr) == InvalidValue);
    CHECK(cuda.cuMemsetD32Async(device, 0, SIZE_MAX, nullptr) == InvalidValue);
    CHECK(cuda.cuMemsetD8Async(host_address, 0, 4, nullptr) == InvalidValue);
    CHECK(cuda.cuMemcpyDtoDAsync(device, host_address, 0, nullptr) == Success);
    CHECK(cuda.cuMemFree(device) == Success);
    CHECK(cuda.cuMemsetD8Async(device, 0, 4, nullptr) == InvalidValue);
    CHECK(cuda.cuStreamQuery(reinterpret_cast<Stream>(&host)) == InvalidHandle);
    CHECK(cuda.cuCtxSynchronize() == Success);
  });
}

TEST_CASE("the legacy stream waits for blocking streams, and they for it") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream blocking = make_stream(StreamDefault);
    const Stream free_stream = make_stream(StreamNonBlocking);
    Word word;
    CHECK(cuda.stream_hold(blocking) == Success);
    CHECK(cuda.cuMemsetD32Async(word.address(), 1, 1, blocking) == Success);
    CHECK(cuda.cuMemsetD32Async(word.address(), 2, 1, nullptr) == Success);
    const Stream later = make_stream(StreamDefault);
    CHECK(cuda.cuMemsetD32Async(word.address(), 3, 1, later) == Success);
    Word aside;
    CHECK(cuda.cuMemsetD32Async(aside.address(), 4, 1, free_stream) == Success);
    CHECK(cuda.cuStreamSynchronize(free_stream) == Success);
    CHECK(aside.value == 4);
    CHECK(word.value == 0);
    CHECK(cuda.cuStreamQuery(nullptr) == NotReady);
    CHECK(cuda.cuStreamQuery(legacy_stream()) == NotReady);
    CHECK(cuda.cuStreamQuery(later) == NotReady);
    CHECK(cuda.stream_release(blocking) == Success);
    CHECK(cuda.cuStreamSynchronize(later) == Success);
    CHECK(word.value == 3);
    CHECK(cuda.cuStreamSynchronize(nullptr) == Success);
  });
}

TEST_CASE("each thread has its own per-thread stream") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    Context context = nullptr;
    REQUIRE(cuda.cuCtxGetCurrent(&context) == Success);
    CHECK(cuda.stream_hold(per_thread_stream()) == Success);
    CHECK(cuda.stream_delay(per_thread_stream(), 0) == Success);
    CHECK(cuda.cuStreamQuery(per_thread_stream()) == NotReady);
    std::thread([&] {
      REQUIRE(cuda.cuCtxPushCurrent(context) == Success);
      CHECK(cuda.stream_delay(per_thread_stream(), 0) == Success);
      CHECK(cuda.cuStreamSynchronize(per_thread_stream()) == Success);
    }).join();
    CHECK(cuda.cuStreamQuery(per_thread_stream()) == NotReady);
    CHECK(cuda.stream_release(per_thread_stream()) == Success);
    CHECK(cuda.cuStreamSynchronize(per_thread_stream()) == Success);
  });
}

TEST_CASE("a destroyed stream finishes its work, and its handle is void at once") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream stream = make_stream();
    Word word;
    CHECK(cuda.stream_hold(stream) == Success);
    CHECK(cuda.cuMemsetD32Async(word.address(), 6, 1, stream) == Success);
    CHECK(cuda.cuStreamDestroy(stream) == Success);
    CHECK(cuda.cuStreamDestroy(stream) == InvalidHandle);
    CHECK(cuda.cuStreamQuery(stream) == InvalidHandle);
    CHECK(cuda.cuCtxSynchronize() == Success);
    CHECK(word.value == 6);
    CHECK(cuda.live("streams") == 0);
  });
}

TEST_CASE("a process ends with work pending, and static destructors may still call the driver") {
  Machine machine;
  in_child([] {
    exit_driver = &start();
    exit_stream = make_stream();
    CHECK(exit_driver->stream_delay(exit_stream, 1'000'000'000) == Success);
    CHECK(exit_driver->stream_delay(nullptr, 1'000'000'000) == Success);
    CHECK(exit_driver->cuStreamQuery(per_thread_stream()) == Success);
  });
}

TEST_CASE("many threads on many streams") {
  Machine machine;
  machine.set("GPULOAN_SIM_LAG_US", "0");
  in_child([] {
    const Driver& cuda = start();
    Context context = nullptr;
    REQUIRE(cuda.cuCtxGetCurrent(&context) == Success);
    DevicePtr device = 0;
    REQUIRE(cuda.cuMemAlloc(&device, 8 * 4096) == Success);
    std::vector<std::thread> threads;
    for (std::uint32_t index = 0; index < 4; ++index) {
      threads.emplace_back([&, index] {
        REQUIRE(cuda.cuCtxPushCurrent(context) == Success);
        for (std::uint32_t round = 0; round < 50; ++round) {
          write_word(device + index * 4096, index * 1000 + round);
          CHECK(read_word(device + index * 4096) == index * 1000 + round);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}
