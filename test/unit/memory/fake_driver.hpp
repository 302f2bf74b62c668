// SPDX-License-Identifier: MIT
//
// A driver of the test's own, in process and without time: it only keeps books. Every call is counted, the k-th one can be
// made to fail, streams are busy until the test says otherwise. Nothing is behind its addresses; descriptors are real, so
// that counting them means something.
#pragma once

#include <driver/gpu.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace fake {

using namespace gpuloan::cuda;

struct FakeStream {
  bool valid = true;
  int capture = CaptureNone;
  std::uint64_t queued = 0, done = 0; // operations
  int touched_in_capture = 0;         // calls that would have invalidated it
};

struct FakeEvent {
  FakeStream* stream = nullptr;
  std::uint64_t behind = 0;
};

struct State {
  std::recursive_mutex mutex;
  std::uint64_t total = std::uint64_t{8} << 30, used = 0;
  std::size_t granularity = 2U << 20;
  bool vmm = true, host_register = true;
  // The fail_at-th call from now returns fail_code; 0: none. Calls that give things back do not fail.
  std::uint64_t fail_at = 0;
  CuResult fail_code = OutOfMemory;
  std::string failed; // the function that did
  std::map<std::string, std::uint64_t> calls;
  std::uint64_t total_calls = 0;
  Context current = nullptr;
  std::map<MemHandle, std::size_t> handles;             // physical memory
  std::map<MemHandle, int> references;                  // handle and mappings
  std::map<DevicePtr, std::size_t> reserved;
  std::map<DevicePtr, MemHandle> mapped;
  std::set<void*> registered;
  std::set<FakeEvent*> events;
  std::uint64_t next = 1;
  FakeStream legacy;

  [[nodiscard]] bool empty() const {
    return handles.empty() && references.empty() && reserved.empty() && mapped.empty() && registered.empty() &&
           events.empty() && used == 0;
  }
};

// A fresh one for each test; the functions of the table work on it.
[[nodiscard]] State& state();
void reset();

[[nodiscard]] std::shared_ptr<gpuloan::driver::Gpu> open_gpu();
[[nodiscard]] inline Stream handle_of(FakeStream& stream) { return reinterpret_cast<Stream>(&stream); }
// Driver calls since the fake was reset, without those that enter and leave a context.
[[nodiscard]] std::uint64_t calls();
[[nodiscard]] std::uint64_t calls(const std::string& function);

// Entries of /proc/self/fd.
[[nodiscard]] std::size_t open_fds();

} // namespace fake
