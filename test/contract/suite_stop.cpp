// SPDX-License-Identifier: MIT
//
// A worker that is stopped and goes on later is not dead: whatever it was doing, the loan completes. GPULOAN_TEST_STOPPED_MS
// says for how long (150 ms, longer than any interval of the library's).
#include "suite.hpp"

#include <csignal>
#include <cstdlib>

namespace loan_test {
namespace {

constexpr std::uint64_t kStopBytes = 200'003;

enum class Stop { BeforeExport, BeforeAcquire, Acquired, Filled, Done, Ended };

std::uint32_t stopped_ms() {
  const char* wanted = std::getenv("GPULOAN_TEST_STOPPED_MS");
  return wanted != nullptr ? static_cast<std::uint32_t>(std::atoi(wanted)) : 150;
}

void halt(const Worker& worker) { expect(::kill(worker.pid(), SIGSTOP) == 0, "the worker cannot be stopped"); }

// Goes on after its time. Nothing may have been taken for a death.
void go_on(const Worker& worker, const Exporter& exporter, const Lent& lent) {
  for (const std::uint64_t end = now_ms() + stopped_ms(); now_ms() < end; nap()) {
    expect_equal(exporter.stats().peers, 1U, "peers while the worker is stopped");
  }
  const gpuloan_loan_report report = lent.report();
  expect(report.ended == 0 || report.outcome == GPULOAN_OK, "the loan of a stopped worker has failed");
  expect(::kill(worker.pid(), SIGCONT) == 0, "the worker cannot go on");
}

void while_stopped(const Worker& worker, const Exporter& exporter, const Lent& lent) {
  halt(worker);
  go_on(worker, exporter, lent);
}

void stopped_at(const Bench& bench, Exporter& exporter, Worker& worker, gpuloan_peer* peer, Stop stop) {
  const Region region(peer, kStopBytes);
  bench.gpu.upload(region.pointer(), kStopBytes, 1);
  if (stop == Stop::BeforeExport) halt(worker);
  const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
  if (stop == Stop::BeforeExport) go_on(worker, exporter, lent);
  Borrowed loan = worker.offered(lent);
  if (stop == Stop::BeforeAcquire) while_stopped(worker, exporter, lent);
  loan.acquire();
  if (stop == Stop::Acquired) while_stopped(worker, exporter, lent);
  loan.fill(2);
  if (stop == Stop::Filled) while_stopped(worker, exporter, lent);
  loan.done();
  if (stop == Stop::Done) while_stopped(worker, exporter, lent);
  expect_status(loan.wait_end().status, GPULOAN_OK, "the end at the worker");
  lent.ended();
  if (stop == Stop::Ended) while_stopped(worker, exporter, lent);
  expect_pattern(bench, region.pointer(), kStopBytes, 2);
}

} // namespace

void stopped_worker(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  for (const Stop stop : {Stop::BeforeExport, Stop::BeforeAcquire, Stop::Acquired, Stop::Filled, Stop::Done, Stop::Ended}) stopped_at(bench, exporter, worker, peer, stop);
  worker.close();
}

} // namespace loan_test
