// SPDX-License-Identifier: MIT
#include "child.hpp"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <spawn.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace gpuloan::tool {

Child Child::start(const std::vector<std::string>& arguments, int fd) {
  std::vector<std::string> words = arguments;
  words.insert(words.begin(), "gpuloan");
  return spawn("/proc/self/exe", std::move(words), fd, false);
}

Child Child::start_command(const std::string& command, int fd) { return spawn("/bin/sh", {"sh", "-c", command}, fd, true); }

Child Child::spawn(const char* program, std::vector<std::string> words, int fd, bool apart) {
  std::vector<char*> pointers;
  for (std::string& argument : words) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  // dup2 onto the same number also clears close-on-exec (glibc 2.29).
  int code = ::posix_spawn_file_actions_adddup2(&actions, fd, kInheritedFd);
  if (code == 0 && apart) code = ::posix_spawn_file_actions_adddup2(&actions, 2, 1);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  if (apart) ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP); // a group of its own
  Child child;
  child.group_ = apart;
  if (code == 0) code = ::posix_spawn(&child.pid_, program, &actions, &attributes, pointers.data(), environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  if (code != 0) throw Failure(ExitSystem, std::string("cannot start a worker: posix_spawn: ") + std::strerror(code));
  return child;
}

Child& Child::operator=(Child&& other) noexcept {
  if (this != &other) {
    end();
    pid_ = std::exchange(other.pid_, 0);
    group_ = other.group_;
    status_ = other.status_;
  }
  return *this;
}

bool Child::ended() {
  if (pid_ == 0 || status_.has_value()) return true;
  int status = 0;
  if (::waitpid(pid_, &status, WNOHANG) == pid_) status_ = status;
  return status_.has_value();
}

bool Child::wait_for(const Deadline& deadline) {
  while (!ended() && !deadline.passed()) std::this_thread::sleep_for(Milliseconds(1));
  return ended();
}

void Child::wait(const Deadline& deadline) {
  wait_for(deadline);
  end();
}

void Child::end() noexcept {
  if (pid_ == 0 || status_.has_value()) return;
  ::kill(group_ ? -pid_ : pid_, SIGKILL);
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {}
  status_ = status;
}

int Child::exit_code() const noexcept { return status_ && WIFEXITED(*status_) ? WEXITSTATUS(*status_) : -1; }

std::string Child::status_text() const {
  const int status = status_.value_or(0);
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return "was killed by signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
  }
  return "exited with code " + std::to_string(WEXITSTATUS(status));
}

} // namespace gpuloan::tool
