// SPDX-License-Identifier: MIT
//
// Loans that go well: bytes, order, turns, sizes, many at once.
#include "suite.hpp"

namespace loan_test {
// A13, C12. The producer's stream still lags when the loan is made. With the host gate it is lend() that waits for it.
void read_loan(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  const Region region(peer, kMiB + 13);
  if (bench.host_gate()) {
    bench.gpu.delay(1);
  } else {
    bench.gpu.hold(1);
  }
  bench.gpu.upload(region.pointer(), region.bytes(), 1, 1);
  const Lent lent = lend(bench, peer, region, {.stream = 1});
  Borrowed loan = worker.offered(lent);
  if (!bench.host_gate()) {
    expect(!bench.gpu.idle(1), "lend() must not wait for the producer");
    expect_status(loan.try_acquire(0).status, GPULOAN_ERR_TIMEOUT, "acquire before READY");
    bench.gpu.release(1);
  }
  const Reply view = loan.acquire();
  expect_equal(view.bytes, region.bytes(), "view.bytes");
  expect_equal(view.access, GPULOAN_ACCESS_READ, "view.access");
  expect_equal(view.turn, 1, "view.turn");
  loan.check(1);
  loan.done();
  expect_status(loan.wait_done().status, GPULOAN_OK, "wait_done at the worker");
  lent.done();
  lent.ended();
  const gpuloan_loan_report report = lent.report();
  expect_steps(report);
  expect_carried(bench, report);
  expect_equal(report.memory_state, GPULOAN_MEMORY_RELEASED, "memory_state");
  expect_pattern(bench, region.pointer(), region.bytes(), 1);
  if (bench.cell.engine != GPULOAN_ENGINE_AUTO) expect_equal(exporter.stats().engine, bench.cell.engine, "stats.engine");
  expect(exporter.event(GPULOAN_EVENT_LOAN_ENDED).status == GPULOAN_OK, "status of LOAN_ENDED");
  worker.close();
}

// The result is written behind a stream of the worker's that lags, and is not called done before.
void write_loan(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  Borrowed loan = worker.request(kMiB + 13);
  const gpuloan_event event = exporter.event(GPULOAN_EVENT_REQUEST);
  auto info = init<gpuloan_request_info>();
  expect_ok(gpuloan_request_info_get(event.request, &info), "gpuloan_request_info_get");
  expect_equal(info.bytes, kMiB + 13, "info.bytes");
  expect(info.peer == peer, "the request is another peer's");
  const Granted granted = grant(bench, event.request, {});
  const Reply view = loan.acquire();
  expect_equal(view.access, GPULOAN_ACCESS_WRITE, "view.access");
  if (!bench.host_gate()) worker.hold(1);
  loan.fill(2, 1);
  loan.done(1);
  if (!bench.host_gate()) {
    expect_status(gpuloan_loan_wait_done(granted.loan, 20), GPULOAN_ERR_TIMEOUT, "wait_done while the worker's stream lags");
    worker.release(1);
  }
  granted.loan.done();
  expect_pattern(bench, granted.region.pointer(), granted.region.bytes(), 2);
  granted.loan.ended();
  const gpuloan_loan_report report = granted.loan.report();
  expect_steps(report);
  expect_carried(bench, report);
  expect_equal(report.turns_done, 1, "turns_done");
  expect_status(loan.wait_end().status, GPULOAN_OK, "wait_end at the worker");
  const gpuloan_loan_report theirs = loan.report();
  expect_equal(theirs.id, report.id, "the loan's id at the worker");
  for (unsigned step = GPULOAN_STEP_IMPORT; step <= GPULOAN_STEP_ACK; ++step) {
    expect_equal(theirs.step_ns[step], report.step_ns[step], gpuloan_step_name(static_cast<gpuloan_step>(step)));
  }
  expect(exporter.event(GPULOAN_EVENT_LOAN_DONE).loan != nullptr, "LOAN_DONE names no loan");
  worker.close();
}

namespace {

// Two open loans of one worker: `from` to be read and `to` to be written, a new pattern in each turn.
struct Turns {
  const Bench& bench;
  Worker& worker;
  const Region& from;
  const Region& to;
  Lent read, write;
  Borrowed reader, writer;

  void make(std::uint32_t turn) {
    const Reply view = reader.acquire();
    expect_equal(view.turn, turn, "view.turn");
    reader.check(1000 + turn);
    writer.acquire();
    writer.fill(2000 + turn);
    reader.done();
    writer.done();
    read.done();
    write.done();
    expect_pattern(bench, to.pointer(), to.bytes(), 2000 + turn);
    expect_pattern(bench, from.pointer(), from.bytes(), 1000 + turn);
  }
  void next(std::uint32_t turn) {
    expect_status(reader.try_acquire(0).status, GPULOAN_ERR_TIMEOUT, "acquire between two turns");
    bench.gpu.upload(from.pointer(), from.bytes(), 1000 + turn);
    expect_ok(gpuloan_loan_ready(read, bench.gpu.stream()), "gpuloan_loan_ready");
    expect_ok(gpuloan_loan_ready(write, bench.gpu.stream()), "gpuloan_loan_ready");
    expect_status(gpuloan_loan_ready(read, bench.gpu.stream()), GPULOAN_ERR_STATE, "ready while a turn is out");
  }
};

} // namespace

// M3
void many_turns(const Bench& bench) {
  constexpr std::uint32_t kTurns = 50;
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const Region from(peer, 65536 + 5);
  const Region to(peer, 65536 + 5);
  bench.gpu.upload(from.pointer(), from.bytes(), 1001);
  Lent read = lend(bench, peer, from, {.access = GPULOAN_ACCESS_READ, .keep_open = true});
  Lent write = lend(bench, peer, to, {.access = GPULOAN_ACCESS_WRITE, .keep_open = true});
  Borrowed reader = worker.offered(read);
  Borrowed writer = worker.offered(write);
  Turns turns{bench, worker, from, to, std::move(read), std::move(write), reader, writer};
  turns.make(1);
  const std::int64_t imports = worker.calls("cuMemImportFromShareableHandle");
  const gpuloan_stats after_first = worker.stats();
  for (std::uint32_t turn = 2; turn <= kTurns; ++turn) {
    turns.next(turn);
    turns.make(turn);
  }
  expect_equal(worker.calls("cuMemImportFromShareableHandle"), imports, "imports after the first turn");
  expect_equal(worker.stats().imported_bytes, after_first.imported_bytes, "imported bytes after the first turn");
  for (gpuloan_loan* loan : {turns.read.get(), turns.write.get()}) expect_ok(gpuloan_reclaim(loan, kWaitMs), "gpuloan_reclaim");
  for (const Lent* loan : {&turns.read, &turns.write}) {
    const gpuloan_loan_report report = loan->report();
    expect_equal(report.turns, kTurns, "report.turns");
    expect_equal(report.turns_done, kTurns, "report.turns_done");
    expect_steps(report);
    expect_carried(bench, report);
  }
  expect_status(reader.try_acquire(kWaitMs).status, GPULOAN_ERR_STATE, "acquire after the exporter asked for the loan back");
  worker.close();
}

namespace {

void both_directions(const Bench& bench, Exporter& exporter, gpuloan_peer* peer, Worker& worker, std::uint64_t bytes) {
  const Region region(peer, bytes, GPULOAN_ACCESS_READ);
  expect_equal(region.bytes(), bytes, "gpuloan_region_bytes");
  expect((region.pointer() == 0) == (bytes == 0), "only a region without bytes has no address");
  bench.gpu.upload(region.pointer(), bytes, bytes + 1);
  const Lent lent = lend(bench, peer, region, {});
  Borrowed reader = worker.offered(lent);
  expect_equal(reader.acquire().bytes, bytes, "view.bytes");
  reader.check(bytes + 1);
  reader.done();
  lent.ended();
  expect_steps(lent.report());
  expect_carried(bench, lent.report());

  Borrowed writer = worker.request(bytes);
  const Granted granted = grant(bench, exporter.event(GPULOAN_EVENT_REQUEST).request, {});
  expect_equal(writer.acquire().bytes, bytes, "view.bytes");
  writer.fill(bytes + 2);
  writer.done();
  granted.loan.ended();
  expect_pattern(bench, granted.region.pointer(), bytes, bytes + 2);
  expect_steps(granted.loan.report());
  expect_carried(bench, granted.loan.report());
}

} // namespace

// D9, D10. The last two go more than once around a ring of 16 MiB.
void sizes(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, 2 * kMiB - 1, 2 * kMiB, 2 * kMiB + 1, 16 * kMiB, 20 * kMiB + 3}) {
    both_directions(bench, exporter, peer, worker, bytes);
  }
  worker.close();
}

// C6. 32 loans are out at once; they are acquired in one order and finished in another.
void in_flight(const Bench& bench) {
  constexpr std::uint64_t kLoans = 32;
  constexpr std::uint64_t kSizes[] = {0, 1, 255, 4096 + 7, 65536, 200'003, kMiB + 1};
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  std::vector<Region> regions;
  std::vector<Lent> lent;
  std::vector<Borrowed> loans;
  const auto writes = [](std::uint64_t index) { return index % 3 == 1; };
  for (std::uint64_t index = 0; index < kLoans; ++index) {
    regions.emplace_back(peer, kSizes[index % std::size(kSizes)]);
    if (!writes(index)) bench.gpu.upload(regions[index].pointer(), regions[index].bytes(), index);
    lent.push_back(lend(bench, peer, regions[index], {.access = writes(index) ? GPULOAN_ACCESS_WRITE : GPULOAN_ACCESS_READ}));
  }
  expect_equal(exporter.stats().loans_out, kLoans, "loans out");
  for (std::uint64_t index = 0; index < kLoans; ++index) loans.push_back(worker.offered(lent[index]));
  for (std::uint64_t index = 0; index < kLoans; ++index) loans[index * 5 % kLoans].acquire();
  for (std::uint64_t turn = 0; turn < kLoans; ++turn) {
    const std::uint64_t index = (turn * 13 + 7) % kLoans;
    if (writes(index)) {
      loans[index].fill(100 + index);
    } else {
      loans[index].check(index);
    }
    loans[index].done();
  }
  for (std::uint64_t index = 0; index < kLoans; ++index) {
    lent[index].ended();
    expect_pattern(bench, regions[index].pointer(), regions[index].bytes(), writes(index) ? 100 + index : index);
    expect_steps(lent[index].report());
  }
  expect_equal(exporter.stats().loans_out, 0U, "loans out at the end");
  worker.close();
}

// The worker writes from two streams; DONE is behind both.
void several_streams(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  const Region region(peer, 65536);
  const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  if (!bench.host_gate()) worker.hold(2);
  loan.fill(7, 2);
  loan.used_on(2);
  loan.done(1); // stream 1 has nothing to do
  if (!bench.host_gate()) {
    expect_status(gpuloan_loan_wait_done(lent, 20), GPULOAN_ERR_TIMEOUT, "wait_done while the second stream lags");
    worker.release(2);
  }
  lent.ended();
  expect_pattern(bench, region.pointer(), region.bytes(), 7);
  worker.close();
}

} // namespace loan_test
