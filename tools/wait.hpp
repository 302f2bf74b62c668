// SPDX-License-Identifier: MIT
//
// Waiting that ends: at the deadline of --timeout, and at SIGINT, SIGTERM or SIGHUP, which end the command through its
// destructors so that key files, sockets and unfinished files are removed.
#pragma once

#include "exit_codes.hpp"

#include <gpuloan/gpuloan.hpp>

#include <optional>

namespace gpuloan::tool {

// Blocks nothing: the handler notes the signal, check_interrupted() throws. A signal that is ignored stays ignored.
void install_signal_handlers();
void check_interrupted();

class Deadline {
 public:
  explicit Deadline(std::uint32_t milliseconds)
      : total_ms_(milliseconds), at_(std::chrono::steady_clock::now() + Milliseconds(milliseconds)) {}
  [[nodiscard]] Milliseconds left() const;
  [[nodiscard]] bool passed() const { return left().count() == 0; }
  // At most 100 ms, so that a signal is seen soon.
  [[nodiscard]] Milliseconds slice() const { return std::min(left(), Milliseconds(100)); }
  [[nodiscard]] std::string text() const; // "5 s", as given

 private:
  std::uint32_t total_ms_;
  std::chrono::steady_clock::time_point at_;
};

// Empty at the deadline.
[[nodiscard]] std::optional<Event> next_event(Context& context, const Deadline& deadline);

// Calls wait(slice) until it does not time out. At the deadline: a timeout whose text is `what` and the whole time.
template <typename Wait>
void wait_in_slices(const Deadline& deadline, Wait&& wait, const char* what = "the other side was not done") {
  for (;;) {
    check_interrupted();
    try {
      return wait(deadline.slice());
    } catch (const StatusError& error) {
      if (error.status() != GPULOAN_ERR_TIMEOUT) throw;
      if (deadline.passed()) throw StatusError(GPULOAN_ERR_TIMEOUT, what + (" within " + deadline.text()));
    }
  }
}

// Runs a step of the command; a StatusError from it becomes a Failure whose sentence begins with `what`.
template <typename Step>
auto attempt(const std::string& what, Step&& step) {
  try {
    return step();
  } catch (const StatusError& error) {
    throw Failure(exit_code(error.status()), what + ": " + error.what());
  }
}

} // namespace gpuloan::tool
