// SPDX-License-Identifier: MIT
//
// fork and exec. A forked child owns none of its parent's objects: its calls say FORKED and change nothing, and however
// it ends, the parent's loans go on. An exec'ed child inherits no descriptor.
#include "../support/run.hpp"

#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

bool in_forked_child = false;

} // namespace

// The child does not have the threads whose stacks hold its parent's objects, so to LeakSanitizer they are lost.
extern "C" __attribute__((visibility("default"))) int __lsan_is_turned_off() { return in_forked_child ? 1 : 0; }

namespace loan_test {
namespace {

constexpr std::uint64_t kBytes = 70'001;

// Both sides in this process, with a loan that is held and one that is only offered.
struct Scene {
  explicit Scene(const Bench& bench)
      : exporter(bench), worker(bench), peer(exporter.attach(worker)), region(peer, kBytes), upload(bench, region),
        held(lend(bench, peer, region, {})), open(lend(bench, peer, region, {.keep_open = true})), loan(worker.offered(held)), waiting(worker.offered(open)) {
    loan.acquire();
    static_cast<void>(worker.request(kBytes));
    request = exporter.event(GPULOAN_EVENT_REQUEST).request;
  }
  struct Upload {
    Upload(const Bench& bench, const Region& region) { bench.gpu.upload(region.pointer(), kBytes, 1); }
  };
  Exporter exporter;
  Worker worker;
  gpuloan_peer* peer;
  Region region;
  Upload upload;
  Lent held, open;
  Borrowed loan, waiting;
  gpuloan_request* request = nullptr;
};

void finish(const Bench& bench, Scene& scene) {
  scene.loan.check(1);
  scene.loan.done();
  scene.held.ended();
  scene.waiting.acquire();
  scene.waiting.check(1);
  scene.waiting.done();
  scene.open.done();
  expect_ok(gpuloan_reclaim(scene.open, kWaitMs), "gpuloan_reclaim");
  const Granted granted = grant(bench, scene.request, {});
  expect_pattern(bench, scene.region.pointer(), kBytes, 1);
}

void expect_forked(gpuloan_status status, std::string_view what) {
  expect_status(status, GPULOAN_ERR_FORKED, what);
  expect_contains(gpuloan_error_text(), "fork", what);
}

// In the child. Every call that takes an object.
void call_everything(const Scene& scene) {
  gpuloan_context* context = scene.exporter.get();
  auto stats = init<gpuloan_stats>();
  expect_forked(gpuloan_context_stats(context, &stats), "gpuloan_context_stats");
  auto event = init<gpuloan_event>();
  expect_forked(gpuloan_context_next_event(context, 0, &event), "gpuloan_context_next_event");
  expect_forked(gpuloan_context_dispatch(context, 0), "gpuloan_context_dispatch");
  gpuloan_key key = {};
  expect_forked(gpuloan_context_invite(context, nullptr, &key), "gpuloan_context_invite");
  expect_forked(gpuloan_context_listen(context, "/nowhere/at/all"), "gpuloan_context_listen");
  expect_forked(gpuloan_context_attach(context, 0, nullptr), "gpuloan_context_attach");
  SocketPair ends = make_socketpair();
  gpuloan_peer* peer = nullptr;
  expect_forked(gpuloan_context_adopt(context, ends.left.get(), 0, &peer), "gpuloan_context_adopt");
  expect(::fcntl(ends.left.get(), F_GETFD) >= 0, "adopt took a descriptor in a forked child");
  expect(gpuloan_context_fd(context) == -1, "gpuloan_context_fd in a forked child");
  auto info = init<gpuloan_peer_info>();
  expect_forked(gpuloan_peer_info_get(scene.peer, &info), "gpuloan_peer_info_get");
  auto region_options = init<gpuloan_region_options>();
  region_options.access = GPULOAN_ACCESS_READ;
  gpuloan_region* region = nullptr;
  expect_forked(gpuloan_region_create(scene.peer, &region_options, &region), "gpuloan_region_create");
  expect_forked(gpuloan_region_destroy(scene.region.get()), "gpuloan_region_destroy");
  expect_forked(gpuloan_region_used_on(scene.region.get(), nullptr), "gpuloan_region_used_on");
  expect(gpuloan_region_pointer(scene.region.get()) == 0, "gpuloan_region_pointer in a forked child");
  auto lend_options = init<gpuloan_lend_options>();
  lend_options.access = GPULOAN_ACCESS_READ;
  gpuloan_loan* loan = nullptr;
  expect_forked(gpuloan_lend(scene.peer, 0, 0, &lend_options, &loan), "gpuloan_lend");
  expect_forked(gpuloan_loan_ready(scene.open, nullptr), "gpuloan_loan_ready");
  expect_forked(gpuloan_loan_cancel(scene.open, nullptr), "gpuloan_loan_cancel");
  expect_forked(gpuloan_reclaim(scene.open, 0), "gpuloan_reclaim");
  expect_forked(gpuloan_loan_wait_done(scene.held, 0), "gpuloan_loan_wait_done");
  expect_forked(gpuloan_loan_wait_end(scene.held, 0), "gpuloan_loan_wait_end");
  auto report = init<gpuloan_loan_report>();
  expect_forked(gpuloan_loan_report_get(scene.held, &report), "gpuloan_loan_report_get");
  expect_forked(gpuloan_request_deny(scene.request, nullptr), "gpuloan_request_deny");
  expect_forked(gpuloan_request_grant(scene.request, nullptr, &region, &loan), "gpuloan_request_grant");
  gpuloan_loan_unref(scene.held);
  gpuloan_peer_close(scene.peer);
  gpuloan_context_destroy(context);
}

// Runs `body` in a forked child that ends with `quick` (_exit) or by exit(), with all its handlers and destructors.
template <typename Body>
void in_fork(bool quick, Body body) {
  std::fflush(stdout);
  const pid_t child = ::fork();
  expect(child >= 0, "fork");
  if (child == 0) {
    in_forked_child = true;
    ::alarm(60);
    int status = 0;
    try {
      body();
    } catch (const Failure& failure) {
      std::fprintf(stderr, "forked child: %s\n", failure.text.c_str());
      status = 1;
    }
    if (quick || status != 0) ::_exit(status);
    std::exit(status);
  }
  int status = 0;
  expect(::waitpid(child, &status, 0) == child, "waitpid");
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the forked child ended with status " + std::to_string(status));
}

void child_calls(const Bench& bench) {
  Scene scene(bench);
  in_fork(true, [&] { call_everything(scene); });
  in_fork(false, [&] { call_everything(scene); });
  finish(bench, scene);
  scene.worker.close();
}

void child_only_exits(const Bench& bench) {
  Scene scene(bench);
  in_fork(false, [] {});
  in_fork(true, [] {});
  finish(bench, scene);
  scene.worker.close();
}

const char* not_under_tsan(const Bench&) {
#ifdef __SANITIZE_THREAD__
  return "ThreadSanitizer follows no new threads in a forked child";
#else
  return nullptr;
#endif
}

// Without a device a child may make contexts of its own; with one it is told to exec.
void child_makes_its_own(const Bench& bench) {
  Scene scene(bench);
  in_fork(true, [] {
    auto options = init<gpuloan_context_options>();
    options.role = GPULOAN_ROLE_EXPORTER;
    options.driver = "sim";
    gpuloan_context* context = nullptr;
    const gpuloan_status status = gpuloan_context_create(&options, &context);
    expect(status != GPULOAN_OK, "a forked child uses its parent's driver");
    expect_contains(gpuloan_error_text(), "exec", "the remedy");
    options.driver = nullptr;
    options.flags = GPULOAN_CONTEXT_NO_DEVICE;
    expect_ok(gpuloan_context_create(&options, &context), "a context without a device in a forked child");
    auto stats = init<gpuloan_stats>();
    expect_ok(gpuloan_context_stats(context, &stats), "gpuloan_context_stats");
    gpuloan_context_destroy(context);
  });
  finish(bench, scene);
  scene.worker.close();
}

// A plain fork keeps every descriptor open, the sockets too: the other side must still learn that a peer was closed.
void child_keeps_sockets(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  exporter.attach(worker);
  SocketPair line = make_socketpair();
  const pid_t child = ::fork();
  if (child == 0) {
    line.left.reset();
    char word = 0;
    static_cast<void>(!::read(line.right.get(), &word, 1)); // until the parent ends
    ::_exit(0);
  }
  line.right.reset();
  worker.close();
  expect(exporter.event(GPULOAN_EVENT_PEER_LOST).status == GPULOAN_ERR_PEER_LOST, "status of PEER_LOST");
  line.left.reset();
  expect(::waitpid(child, nullptr, 0) == child, "waitpid");
}

// What this program sees when it is exec'ed: the test compares it with what it had before any context existed.
std::string exec_and_list() {
  SocketPair pipe = make_socketpair();
  Process process({"--list"}, {}, pipe.right.get());
  pipe.right.reset();
  std::string text;
  char part[4096];
  for (ssize_t length = 0; (length = ::read(pipe.left.get(), part, sizeof part)) > 0;) text.append(part, static_cast<std::size_t>(length));
  expect_equal(process.wait(), 0, "exit status of the exec'ed child");
  return text;
}

int list_fds() {
  for (const std::string& entry : open_fds()) {
    if (!entry.starts_with("1 ")) std::printf("%s\n", entry.c_str()); // 1 is our own pipe
  }
  return 0;
}

std::string fds_without_any_context; // filled in main, before the driver is loaded

// E10
void exec_inherits_nothing(const Bench& bench) {
  Scene scene(bench);
  const std::string now = exec_and_list();
  expect(now == fds_without_any_context, "an exec'ed child got descriptors:\n" + now + "instead of:\n" + fds_without_any_context);
  finish(bench, scene);
  scene.worker.close();
}

constexpr Case kCases[] = {
    {"a forked child calls everything", child_calls},
    {"a forked child only exits", child_only_exits},
    {"a forked child makes its own context", child_makes_its_own, false, not_under_tsan},
    {"a forked child keeps the sockets open", child_keeps_sockets},
    {"an exec'ed child inherits nothing", exec_inherits_nothing},
};

int run(int count, char** words) {
  if (count > 1 && std::string_view(words[1]) == "--list") return list_fds();
  const TempFolder folder("gpuloan-fork");
  use_private_sim(folder);
  fds_without_any_context = exec_and_list();
  Gpu gpu("sim");
  int status = 0;
  for (const gpuloan_rung rung : {GPULOAN_RUNG_VMM, GPULOAN_RUNG_HOST}) {
    const Cell cell{"sim", rung, GPULOAN_GATE_MEMOP, GPULOAN_ENGINE_AUTO};
    status |= run_cases({cell, gpu, Habitat::Thread}, kCases, "").exit_status();
  }
  return status;
}

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
