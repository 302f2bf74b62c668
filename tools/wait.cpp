// SPDX-License-Identifier: MIT
#include "wait.hpp"

#include <atomic>
#include <csignal>
#include <cstdio>

namespace gpuloan::tool {
namespace {

std::atomic<int> caught_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler stores to it");

void note_signal(int signal) { caught_signal.store(signal, std::memory_order_relaxed); }

} // namespace

void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_handler = note_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND); // a second signal ends the process at once
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before = {};
    if (::sigaction(signal, nullptr, &before) == 0 && before.sa_handler == SIG_IGN) continue; // as nohup and '&' start it
    ::sigaction(signal, &action, nullptr);
  }
  ::signal(SIGPIPE, SIG_IGN); // a closed pipe is an error of write()
}

void check_interrupted() {
  if (const int signal = caught_signal.load(std::memory_order_relaxed); signal != 0) {
    throw Failure(ExitInterrupted + signal, "interrupted by signal " + std::to_string(signal));
  }
}

Milliseconds Deadline::left() const {
  const auto left = std::chrono::ceil<Milliseconds>(at_ - std::chrono::steady_clock::now());
  return std::max(left, Milliseconds(0));
}

std::string Deadline::text() const {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%u.%03u", total_ms_ / 1000, total_ms_ % 1000);
  std::string text = digits;
  text.resize(text.find_last_not_of('0') + 1); // of the fraction: there is a point
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

std::optional<Event> next_event(Context& context, const Deadline& deadline) {
  for (;;) {
    check_interrupted();
    if (auto event = context.next_event(deadline.slice())) return event;
    if (deadline.passed()) return std::nullopt;
  }
}

} // namespace gpuloan::tool
