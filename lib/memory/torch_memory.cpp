// SPDX-License-Identifier: MIT
//
// A block is live, then aside while the work of the stream that it was freed in may still use it, then destroyed. Every call sweeps
// what is aside, so a block that was busy for too long comes back with a later one. cudaFree would wait for the whole
// device; cuMemUnmap waits for nothing (R22). Asking the stream and nothing else is what is right in a graph capture too:
// synchronising the context would end it.
//
// One lock for everything, held for driver calls that do not wait (S10); blocks are destroyed after it is released, since the
// last one of a device gives its primary context back.
#include <memory/torch_memory.hpp>

#include <base/clock.hpp>
#include <base/log.hpp>
#include <memory/arena_streams.hpp>
#include <memory/pointer_kind.hpp>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>

namespace gpuloan::memory {
namespace {

using Progress = StreamUses::Progress;

constexpr std::uint32_t kPatienceMs = 1000;
constexpr std::chrono::microseconds kFirstPause{20}, kLongestPause{1000};

struct Block {
  std::shared_ptr<driver::Gpu> gpu;
  driver::VmmHandle memory;
  driver::VmmMapping mapping;
  StreamUses uses = {};
  cuda::Stream freed_in = nullptr;
  Progress progress = Progress::Waiting;
  bool given_up = false; // whoever freed it waits no longer
};
using Blocks = std::map<cuda::DevicePtr, Block>; // nodes move between them, so that giving back needs no memory

struct State {
  std::mutex mutex;
  std::map<std::pair<const driver::Driver*, int>, std::weak_ptr<driver::Gpu>> gpus;
  Blocks live, aside;
};

State& state() {
  static auto* instance = new State; // never destroyed: the driver may be gone by then
  return *instance;
}

// With the lock: moves what has passed to `done`, for the caller to destroy without it.
void sweep(Blocks& done) {
  Blocks& aside = state().aside;
  for (auto at = aside.begin(); at != aside.end();) {
    const auto block = at++;
    EventPool events(block->second.gpu);
    block->second.progress = block->second.uses.settle(*block->second.gpu, events);
    if (block->second.progress == Progress::Passed) done.insert(aside.extract(block));
  }
}

Result<std::shared_ptr<driver::Gpu>> gpu_of(const std::shared_ptr<const driver::Driver>& driver, int ordinal) {
  const std::lock_guard lock(state().mutex);
  std::weak_ptr<driver::Gpu>& known = state().gpus[{driver.get(), ordinal}];
  if (auto gpu = known.lock()) return gpu;
  auto gpu = driver::Gpu::open_primary(driver, ordinal);
  if (gpu) known = *gpu;
  return gpu;
}

} // namespace

Result<cuda::DevicePtr> torch_allocate(const std::shared_ptr<const driver::Driver>& driver, std::size_t bytes, int ordinal) {
  auto gpu = gpu_of(driver, ordinal);
  if (!gpu) return forward(std::move(gpu.error()));
  const driver::Floors& floors = (*gpu)->floors();
  if (!floors.has(GPULOAN_FLOOR_VMM)) {
    return fail(GPULOAN_ERR_UNSUPPORTED, "device " + std::to_string(ordinal) + " has no VMM memory that can be shared: " + floors.reason);
  }
  if (bytes > floors.total_bytes) {
    return fail(GPULOAN_ERR_DEVICE_MEMORY, std::to_string(bytes) + " bytes are more than device " + std::to_string(ordinal) + " has (" + std::to_string(floors.total_bytes) + ")");
  }
  Blocks done;
  {
    const std::lock_guard lock(state().mutex);
    sweep(done);
  }
  done.clear(); // before it is asked for memory
  auto memory = driver::VmmHandle::create(*gpu, (bytes + floors.granularity - 1) / floors.granularity * floors.granularity);
  if (!memory) return forward(std::move(memory.error()));
  auto mapping = driver::VmmMapping::map(*gpu, *memory, cuda::AccessReadWrite);
  if (!mapping) return forward(std::move(mapping.error()));
  const cuda::DevicePtr pointer = mapping->pointer();
  Block block = {std::move(*gpu), std::move(*memory), std::move(*mapping)};
  const std::lock_guard lock(state().mutex);
  state().live.emplace(pointer, std::move(block));
  return pointer;
}

Result<void> torch_release(cuda::DevicePtr pointer, cuda::Stream stream) {
  Blocks done;
  std::unique_lock lock(state().mutex);
  const auto found = state().live.find(pointer);
  if (found == state().live.end()) {
    return fail(GPULOAN_ERR_INVALID, address_text(pointer) + " is not allocated: gpuloan_torch_malloc did not return it, or it was freed before");
  }
  Block& block = found->second;
  block.uses.note(stream);
  block.freed_in = stream;
  // Once is enough to wait for a stream that is stuck.
  const bool patient = std::none_of(state().aside.begin(), state().aside.end(), [&](const auto& other) {
    return other.second.given_up && other.second.freed_in == stream && other.second.gpu == block.gpu;
  });
  state().aside.insert(state().live.extract(found));
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    sweep(done);
    const auto left = state().aside.find(pointer);
    if (left == state().aside.end()) break;
    Block& busy = left->second;
    if (!patient || deadline.passed() || busy.progress == Progress::Unknown || busy.uses.in_capture(*busy.gpu)) {
      busy.given_up = true;
      GPULOAN_LOG(patient ? GPULOAN_LOG_WARNING : GPULOAN_LOG_DEBUG,
                  "gpuloan_torch_free: the stream's work has not passed, so " + range_text(pointer, busy.memory.bytes()) + " stay mapped until a later call finds that it has");
      break;
    }
    lock.unlock();
    done.clear();
    std::this_thread::sleep_for(pause);
    lock.lock();
  }
  lock.unlock(); // before `done` goes
  return {};
}

} // namespace gpuloan::memory
