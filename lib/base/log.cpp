// SPDX-License-Identifier: MIT
//
// The sink is read under a lock so that log_set() may run while other threads log; a sink must not call back into
// gpuloan_log_set.
#include <base/log.hpp>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <pthread.h>
#include <string>
#include <unistd.h>

namespace gpuloan {
namespace {

struct Sink {
  std::mutex mutex;
  gpuloan_log_function function = nullptr;
  void* user = nullptr;
};

Sink& sink() {
  static Sink* const instance = new Sink; // never destroyed: loop threads may log while the process exits
  // A thread that a forked child does not have may have been logging.
  [[maybe_unused]] static const int renewed = ::pthread_atfork(nullptr, nullptr, [] { new (&instance->mutex) std::mutex; });
  return *instance;
}

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
  Sink& target = sink();
  const std::lock_guard lock(target.mutex);
  target.function = function;
  target.user = user;
  threshold().store(level, std::memory_order_relaxed);
}

bool log_enabled(gpuloan_log_level level) noexcept {
  return level != GPULOAN_LOG_OFF && level <= threshold().load(std::memory_order_relaxed);
}

void log_line(gpuloan_log_level level, std::string_view text) noexcept {
  Sink& target = sink();
  const std::lock_guard lock(target.mutex);
  try {
    const std::string line(text);
    if (target.function != nullptr) {
      target.function(target.user, level, line.c_str());
    } else {
      std::fprintf(stderr, "gpuloan[%d] %s: %s\n", static_cast<int>(::getpid()), kNames[level], line.c_str());
    }
  } catch (...) { // out of memory: a log line may be lost, the caller's work may not
  }
}

} // namespace gpuloan
