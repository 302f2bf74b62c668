// SPDX-License-Identifier: MIT
//
// forbidden_test WHAT PROGRAM [ARGUMENT]...: takes io_uring away from this process and its children, sees that a context with the
// engine AUTO takes epoll and says why, and becomes PROGRAM, which has to pass as if nothing had happened (with --engine auto).
//
// WHAT is CALL:ERROR for a seccomp filter (io_uring_setup:EPERM), or "memlock": no locked memory, as an ordinary user. Exit status 77
// where that cannot be arranged.
#include "../support/check.hpp"

#include <cerrno>
#include <cstdio>
#include <grp.h>
#include <seccomp.h>
#include <sys/resource.h>
#include <unistd.h>

namespace loan_test {
namespace {

void filter(const std::string& call, int error) {
  const scmp_filter_ctx made = ::seccomp_init(SCMP_ACT_ALLOW);
  expect(made != nullptr, "seccomp_init");
  expect(::seccomp_rule_add(made, SCMP_ACT_ERRNO(static_cast<unsigned>(error)), ::seccomp_syscall_resolve_name(call.c_str()), 0) == 0, "seccomp_rule_add");
  if (::seccomp_load(made) != 0) throw Skip{"no seccomp filter can be loaded here"};
  ::seccomp_release(made);
}

void lock_nothing(const char* program) {
  constexpr unsigned kNobody = 65534;
  if (::geteuid() != 0) throw Skip{"only root becomes another user"};
  const rlimit none = {0, 0};
  expect(::setrlimit(RLIMIT_MEMLOCK, &none) == 0, "setrlimit");
  expect(::setgroups(0, nullptr) == 0 && ::setresgid(kNobody, kNobody, kNobody) == 0 && ::setresuid(kNobody, kNobody, kNobody) == 0, "setresuid");
  if (::access(program, X_OK) != 0) throw Skip{std::string("another user cannot run ") + program};
}

// The reason that a context gives for epoll.
std::string reason_for_epoll() {
  auto options = init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_EXPORTER;
  options.flags = GPULOAN_CONTEXT_NO_DEVICE;
  gpuloan_context* context = nullptr;
  expect_ok(gpuloan_context_create(&options, &context), "gpuloan_context_create");
  auto stats = init<gpuloan_stats>();
  expect_ok(gpuloan_context_stats(context, &stats), "gpuloan_context_stats");
  gpuloan_context_destroy(context);
  if (stats.engine == GPULOAN_ENGINE_IO_URING) return "";
  return stats.engine_reason;
}

int run(int count, char** words) {
  expect(count > 2, "WHAT and PROGRAM are missing");
  const std::string what = words[1];
  const std::size_t colon = what.find(':');
  const std::string error = colon == std::string::npos ? "" : what.substr(colon + 1);
  if (what == "memlock") lock_nothing(words[2]);
  else if (error == "EPERM" || error == "ENOSYS") filter(what.substr(0, colon), error == "EPERM" ? EPERM : ENOSYS);
  else fail("'" + what + "' is neither memlock nor CALL:EPERM nor CALL:ENOSYS");
  {
    const std::string reason = reason_for_epoll();
    std::printf("# engine: %s\n", reason.empty() ? "io_uring" : reason.c_str());
    if (reason.empty() && what == "memlock") throw Skip{"this kernel charges io_uring to no limit of locked memory"}; // Linux 5.12 and newer
    expect_contains(reason, "epoll: io_uring", "the reason for epoll");
    expect_contains(reason, error, "the reason for epoll");
  }
  std::fflush(stdout);
  ::execv(words[2], words + 2);
  fail(std::string("cannot start ") + words[2]);
}

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
