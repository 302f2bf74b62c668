// SPDX-License-Identifier: MIT
//
// Processes of a test. The test program itself makes no driver call: each test case starts children, which do, so that
// every one has a driver of its own and its own environment. Checks in a child are ordinary doctest checks; a failed
// one makes the child's exit status 1, which finish() reports.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <sys/types.h>

namespace sim_test {

// A private machine for one test case: a state file in a directory of its own, named in GPULOAN_SIM_STATE. Environment
// variables set through it are restored at its end.
class Machine {
 public:
  Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  ~Machine();
  Machine& set(const char* variable, const char* value);
  [[nodiscard]] const std::string& state() const noexcept { return state_; }

 private:
  std::string directory_;
  std::string state_;
};

// Two connected ends for messages between processes of a test; each process uses one.
class Link {
 public:
  Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  ~Link();

  class End {
   public:
    explicit End(int fd) noexcept : fd_(fd) {}
    void say(std::uint64_t word) const;
    [[nodiscard]] std::uint64_t hear() const;
    void send_bytes(const void* data, std::size_t size) const;
    void receive_bytes(void* data, std::size_t size) const;
    void send_fd(int fd) const; // fd stays open here
    [[nodiscard]] int receive_fd() const;

   private:
    int fd_;
  };
  [[nodiscard]] End left() const noexcept { return End(fds_[0]); }
  [[nodiscard]] End right() const noexcept { return End(fds_[1]); }

 private:
  int fds_[2];
};

class Child {
 public:
  // Forks; the child runs `body` and exits.
  explicit Child(const std::function<void()>& body);
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child();

  void finish(); // waits, and checks that the child ended well
  void kill();   // SIGKILL, and waits until it is gone
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }

 private:
  pid_t pid_;
};

// The calling process's forked child, for tests of what such a child keeps alive. It only sleeps. Returns its id.
[[nodiscard]] pid_t fork_sleeper();
// Kills a process that need not be our child, and returns when all its descriptors and mappings are gone.
void kill_process(pid_t pid);

// Descriptors of this process now.
[[nodiscard]] int open_fds();

// One child from start to end: what most test cases are.
void in_child(const std::function<void()>& body);

} // namespace sim_test
