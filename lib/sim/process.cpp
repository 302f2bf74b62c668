// SPDX-License-Identifier: MIT
//
// Start-up happens once. A failed one may be tried again, as with a real driver.
#include <sim/api.hpp>
#include <sim/config.hpp>
#include <sim/process.hpp>
#include <sim/state_file.hpp>

#include <atomic>
#include <mutex>
#include <pthread.h>

namespace gpuloan::sim {
namespace {

enum class Stage { Fresh, Initialised, ShutDown, ForkedChild };
std::atomic<Stage> stage{Stage::Fresh};

void in_child() {
  if (stage.load(std::memory_order_relaxed) != Stage::Fresh) stage.store(Stage::ForkedChild, std::memory_order_relaxed);
}

CuResult initialise() {
  const Config& settings = config();
  if (!settings.valid) return InvalidValue;
  if (settings.init_result.value_or(Success) != Success) return *settings.init_result;
  if (settings.visible.empty()) return NoDevice;
  if (const CuResult result = StateFile::open(settings.state_path)) return result;
  ::pthread_atfork(nullptr, nullptr, in_child);
  stage.store(Stage::Initialised, std::memory_order_release);
  return Success;
}

} // namespace

CuResult process_state() noexcept {
  switch (stage.load(std::memory_order_acquire)) {
    case Stage::Initialised: return Success;
    case Stage::ShutDown: return Deinitialized;
    case Stage::Fresh:
    case Stage::ForkedChild: break;
  }
  return NotInitialized;
}

bool forked_since_init() noexcept { return stage.load(std::memory_order_acquire) == Stage::ForkedChild; }

void deinitialize() noexcept { stage.store(Stage::ShutDown, std::memory_order_release); }

namespace api {

CuResult cuInit(unsigned flags) {
  if (flags != 0) return InvalidValue;
  if (forked_since_init()) return NotInitialized;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  switch (stage.load(std::memory_order_acquire)) {
    case Stage::Initialised: return Success;
    case Stage::ShutDown: return Deinitialized;
    case Stage::ForkedChild: return NotInitialized;
    case Stage::Fresh: break;
  }
  return initialise();
}

CuResult cuDriverGetVersion(int* version) {
  if (version == nullptr) return InvalidValue;
  *version = config().version;
  return Success;
}

} // namespace api
} // namespace gpuloan::sim
