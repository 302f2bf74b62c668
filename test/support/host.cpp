// SPDX-License-Identifier: MIT
#include "host.hpp"

#include "check.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

extern char** environ;

// ThreadSanitizer of GCC 12 takes the size of a dlopen'ed library's thread-local block from the wrong place and gives up.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() { return "intercept_tls_get_addr=0"; }

namespace loan_test {
namespace {

std::array<char, 160> watched = {};

void on_alarm(int) {
  constexpr std::string_view kText = "watchdog: this took too long: ";
  static_cast<void>(!::write(STDOUT_FILENO, "not ok - ", 9));
  static_cast<void>(!::write(STDOUT_FILENO, kText.data(), kText.size()));
  static_cast<void>(!::write(STDOUT_FILENO, watched.data(), std::strlen(watched.data())));
  static_cast<void>(!::write(STDOUT_FILENO, "\n", 1));
  ::_exit(3);
}

bool traced() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("TracerPid:")) return line.find_first_of("123456789") != std::string::npos;
  }
  return false;
}

std::string errno_text(const char* call) { return std::string(call) + ": " + std::strerror(errno); }

} // namespace

// ---- Descriptors --------------------------------------------------------------------------------------------------

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int Fd::release() noexcept { return std::exchange(fd_, -1); }

void Fd::reset() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

SocketPair make_socketpair() {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) fail(errno_text("socketpair"));
  return {Fd(ends[0]), Fd(ends[1])};
}

std::set<std::string> open_fds() {
  std::set<std::string> found;
  DIR* folder = ::opendir("/proc/self/fd");
  expect(folder != nullptr, "no /proc/self/fd");
  while (const dirent* entry = ::readdir(folder)) {
    if (entry->d_name[0] == '.' || std::atoi(entry->d_name) == ::dirfd(folder)) continue;
    std::array<char, 256> target = {};
    const std::string link = std::string("/proc/self/fd/") + entry->d_name;
    if (::readlink(link.c_str(), target.data(), target.size() - 1) < 0) continue;
    // The driver's own, kept as long as the process lives; the second from the first interprocess event on.
    const std::string_view file(target.data());
    if (file.starts_with("/dev/nvidia") || file.starts_with("/dev/shm/cuda.shm")) continue;
    found.insert(std::string(entry->d_name) + " -> " + target.data());
  }
  ::closedir(folder);
  return found;
}

std::string added(const std::set<std::string>& before, const std::set<std::string>& after) {
  std::string text;
  for (const std::string& entry : after) {
    if (!before.contains(entry)) text += (text.empty() ? "" : ", ") + entry;
  }
  return text;
}

// ---- Folders ------------------------------------------------------------------------------------------------------

TempFolder::TempFolder(const char* name) {
  std::error_code ignored;
  path_ = (std::filesystem::temp_directory_path(ignored) / (std::string(name) + "-XXXXXX")).string();
  if (::mkdtemp(path_.data()) == nullptr) fail(errno_text("mkdtemp"));
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void use_private_sim(const TempFolder& folder) {
  ::setenv("GPULOAN_SIM_STATE", (folder.path() + "/sim").c_str(), 1);
}

// ---- Processes ----------------------------------------------------------------------------------------------------

Process::Process(const std::vector<std::string>& arguments, const std::vector<int>& inherit, int output) {
  std::vector<std::string> copies = {"test"};
  copies.insert(copies.end(), arguments.begin(), arguments.end());
  std::vector<char*> raw;
  for (std::string& text : copies) raw.push_back(text.data());
  raw.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  for (const int fd : inherit) ::posix_spawn_file_actions_adddup2(&actions, fd, fd); // takes close-on-exec off
  if (output >= 0) ::posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  const int result = ::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, raw.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  errno = result;
  if (result != 0) fail(errno_text("posix_spawn"));
}

Process::Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}

Process& Process::operator=(Process&& other) noexcept {
  if (this != &other) {
    kill();
    pid_ = std::exchange(other.pid_, -1);
  }
  return *this;
}

Process::~Process() { kill(); }

void Process::kill() noexcept {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  static_cast<void>(wait());
}

int Process::wait() {
  int status = 0;
  while (pid_ > 0 && ::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void die_with_parent() noexcept { ::prctl(PR_SET_PDEATHSIG, SIGKILL); }

void watchdog(unsigned seconds, const char* what) noexcept {
  std::strncpy(watched.data(), what, watched.size() - 1);
  ::signal(SIGALRM, on_alarm);
  ::alarm(seconds != 0 && traced() ? 0 : seconds);
}

} // namespace loan_test
