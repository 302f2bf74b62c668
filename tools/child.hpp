// SPDX-License-Identifier: MIT
//
// A worker process: this very program, executed again with other arguments, or a command; it inherits one descriptor.
#pragma once

#include "wait.hpp"

#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

namespace gpuloan::tool {

class Child {
 public:
  Child() noexcept = default;
  // The descriptor `fd` (borrowed) appears in the child as kInheritedFd; nothing else is inherited but stdin, stdout
  // and stderr.
  static constexpr int kInheritedFd = 3;
  [[nodiscard]] static Child start(const std::vector<std::string>& arguments, int fd);
  // The same with a command for the shell, whose stdout is our stderr. It is killed with what it has started.
  [[nodiscard]] static Child start_command(const std::string& command, int fd);
  Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, 0)), group_(other.group_), status_(other.status_) {}
  Child& operator=(Child&& other) noexcept;
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() { end(); } // kills it if it still runs

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  // True once it has ended; looks only.
  [[nodiscard]] bool ended();
  // Waits until the deadline; false where it still runs.
  bool wait_for(const Deadline& deadline);
  // The same, then kills it.
  void wait(const Deadline& deadline);
  void end() noexcept;
  // "exited with code 3", "was killed by signal 9 (Killed)"; after ended() was true.
  [[nodiscard]] std::string status_text() const;
  [[nodiscard]] int exit_code() const noexcept; // -1: of a signal, or not ended
  [[nodiscard]] bool succeeded() const noexcept { return status_ == 0; }

 private:
  [[nodiscard]] static Child spawn(const char* program, std::vector<std::string> words, int fd, bool apart);
  pid_t pid_ = 0;
  bool group_ = false; // it leads a process group
  std::optional<int> status_; // as waitpid gave it
};

} // namespace gpuloan::tool
