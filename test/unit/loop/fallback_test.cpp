// SPDX-License-Identifier: MIT
//
// Machines that forbid io_uring, made with seccomp and RLIMIT_MEMLOCK: AUTO takes epoll and names the step that failed;
// io_uring by name is an error with the same sentence. Each case runs in a forked child, since a filter is for good. The
// parent never tries io_uring itself: its success would be remembered.
#include "support.hpp"

#include <csignal>
#include <grp.h>
#include <seccomp.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace gpuloan;
using namespace gpuloan::loop;

namespace {

// Exit status of `body` in a child, which is killed when it takes too long; -1 when it did not exit.
template <typename Body>
int in_child(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);
    ::_exit(body());
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

bool forbid(const char* call, int error) {
  const scmp_filter_ctx filter = ::seccomp_init(SCMP_ACT_ALLOW);
  if (filter == nullptr) return false;
  const int number = ::seccomp_syscall_resolve_name(call);
  const bool done = ::seccomp_rule_add(filter, SCMP_ACT_ERRNO(static_cast<unsigned>(error)), number, 0) == 0 &&
                    ::seccomp_load(filter) == 0;
  ::seccomp_release(filter);
  return done;
}

// 0: all as it should be. Other numbers say which check failed, since doctest's own would be lost with the child.
int check_falls_back(const char* step, const char* error_name) {
  const auto contains = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  ::unsetenv("GPULOAN_ENGINE");
  const auto choice = make_engine(GPULOAN_ENGINE_AUTO, true);
  if (!choice || choice->engine->kind() != GPULOAN_ENGINE_EPOLL) return 2;
  std::fprintf(stderr, "%s\n", choice->reason.c_str());
  if (!choice->reason.starts_with("epoll: io_uring") || !contains(choice->reason, error_name)) return 3;
  if (!contains(choice->reason, (std::string("step ") + step + ":").c_str())) return 4;

  const auto by_name = make_engine(GPULOAN_ENGINE_IO_URING, true);
  if (by_name || by_name.error().status != GPULOAN_ERR_UNSUPPORTED) return 5;
  if ("epoll: " + by_name.error().text != choice->reason) return 6;

  choice->engine->wake();
  Recorder recorder;
  return choice->engine->wait(kPatience, recorder) ? 0 : 7;
}

struct Filter {
  const char* call;
  const char* step;
};

constexpr int kNotRoot = 77;

} // namespace

// F1, F2
TEST_CASE("io_uring forbidden by a filter") {
  const DescriptorGuard guard;
  const Filter filters[] = {
      {"io_uring_setup", "setup"}, {"io_uring_enter", "enter"}, {"io_uring_register", "register_buf_ring"}};
  for (const Filter& filter : filters) {
    CAPTURE(filter.call);
    CHECK(in_child([&] { return forbid(filter.call, EPERM) ? check_falls_back(filter.step, "EPERM") : 1; }) == 0);
    CHECK(in_child([&] { return forbid(filter.call, ENOSYS) ? check_falls_back(filter.step, "ENOSYS") : 1; }) == 0);
  }
}

TEST_CASE("a filter that came after the self-test") {
  for (const char* call : {"io_uring_setup", "io_uring_enter", "io_uring_register"}) {
    CAPTURE(call);
    CHECK(in_child([&] {
            if (!make_uring() || !forbid(call, EPERM)) return 1;
            const auto choice = make_engine(GPULOAN_ENGINE_AUTO, true);
            return choice && choice->engine->kind() == GPULOAN_ENGINE_EPOLL ? 0 : 2;
          }) == 0);
  }
}

TEST_CASE("no locked memory for an ordinary user") {
  const int status = in_child([] {
    const rlimit none = {0, 0};
    if (::geteuid() != 0 || ::setrlimit(RLIMIT_MEMLOCK, &none) != 0) return kNotRoot;
    if (::setgroups(0, nullptr) != 0 || ::setresgid(65534, 65534, 65534) != 0) return kNotRoot;
    if (::setresuid(65534, 65534, 65534) != 0) return kNotRoot;
    const auto choice = make_engine(GPULOAN_ENGINE_AUTO, true);
    return choice && choice->engine->kind() == GPULOAN_ENGINE_EPOLL ? 0 : 2;
  });
  if (status == kNotRoot) {
    MESSAGE("skipped: needs root to become another user");
  } else {
    CHECK(status == 0);
  }
}

TEST_CASE("no descriptors left: a typed error, and io_uring once there are some") {
  CHECK(in_child([] {
          rlimit before = {};
          if (::getrlimit(RLIMIT_NOFILE, &before) != 0) return 1;
          const rlimit none = {3, before.rlim_max};
          if (::setrlimit(RLIMIT_NOFILE, &none) != 0) return 2;
          const auto choice = make_engine(GPULOAN_ENGINE_AUTO, true);
          if (choice || choice.error().status != GPULOAN_ERR_FD_LIMIT) return 3;
          if (::setrlimit(RLIMIT_NOFILE, &before) != 0) return 4;
          const auto again = make_engine(GPULOAN_ENGINE_AUTO, true);
          return again && again->engine->kind() == GPULOAN_ENGINE_IO_URING ? 0 : 5;
        }) == 0);
}

int main(int argc, char** argv) {
  const int available = in_child([] {
    const auto ring = make_uring();
    if (!ring) std::fprintf(stderr, "skipped: %s\n", ring.error().text.c_str());
    return ring ? 0 : 1;
  });
  if (available != 0) return 77;
  return doctest::Context(argc, argv).run();
}
