// SPDX-License-Identifier: MIT
//
// Contexts without a thread of their own (GPULOAN_LOOP_CALLER): they work while somebody dispatches, and only then.
#include "suite.hpp"

#include <poll.h>

namespace loan_test {
namespace {

constexpr std::uint64_t kCallerBytes = 100'003;

void by_caller(gpuloan_context_options& options) {
  options.loop = GPULOAN_LOOP_CALLER;
  options.engine = GPULOAN_ENGINE_EPOLL;
}

// An event loop of the application's: the context's descriptor beside the worker's answers.
Reply drive(const Exporter& exporter, Worker& worker) {
  while (true) {
    pollfd both[] = {{worker.control(), POLLIN, 0}, {gpuloan_context_fd(exporter.get()), POLLIN, 0}};
    expect(::poll(both, 2, 10) >= 0, "poll");
    expect_ok(gpuloan_context_dispatch(exporter.get(), 0), "gpuloan_context_dispatch");
    if (both[0].revents != 0) return worker.reply();
  }
}

Reply drive(const Exporter& exporter, Worker& worker, const Command& command) {
  worker.post(command);
  return drive(exporter, worker);
}

// Nothing but dispatch() and calls that only look, until the loan has ended.
void drive_to_end(const Exporter& exporter, const Lent& lent) {
  const auto over = [&] {
    pollfd one = {gpuloan_context_fd(exporter.get()), POLLIN, 0};
    expect(::poll(&one, 1, 10) >= 0, "poll");
    expect_ok(gpuloan_context_dispatch(exporter.get(), 0), "gpuloan_context_dispatch");
    return lent.report().ended != 0;
  };
  for (const std::uint64_t end = now_ms() + kWaitMs; !over();) expect(now_ms() < end, "the loan does not end by dispatch()");
}

} // namespace

const char* no_caller_driven(const Bench& bench) {
  return bench.cell.engine != GPULOAN_ENGINE_IO_URING ? nullptr : "a caller-driven exporter has an epoll engine";
}

void caller_importer(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench, {.flags = OpenCallerLoop});
  gpuloan_peer* peer = exporter.attach(worker);
  const Region region(peer, kCallerBytes);
  bench.gpu.upload(region.pointer(), kCallerBytes, 1);
  const Lent lent = lend(bench, peer, region, {.keep_open = true});
  Borrowed loan = worker.offered(lent);
  for (std::uint64_t turn = 1; turn <= 3; ++turn) {
    loan.acquire();
    loan.check(turn);
    loan.done();
    lent.done();
    bench.gpu.upload(region.pointer(), kCallerBytes, turn + 1);
    expect_ok(gpuloan_loan_ready(lent, bench.gpu.stream()), "gpuloan_loan_ready");
  }
  loan.acquire();
  loan.done();
  expect_ok(gpuloan_reclaim(lent, kWaitMs), "gpuloan_reclaim");
  Borrowed wish = worker.request(kCallerBytes);
  const Granted granted = grant(bench, exporter.event(GPULOAN_EVENT_REQUEST).request, {});
  wish.acquire();
  wish.fill(8);
  wish.done();
  expect_status(wish.wait_end().status, GPULOAN_OK, "wait_end at the worker");
  granted.loan.ended();
  expect_pattern(bench, granted.region.pointer(), kCallerBytes, 8);
  expect_steps(granted.loan.report());
  expect_equal(worker.stats().engine, GPULOAN_ENGINE_EPOLL, "the worker's engine");
  worker.close();
}

void caller_exporter(const Bench& bench) {
  Exporter exporter(bench, by_caller);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  expect_equal(exporter.stats().engine, GPULOAN_ENGINE_EPOLL, "the exporter's engine");
  const Region region(peer, kCallerBytes);
  bench.gpu.upload(region.pointer(), kCallerBytes, 1);
  const Lent lent = lend(bench, peer, region, {});
  Borrowed loan = worker.offered(lent);
  expect_status(drive(exporter, worker, loan.command(Op::Acquire)).status, GPULOAN_OK, "acquire");
  loan.check(1);
  loan.done();
  drive_to_end(exporter, lent);
  expect_status(lent.report().outcome, GPULOAN_OK, "outcome");
  expect_steps(lent.report());
  expect_carried(bench, lent.report());

  Borrowed wish = worker.request(kCallerBytes);
  const Granted granted = grant(bench, exporter.event(GPULOAN_EVENT_REQUEST).request, {});
  expect_status(drive(exporter, worker, wish.command(Op::Acquire)).status, GPULOAN_OK, "acquire");
  wish.fill(2);
  wish.done();
  drive_to_end(exporter, granted.loan);
  expect_pattern(bench, granted.region.pointer(), kCallerBytes, 2);
  expect_status(gpuloan_context_dispatch(exporter.get(), 0), GPULOAN_OK, "dispatch with nothing to do");
  worker.close();
}

// The exporter does nothing at all while the worker works, says DONE and is killed. Everything is still there when the
// exporter looks again.
void late_exporter(const Bench& bench) {
  Exporter exporter(bench, by_caller);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const Region region(peer, kCallerBytes);
  const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
  const Region open_region(peer, kCallerBytes);
  const Lent open = lend(bench, peer, open_region, {.access = GPULOAN_ACCESS_WRITE, .keep_open = true});
  Borrowed loan = worker.offered(lent);
  Borrowed kept = worker.offered(open);
  for (Borrowed* each : {&loan, &kept}) {
    each->acquire();
    each->fill(7);
    each->done();
    expect_status(each->wait_done().status, GPULOAN_OK, "wait_done at the worker");
  }
  worker.kill();
  lent.done();
  lent.ended();
  open.done();
  open.ended();
  expect_pattern(bench, region.pointer(), kCallerBytes, 7);
  expect_pattern(bench, open_region.pointer(), kCallerBytes, 7);
}

} // namespace loan_test
