// SPDX-License-Identifier: MIT
//
// The exit codes of the command: one table, printed by --help and kept equal to gpuloan(1) by a test. Scripts rely on
// them, so numbers never change meaning.
#pragma once

#include <gpuloan/gpuloan.h>

#include <stdexcept>
#include <string>

namespace gpuloan::tool {

enum Exit : int {
  ExitOk = 0,
  ExitLoanFailed = 1,
  ExitUsage = 2,
  ExitTimeout = 3,
  ExitNoDriver = 4,
  ExitPeerLost = 5,
  ExitKeyRefused = 6,
  ExitPathBusy = 7,
  ExitFile = 8,
  ExitUnsupported = 9,
  ExitUidRefused = 10,
  ExitNoListener = 11,
  ExitPathUnusable = 12,
  ExitPeerRefused = 13,
  ExitDeviceMemory = 14,
  ExitSystem = 15,
  ExitInternal = 70,
  ExitInterrupted = 128, // plus the number of the signal
};

struct ExitRow {
  int code;
  const char* name; // in --json
  const char* meaning;
};

inline constexpr ExitRow kExitRows[] = {
    {ExitOk, "ok", "everything was done and checked"},
    {ExitLoanFailed, "loan-failed", "a loan failed, or the bytes that came back are not the bytes that were sent"},
    {ExitUsage, "usage", "the command line is wrong"},
    {ExitTimeout, "timeout", "the time given by --timeout passed: the peer never came, or did not finish"},
    {ExitNoDriver, "no-driver", "no usable driver or device"},
    {ExitPeerLost, "peer-lost", "the other process died or closed its connection"},
    {ExitKeyRefused, "key-refused", "the key is wrong, spent, malformed or missing"},
    {ExitPathBusy, "path-busy", "somebody already listens at the socket path"},
    {ExitFile, "file", "a file is missing, unreadable or unwritable"},
    {ExitUnsupported, "unsupported", "no allowed rung, gate or engine can do it on this machine"},
    {ExitUidRefused, "uid-refused", "the two processes run as different users"},
    {ExitNoListener, "no-listener", "nobody listened at the socket path within the timeout"},
    {ExitPathUnusable, "path-unusable", "the socket path or the inherited FD is unusable"},
    {ExitPeerRefused, "peer-refused", "the two sides do not fit: version, host, device, or a broken protocol"},
    {ExitDeviceMemory, "device-memory", "not enough device memory"},
    {ExitSystem, "system", "a system call failed, or host memory or file descriptors ran out"},
    {ExitInternal, "internal", "a bug in gpuloan; please report the sentence"},
    {ExitInterrupted, "interrupted", "plus N: ended by signal N"},
};

[[nodiscard]] const char* exit_name(int code) noexcept;
// The code that a status of the library leads to.
[[nodiscard]] int exit_code(gpuloan_status status) noexcept;

// Ends the command: `code` is its exit code, what() the sentence after "gpuloan lend: ".
class Failure : public std::runtime_error {
 public:
  Failure(int code, const std::string& text) : std::runtime_error(text), code_(code) {}
  [[nodiscard]] int code() const noexcept { return code_; }

 private:
  int code_;
};

} // namespace gpuloan::tool
