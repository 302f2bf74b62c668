// SPDX-License-Identifier: MIT
//
// What a test needs of the operating system: descriptors and who holds which, folders and processes of its own, a
// watchdog. Everything here is closed, removed or reaped by its destructor.
#pragma once

#include <set>
#include <string>
#include <sys/types.h>
#include <vector>

namespace loan_test {

class Fd {
 public:
  Fd() noexcept = default;
  explicit Fd(int fd) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }
  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] int release() noexcept;
  void reset() noexcept;

 private:
  int fd_ = -1;
};

struct SocketPair {
  Fd left, right; // SOCK_SEQPACKET, close-on-exec
};
[[nodiscard]] SocketPair make_socketpair();

// The open descriptors of this process as "number -> target", without the real driver's own (/dev/nvidia...), which it
// opens when it likes.
[[nodiscard]] std::set<std::string> open_fds();
// What is in `after` and not in `before`; "" for nothing.
[[nodiscard]] std::string added(const std::set<std::string>& before, const std::set<std::string>& after);

// A folder of its own, removed with all that lies in it.
class TempFolder {
 public:
  explicit TempFolder(const char* name);
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder();
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

// Gives this process and its children a simulated machine of their own: the accounting of its devices in `folder`.
void use_private_sim(const TempFolder& folder);

// A child process that runs this program again with `arguments`. `inherit` are the descriptors that it gets under the
// same numbers; everything else is close-on-exec.
class Process {
 public:
  Process() noexcept = default;
  Process(const std::vector<std::string>& arguments, const std::vector<int>& inherit, int output = -1);
  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  ~Process();
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  void kill() noexcept;     // SIGKILL, and reaps it
  [[nodiscard]] int wait(); // the exit status, or 128 + signal

 private:
  pid_t pid_ = -1;
};

// In a child: ends with its parent, whatever happens.
void die_with_parent() noexcept;

// After `seconds` the process ends with exit status 3 and a line that names `what`; 0 takes it back. Off under a debugger.
void watchdog(unsigned seconds, const char* what) noexcept;

} // namespace loan_test
