// SPDX-License-Identifier: MIT
//
// A worker that is stopped and goes on later is not dead: whatever it was doing, the loan completes.
#include "suite.hpp"

#include <csignal>

namespace loan_test {
namespace {

constexpr std::uint64_t kBytes = 200'003;
constexpr std::uint32_t kStoppedMs = 150; // longer than any interval of the library's

enum class Stop { BeforeAcquire, Acquired, Filled, Done };

// Stopped while it exists. Nothing may be taken for a death meanwhile.
void while_stopped(const Worker& worker, const Exporter& exporter, const Lent& lent) {
  expect(::kill(worker.pid(), SIGSTOP) == 0, "the worker cannot be stopped");
  for (const std::uint64_t end = now_ms() + kStoppedMs; now_ms() < end; nap()) {
    expect_equal(exporter.stats().peers, 1U, "peers while the worker is stopped");
  }
  const gpuloan_loan_report report = lent.report();
  expect(report.ended == 0 || report.outcome == GPULOAN_OK, "the loan of a stopped worker has failed");
  expect(::kill(worker.pid(), SIGCONT) == 0, "the worker cannot go on");
}

void stopped_at(const Bench& bench, Exporter& exporter, Worker& worker, gpuloan_peer* peer, Stop stop) {
  const Region region(peer, kBytes);
  bench.gpu.upload(region.pointer(), kBytes, 1);
  const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
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
  expect_pattern(bench, region.pointer(), kBytes, 2);
}

} // namespace

void stopped_worker(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  for (const Stop stop : {Stop::BeforeAcquire, Stop::Acquired, Stop::Filled, Stop::Done}) stopped_at(bench, exporter, worker, peer, stop);
  worker.close();
}

} // namespace loan_test
