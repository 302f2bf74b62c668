// SPDX-License-Identifier: MIT
//
// Stream memory operations on registered host memory, also between processes, and how scarce waits are.
#include "child.hpp"
#include "driver.hpp"

#include <atomic>
#include <functional>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

using namespace sim_test;

namespace {

// A page of control words, shared with forked children, registered in this process.
class Words {
 public:
  Words() {
    void* page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(page != MAP_FAILED);
    words_ = static_cast<std::uint64_t*>(page);
  }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;
  ~Words() { ::munmap(words_, 4096); }

  void enroll() const { REQUIRE(driver().cuMemHostRegister(words_, 4096, RegisterPortable) == Success); }
  [[nodiscard]] void* page() const { return words_; }
  [[nodiscard]] DevicePtr address(std::size_t index) const { return reinterpret_cast<std::uintptr_t>(words_ + index); }
  void store(std::size_t index, std::uint64_t value) const { std::atomic_ref(words_[index]).store(value); }
  [[nodiscard]] std::uint64_t load(std::size_t index) const { return std::atomic_ref(words_[index]).load(); }

 private:
  std::uint64_t* words_;
};

bool done(Stream stream) { return driver().cuStreamQuery(stream) == Success; }

} // namespace

TEST_CASE("a stream writes a word behind its earlier work") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    Words words;
    words.enroll();
    const Stream stream = make_stream();
    CHECK(cuda.stream_hold(stream) == Success);
    CHECK(cuda.cuMemsetD32Async(words.address(1), 8, 1, stream) == Success);
    CHECK(cuda.cuStreamWriteValue64(stream, words.address(0), 9, 0) == Success);
    CHECK(words.load(0) == 0);
    CHECK(cuda.stream_release(stream) == Success);
    while (words.load(0) != 9) std::this_thread::yield();
    CHECK(words.load(1) == 8);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
  });
}

TEST_CASE("addresses, alignment and flags of memory operations are checked") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    Words words;
    CHECK(cuda.cuStreamWriteValue64(nullptr, words.address(0), 1, 0) == InvalidValue);
    words.enroll();
    CHECK(cuda.cuStreamWriteValue64(nullptr, words.address(0) + 4, 1, 0) == InvalidValue);
    CHECK(cuda.cuStreamWaitValue64(nullptr, words.address(0) + 4, 1, 0) == InvalidValue);
    CHECK(cuda.cuStreamWaitValue64(nullptr, words.address(0), 1, 64) == InvalidValue);
    CHECK(cuda.cuStreamWriteValue64(nullptr, words.address(512), 1, 0) == InvalidValue);
    DevicePtr device = 0;
    REQUIRE(cuda.cuMemAlloc(&device, 64) == Success);
    CHECK(cuda.cuStreamWriteValue64(nullptr, device, 0x100000002, 0) == Success);
    CHECK(cuda.cuStreamWaitValue64(nullptr, device, 0x100000002, WaitEq) == Success);
    CHECK(cuda.cuStreamSynchronize(nullptr) == Success);
    CHECK(read_word(device + 4) == 1);
  });
}

TEST_CASE("a wait is cyclic with GEQ and exact with EQ") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    Words words;
    words.enroll();
    const Stream stream = make_stream();
    words.store(0, 3); // three turns past the wrap
    CHECK(cuda.cuStreamWaitValue64(stream, words.address(0), UINT64_MAX, WaitGeq) == Success);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(cuda.cuStreamWaitValue64(stream, words.address(0), 2, WaitEq) == Success);
    CHECK(cuda.cuStreamSynchronize(make_stream()) == Success);
    CHECK_FALSE(done(stream));
    words.store(0, 2);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(cuda.cuStreamWaitValue64(stream, words.address(0), 4, WaitGeq) == Success);
    CHECK_FALSE(done(stream));
    words.store(0, 4);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
  });
}

TEST_CASE("S6: a CPU store of any process releases a wait, also when the promised writer was killed") {
  Machine machine;
  Words words;
  Link link;
  Child writer([&] {
    const Driver& cuda = start();
    words.enroll();
    const Stream stream = make_stream();
    CHECK(cuda.stream_delay(stream, 1'000'000'000) == Success);
    CHECK(cuda.cuStreamWriteValue64(stream, words.address(0), 1, 0) == Success);
    link.left().say(1);
    ::pause();
  });
  Child waiter([&] {
    const Driver& cuda = start();
    words.enroll();
    const Stream stream = make_stream();
    CHECK(cuda.cuStreamWaitValue64(stream, words.address(0), 1, WaitGeq) == Success);
    CHECK_FALSE(done(stream));
    link.right().say(2);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(words.load(0) == 7);
  });
  CHECK(link.right().hear() == 1);
  CHECK(link.left().hear() == 2);
  writer.kill();
  words.store(0, 7); // the test program itself is the third process
  waiter.finish();
}

TEST_CASE("S9: seven pending waits of a context are fine, with eight nothing else runs") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    Words words;
    words.enroll();
    std::vector<Stream> waiting;
    const auto add_wait = [&] {
      waiting.push_back(make_stream());
      CHECK(cuda.cuStreamWaitValue64(waiting.back(), words.address(waiting.size()), 1, WaitEq) == Success);
    };
    for (int count = 0; count < 7; ++count) add_wait();
    const Stream fresh = make_stream();
    CHECK(cuda.stream_delay(fresh, 0) == Success);
    CHECK(cuda.cuStreamSynchronize(fresh) == Success);
    add_wait();
    while (cuda.live("waits") != 8) std::this_thread::yield();
    const Stream stuck = make_stream();
    CHECK(cuda.cuStreamWriteValue64(stuck, words.address(100), 1, 0) == Success);
    CHECK(cuda.cuStreamWriteValue64(fresh, words.address(101), 1, 0) == Success);
    Context other = nullptr; // its work shows that time passes
    CHECK(cuda.cuCtxCreate(&other, 0, 0) == Success);
    CHECK(cuda.stream_delay(nullptr, 20'000) == Success);
    CHECK(cuda.cuCtxSynchronize() == Success);
    CHECK(cuda.cuCtxDestroy(other) == Success);
    CHECK(words.load(100) + words.load(101) == 0);
    words.store(3, 1);
    CHECK(cuda.cuStreamSynchronize(stuck) == Success);
    CHECK(cuda.cuStreamSynchronize(fresh) == Success);
    for (std::size_t index = 0; index <= waiting.size(); ++index) words.store(index, 1);
    CHECK(cuda.cuCtxSynchronize() == Success);
  });
}

TEST_CASE("S10: cuMemFree and unregistering stand behind a pending wait; the other calls do not") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    Words words;
    words.enroll();
    const Stream stream = make_stream();
    DevicePtr device = 0;
    REQUIRE(cuda.cuMemAlloc(&device, 64) == Success);
    CHECK(cuda.cuStreamWaitValue64(stream, words.address(0), 1, WaitEq) == Success);
    DevicePtr more = 0;
    CHECK(cuda.cuMemAlloc(&more, 64) == Success);
    const MemHandle handle = create_chunk(2 * kMiB);
    unmap_chunk(map_chunk(handle, 2 * kMiB), 2 * kMiB);
    CHECK(cuda.cuMemRelease(handle) == Success);
    CHECK(cuda.cuStreamDestroy(make_stream()) == Success);
    Context context = nullptr;
    REQUIRE(cuda.cuCtxGetCurrent(&context) == Success);
    std::atomic<int> returned{0};
    std::vector<std::thread> blocked;
    const auto call_in_thread = [&](const char* name, const std::function<CuResult()>& call) {
      blocked.emplace_back([&, call] {
        REQUIRE(cuda.cuCtxPushCurrent(context) == Success);
        CHECK(call() == Success);
        ++returned;
      });
      while (cuda.calls(name) == 0) std::this_thread::yield();
    };
    Words other;
    other.enroll();
    void* pinned = nullptr;
    REQUIRE(cuda.cuMemAllocHost(&pinned, 64) == Success);
    call_in_thread("cuMemFree", [&] { return cuda.cuMemFree(device); });
    call_in_thread("cuMemHostUnregister", [&] { return cuda.cuMemHostUnregister(other.page()); });
    call_in_thread("cuMemFreeHost", [&] { return cuda.cuMemFreeHost(pinned); });
    CHECK(returned.load() == 0);
    CHECK(cuda.live("allocations") + cuda.live("host") == 5);
    words.store(0, 1);
    for (std::thread& thread : blocked) thread.join();
    CHECK(cuda.live("allocations") + cuda.live("host") == 2);
  });
}

TEST_CASE("a word in memory unmapped under a pending wait is a fault") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const DevicePtr address = map_chunk(create_chunk(2 * kMiB), 2 * kMiB);
    const Stream stream = make_stream();
    CHECK(cuda.cuStreamWaitValue64(stream, address, 1, WaitEq) == Success);
    unmap_chunk(address, 2 * kMiB);
    CHECK(cuda.cuStreamSynchronize(stream) == IllegalAddress);
  });
}

TEST_CASE("a word written to a mapping that is only readable is a fault that shows late") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const DevicePtr address = map_chunk(create_chunk(2 * kMiB), 2 * kMiB, AccessRead);
    const Stream stream = make_stream();
    CHECK(cuda.cuStreamWaitValue64(stream, address, 0, WaitEq) == Success);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(cuda.cuStreamWriteValue64(stream, address, 1, 0) == Success);
    CHECK(cuda.cuStreamSynchronize(stream) == LaunchFailed);
  });
}
