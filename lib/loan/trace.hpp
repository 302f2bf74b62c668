// SPDX-License-Identifier: MIT
//
// Trace: the eight steps of every loan that ends, in a file for Perfetto, chrome://tracing or a script. GPULOAN_TRACE names it; the
// exporters of all processes that have the variable write the same one.
#pragma once

#include <loan/loan.hpp>

namespace gpuloan::loan {

class Trace {
 public:
  // Null where GPULOAN_TRACE is not set, or its file cannot be opened: a line in the log says why. Asked once per process.
  [[nodiscard]] static const Trace* get() noexcept;
  // The exporter's loan has ended. `peer` is who borrowed it; a line of the file, written at once. Where there is no memory for the line, or
  // the file takes no more, it is lost.
  void ended(const Loan& loan, pid_t peer) const noexcept;

 private:
  explicit Trace(int fd) noexcept : fd_(fd) {}
  int fd_; // until the process ends
};

} // namespace gpuloan::loan
