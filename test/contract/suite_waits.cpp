// SPDX-License-Identifier: MIT
//
// Waiting for READY: on the host with a limit, and on a stream of the worker's.
#include "suite.hpp"

#include <array>

namespace loan_test {
namespace {

constexpr std::uint64_t kWaitsBytes = 100'003;

} // namespace

// A13, A14, C5. Three reasons why a turn is not ready: the producer's stream lags, the turn has not begun, the request is unanswered.
void not_ready_yet(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  const Region region(peer, kWaitsBytes);
  if (!bench.host_gate()) bench.gpu.hold(1);
  bench.gpu.upload(region.pointer(), kWaitsBytes, 1, 1);
  const Lent lent = lend(bench, peer, region, {.stream = 1, .keep_open = true});
  Borrowed loan = worker.offered(lent);
  if (!bench.host_gate()) {
    expect_status(loan.try_acquire(0).status, GPULOAN_ERR_TIMEOUT, "acquire(0) behind a stream that lags");
    expect_status(loan.try_acquire(50).status, GPULOAN_ERR_TIMEOUT, "acquire(50) behind a stream that lags");
    bench.gpu.release(1);
  }
  loan.acquire();
  loan.check(1);
  loan.done();
  lent.done();
  expect_status(loan.try_acquire(0).status, GPULOAN_ERR_TIMEOUT, "acquire(0) between two turns");
  expect_status(loan.try_acquire(50).status, GPULOAN_ERR_TIMEOUT, "acquire(50) between two turns");
  bench.gpu.upload(region.pointer(), kWaitsBytes, 2, 1);
  expect_ok(gpuloan_loan_ready(lent, bench.gpu.stream(1)), "gpuloan_loan_ready");
  loan.acquire();
  loan.check(2);
  expect_status(gpuloan_reclaim(lent, 20), GPULOAN_ERR_TIMEOUT, "reclaim while a turn is out");
  loan.done();
  expect_ok(gpuloan_reclaim(lent, kWaitMs), "gpuloan_reclaim");

  Borrowed wish = worker.request(kWaitsBytes);
  expect_status(wish.try_acquire(0).status, GPULOAN_ERR_TIMEOUT, "acquire(0) of a request");
  expect_status(wish.try_acquire(50).status, GPULOAN_ERR_TIMEOUT, "acquire(50) of a request");
  const Granted granted = grant(bench, exporter.event(GPULOAN_EVENT_REQUEST).request, {});
  wish.acquire();
  wish.fill(3);
  wish.done();
  granted.loan.ended();
  expect_pattern(bench, granted.region.pointer(), kWaitsBytes, 3);
  worker.close();
}

const char* no_stream_waits(const Bench& bench) {
  const bool can = bench.cell.rung == GPULOAN_RUNG_VMM && bench.cell.gate == GPULOAN_GATE_MEMOP;
  return can ? nullptr : "a stream waits for READY only on vmm with the memop gate";
}

const char* stream_waits(const Bench& bench) { return no_stream_waits(bench) == nullptr ? "here it can wait" : nullptr; }

namespace {

constexpr unsigned kCap = 4;                 // the default of gpu_wait_limit
constexpr unsigned kProducer = 1;            // the test's stream
constexpr unsigned first_stream = 10;        // the worker's: one each loan

struct Waiting {
  std::vector<Region> regions;
  std::vector<Lent> lent;
  std::vector<Borrowed> loans;
};

Waiting lend_behind_held(const Bench& bench, gpuloan_peer* peer, Worker& worker, unsigned count) {
  Waiting all;
  bench.gpu.hold(kProducer);
  for (unsigned index = 0; index < count; ++index) {
    const Region& region = all.regions.emplace_back(peer, kWaitsBytes);
    bench.gpu.upload(region.pointer(), kWaitsBytes, 20 + index, kProducer);
    all.lent.push_back(lend(bench, peer, region, {.stream = kProducer}));
    all.loans.push_back(worker.offered(all.lent.back()));
  }
  return all;
}

} // namespace

// C9
void wait_on_stream(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  Waiting all = lend_behind_held(bench, peer, worker, kCap + 1);
  expect_status(all.loans[0].try_acquire_on(kCpuStream, kWaitMs).status, GPULOAN_ERR_INVALID, "acquire_on of no stream");
  for (unsigned index = 0; index < kCap; ++index) {
    expect_status(all.loans[index].try_acquire_on(first_stream + index, kWaitMs).status, GPULOAN_OK, "acquire_on");
    expect(!worker.idle(first_stream + index), "the stream does not wait for READY");
  }
  expect_equal(worker.stats().gpu_waits, kCap, "gpu_waits");
  const Reply fifth = all.loans[kCap].try_acquire_on(first_stream + kCap, kWaitMs);
  expect_status(fifth.status, GPULOAN_ERR_WAIT_LIMIT, "the fifth wait");
  expect_contains(fifth.text, "gpu_wait_limit", "the text of the fifth wait");
  expect_equal(worker.stats().gpu_waits, kCap, "gpu_waits after one was refused");
  bench.gpu.release(kProducer);
  for (unsigned index = 0; index < kCap; ++index) {
    all.loans[index].check(20 + index, first_stream + index); // behind the wait, on the same stream
    all.loans[index].done(first_stream + index);
    all.lent[index].ended();
    expect_steps(all.lent[index].report());
  }
  expect(becomes([&] { return worker.stats().gpu_waits == 0; }), "waits that are over still count");
  expect_status(all.loans[kCap].try_acquire_on(first_stream + kCap, kWaitMs).status, GPULOAN_OK, "acquire_on once there is room");
  all.loans[kCap].check(20 + kCap, first_stream + kCap);
  all.loans[kCap].done(first_stream + kCap);
  all.lent[kCap].ended();

  // A cancel releases a stream that waits.
  Waiting one = lend_behind_held(bench, peer, worker, 1);
  expect_status(one.loans[0].try_acquire_on(first_stream, kWaitMs).status, GPULOAN_OK, "acquire_on");
  expect(!worker.idle(first_stream), "the stream does not wait for READY");
  expect_ok(gpuloan_loan_cancel(one.lent[0], "not any more"), "gpuloan_loan_cancel");
  expect(becomes([&] { return worker.idle(first_stream); }), "a cancelled loan does not release the stream");
  expect_status(one.loans[0].try_done(first_stream).status, GPULOAN_ERR_CANCELLED, "done of a cancelled loan");
  one.lent[0].ended(GPULOAN_ERR_CANCELLED);
  bench.gpu.release(kProducer);
  bench.gpu.sync(kProducer);
  worker.close();
}

// Elsewhere acquire_on is refused while the turn is not ready, and changes nothing.
void no_wait_elsewhere(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  const Region region(peer, kWaitsBytes);
  if (!bench.host_gate()) bench.gpu.hold(kProducer);
  bench.gpu.upload(region.pointer(), kWaitsBytes, 5, kProducer);
  const Lent lent = lend(bench, peer, region, {.stream = kProducer});
  Borrowed loan = worker.offered(lent);
  if (!bench.host_gate()) {
    // Under the memop gate on a rung that copies, READY goes behind a copy: it may not even be posted yet.
    const gpuloan_status status = loan.try_acquire_on(first_stream, 20).status;
    if (status != GPULOAN_ERR_TIMEOUT) expect_status(status, GPULOAN_ERR_UNSUPPORTED, "acquire_on");
    bench.gpu.release(kProducer);
  }
  loan.acquire();
  loan.check(5);
  loan.done();
  lent.ended();
  worker.close();
}

} // namespace loan_test
