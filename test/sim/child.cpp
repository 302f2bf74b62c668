// SPDX-License-Identifier: MIT
#include "child.hpp"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace sim_test {
namespace {

constexpr unsigned kSecondsToLive = 60; // of a child: then it hangs, which is a failure

std::atomic<bool> check_failed{false}; // threads of a test check too

// The only public way to learn of a failed check.
struct FailureListener : doctest::IReporter {
  explicit FailureListener(const doctest::ContextOptions&) {}
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_start(const doctest::TestCaseData&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_exception(const doctest::TestCaseException&) override { check_failed = true; }
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData& data) override {
    if (data.m_failed) check_failed = true;
  }
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};
REGISTER_LISTENER("failures", 1, FailureListener);

void write_all(int fd, const void* data, std::size_t size) {
  REQUIRE(::send(fd, data, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size));
}

} // namespace

Machine::Machine() {
  std::string pattern = std::string(std::getenv("TMPDIR") != nullptr ? std::getenv("TMPDIR") : "/tmp") + "/simXXXXXX";
  REQUIRE(::mkdtemp(pattern.data()) != nullptr);
  directory_ = pattern;
  state_ = directory_ + "/state";
  for (const char* variable :
       {"GPULOAN_SIM_DEVICES", "GPULOAN_SIM_MEMORY_MIB", "GPULOAN_SIM_LAG_US", "GPULOAN_SIM_FAIL", "GPULOAN_SIM_IMPORT_LIMIT_MIB",
        "GPULOAN_SIM_WITHOUT", "GPULOAN_SIM_INIT_RESULT", "GPULOAN_SIM_VERSION", "GPULOAN_SIM_MPS",
        "GPULOAN_SIM_MIG", "GPULOAN_SIM_PEERS", "GPULOAN_SIM_COMPUTE_MODE",
        "CUDA_VISIBLE_DEVICES"}) {
    ::unsetenv(variable);
  }
  set("GPULOAN_SIM_STATE", state_.c_str());
}

Machine::~Machine() {
  ::unlink(state_.c_str());
  ::rmdir(directory_.c_str());
}

Machine& Machine::set(const char* variable, const char* value) {
  REQUIRE(::setenv(variable, value, 1) == 0);
  return *this;
}

Link::Link() { REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds_) == 0); }

Link::~Link() {
  ::close(fds_[0]);
  ::close(fds_[1]);
}

void Link::End::say(std::uint64_t word) const { send_bytes(&word, sizeof word); }

std::uint64_t Link::End::hear() const {
  std::uint64_t word = 0;
  receive_bytes(&word, sizeof word);
  return word;
}

void Link::End::send_bytes(const void* data, std::size_t size) const { write_all(fd_, data, size); }

void Link::End::receive_bytes(void* data, std::size_t size) const {
  REQUIRE(::recv(fd_, data, size, 0) == static_cast<ssize_t>(size));
}

void Link::End::send_fd(int fd) const {
  char byte = 0;
  iovec part = {&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  REQUIRE(::sendmsg(fd_, &message, MSG_NOSIGNAL) == 1);
}

int Link::End::receive_fd() const {
  char byte = 0;
  iovec part = {&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  REQUIRE(::recvmsg(fd_, &message, MSG_CMSG_CLOEXEC) == 1);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  REQUIRE(header != nullptr);
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return fd;
}

Child::Child(const std::function<void()>& body) {
  std::cout.flush();
  std::fflush(nullptr);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  REQUIRE(pid_ >= 0);
  if (pid_ > 0) return;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  ::alarm(kSecondsToLive);
  check_failed = false;
  try {
    body();
  } catch (...) { // a failed REQUIRE, already reported
    check_failed = true;
  }
  std::cout.flush();
  std::exit(check_failed ? 1 : 0); // not _exit: leaks are looked for, and a driver must survive the process's end
}

Child::~Child() {
  if (pid_ > 0) kill();
}

void Child::finish() {
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  CHECK_MESSAGE((WIFEXITED(status) && WEXITSTATUS(status) == 0), "the child's wait status is ", status);
}

void Child::kill() {
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
}

pid_t fork_sleeper() {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child > 0) return child;
  ::alarm(kSecondsToLive);
  ::pause();
  ::_exit(0);
}

void kill_process(pid_t pid) {
  const int handle = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  REQUIRE(handle >= 0);
  REQUIRE(::kill(pid, SIGKILL) == 0);
  pollfd gone = {handle, POLLIN, 0};
  CHECK(::poll(&gone, 1, -1) == 1); // readable once the process is a zombie: it has closed everything by then
  ::close(handle);
}

int open_fds() {
  int count = -1; // that of the directory itself
  const auto files = std::filesystem::directory_iterator("/proc/self/fd");
  for (auto file = begin(files); file != end(files); ++file) ++count;
  return count;
}

void in_child(const std::function<void()>& body) { Child(body).finish(); }

} // namespace sim_test
