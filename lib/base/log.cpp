// SPDX-License-Identifier: MIT
//
// The sink is read under a lock so that log_set() may run while other threads log; a sink must not call back into
// gpuloan_log_set.
#include <base/log.hpp>

#include <base/process_wide.hpp>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unistd.h>

namespace gpuloan {
namespace {

struct SinkLock {
  std::mutex mutex;
};

constinit struct {
  gpuloan_log_function function = nullptr;
  void* user = nullptr;
} sink;

constexpr const char* kNames[] = {"off", "error", "warning", "info", "debug"};

int level_from_environment() noexcept {
  const char* text = std::getenv("GPULOAN_LOG");
  if (text == nullptr) return GPULOAN_LOG_OFF;
  for (int level = GPULOAN_LOG_OFF; level <= GPULOAN_LOG_DEBUG; ++level) {
    if (std::strcmp(text, kNames[level]) == 0) return level;
  }
  return GPULOAN_LOG_OFF;
}

std::atomic<int>& threshold() {
  static std::atomic<int> level{level_from_environment()};
  return level;
}

} // namespace

void log_set(gpuloan_log_function function, void* user, gpuloan_log_level level) noexcept {
  const std::lock_guard lock(process_wide<SinkLock>().mutex);
  sink.function = function;
  sink.user = user;
  threshold().store(level, std::memory_order_relaxed);
}

bool log_enabled(gpuloan_log_level level) noexcept {
  return level != GPULOAN_LOG_OFF && level <= threshold().load(std::memory_order_relaxed);
}

void log_line(gpuloan_log_level level, std::string_view text) noexcept {
  const std::lock_guard lock(process_wide<SinkLock>().mutex);
  try {
    const std::string line(text);
    if (sink.function != nullptr) {
      sink.function(sink.user, level, line.c_str());
    } else {
      std::fprintf(stderr, "gpuloan[%d] %s: %s\n", static_cast<int>(::getpid()), kNames[level], line.c_str());
    }
  } catch (...) { // out of memory: a log line may be lost, the caller's work may not
  }
}

} // namespace gpuloan
