// SPDX-License-Identifier: MIT
//
// One side goes: by SIGKILL, or in an orderly way with loans still out.
#include "suite.hpp"

#include <memory>
#include <sys/socket.h>

namespace loan_test {
namespace {

constexpr std::uint64_t kDeathBytes = 100'003;
constexpr std::uint64_t kLarge = (std::uint64_t{64} << 20) + 13; // shows on any device's books

void one_loan(const Bench& bench, gpuloan_peer* peer, Worker& worker, std::uint64_t seed) {
  const Region region(peer, kDeathBytes);
  bench.gpu.upload(region.pointer(), kDeathBytes, seed);
  const Lent lent = lend(bench, peer, region, {});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  loan.check(seed);
  loan.done();
  lent.ended();
}

// What became of the memory; memory of the test's own is waited for, as its owner has to before freeing it.
void expect_lost(const Bench& bench, const Lent& lent) {
  const std::uint32_t state = lent.report().memory_state;
  if (!bench.own_memory() || state != GPULOAN_MEMORY_RELEASED) expect_equal(state, bench.lost_state(), "memory_state");
  if (bench.own_memory()) expect(becomes([&] { return lent.report().memory_state == GPULOAN_MEMORY_RELEASED; }), "quarantined for ever");
}

void expect_nothing_kept(const Bench& bench, const Exporter& exporter, std::uint64_t used_at_start) {
  const bool process = bench.habitat == Habitat::Process; // a thread's process lives on: what it held still counts
  const auto settled = [&] {
    const gpuloan_stats stats = exporter.stats();
    return stats.retired_bytes == 0 && (stats.surrendered_bytes == 0 || !process) && stats.quarantined_bytes == 0 && stats.chunks == 0;
  };
  if (!becomes(settled)) {
    const gpuloan_stats stats = exporter.stats();
    fail("kept after the death: retired " + std::to_string(stats.retired_bytes) + ", surrendered " + std::to_string(stats.surrendered_bytes) +
         ", quarantined " + std::to_string(stats.quarantined_bytes) + " bytes, " + std::to_string(stats.chunks) + " chunks");
  }
  const std::uint64_t noise = bench.gpu.simulated() ? 0 : kNoise;
  expect(becomes([&] { return bench.gpu.settle_pool(), bench.gpu.used_bytes() <= used_at_start + noise; }), "device memory did not come back");
}

} // namespace

// B8
void killed_worker(const Bench& bench) {
  Exporter exporter(bench);
  const std::uint64_t used_at_start = bench.gpu.used_bytes();
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  Region region(peer, kLarge);
  const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  loan.fill(3);
  gpuloan_status waited = GPULOAN_OK;
  std::thread waiter([&] { waited = gpuloan_loan_wait_done(lent, kWaitMs); });
  const std::uint64_t killed_at = now_ms();
  worker.kill();
  waiter.join();
  expect(now_ms() - killed_at < kNoticedMs, "the death was not noticed within 5 s");
  expect_status(waited, GPULOAN_ERR_PEER_LOST, "wait_done when the worker is killed");
  lent.ended(GPULOAN_ERR_PEER_LOST);
  expect_lost(bench, lent);
  const gpuloan_event event = exporter.event(GPULOAN_EVENT_PEER_LOST);
  expect(event.peer == peer && event.text[0] != '\0', "PEER_LOST names another peer or no reason");
  bench.gpu.upload(region.pointer(), region.bytes(), 4);
  expect_pattern(bench, region.pointer(), region.bytes(), 4);
  gpuloan_loan* none = nullptr;
  expect_status(try_lend(bench, peer, region.pointer(), 1, {}, &none), GPULOAN_ERR_PEER_LOST, "lend to the dead");
  {
    Worker next(bench);
    gpuloan_peer* next_peer = exporter.attach(next);
    one_loan(bench, next_peer, next, 5);
    next.close();
    exporter.event(GPULOAN_EVENT_PEER_LOST);
    gpuloan_peer_close(next_peer);
  }
  region.destroy();
  expect_nothing_kept(bench, exporter, used_at_start);
  gpuloan_peer_close(peer);
}

// Somebody else has the dead worker's end of the socket open (a child that it forked, say): it never hangs up.
void killed_socket_kept(const Bench& bench) {
  Exporter exporter(bench);
  const std::uint64_t used_at_start = bench.gpu.used_bytes();
  Worker worker(bench, {.keep_end = true});
  gpuloan_peer* peer = exporter.attach(worker);
  Region region(peer, kDeathBytes);
  const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  const std::uint64_t killed_at = now_ms();
  worker.kill();
  expect_status(gpuloan_loan_wait_done(lent, kWaitMs), GPULOAN_ERR_PEER_LOST, "wait_done when the worker is killed");
  expect(now_ms() - killed_at < kNoticedMs, "the death was not noticed within 5 s");
  lent.ended(GPULOAN_ERR_PEER_LOST);
  expect_lost(bench, lent);
  region.destroy();
  expect_nothing_kept(bench, exporter, used_at_start);
}

// C4. The work was done and said so before the process died: the turn counts, and its bytes are there.
void done_then_killed(const Bench& bench) {
  Exporter exporter(bench);
  const std::uint64_t used_at_start = bench.gpu.used_bytes();
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  Region region(peer, kDeathBytes);
  const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE, .keep_open = true});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  loan.fill(6);
  loan.done();
  expect_status(loan.wait_done().status, GPULOAN_OK, "wait_done at the worker");
  worker.kill();
  lent.done();
  lent.ended();
  expect_equal(lent.report().turns_done, 1, "turns_done");
  expect_pattern(bench, region.pointer(), region.bytes(), 6);
  expect_lost(bench, lent);
  region.destroy();
  expect_nothing_kept(bench, exporter, used_at_start);
}

// A3, B8. The worker destroys its context in an orderly way with loans out: those it holds, those it was only offered, a request.
void closed_worker(const Bench& bench) {
  Exporter exporter(bench);
  const std::uint64_t used_at_start = bench.gpu.used_bytes();
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  Region held_region(peer, kDeathBytes);
  Region offered_region(peer, kDeathBytes);
  const Lent held = lend(bench, peer, held_region, {.access = GPULOAN_ACCESS_WRITE});
  const Lent offered = lend(bench, peer, offered_region, {.access = GPULOAN_ACCESS_WRITE});
  Borrowed loan = worker.offered(held);
  loan.acquire();
  static_cast<void>(worker.request(kDeathBytes));
  const gpuloan_event request = exporter.event(GPULOAN_EVENT_REQUEST);
  worker.close();
  for (const Lent* lent : {&held, &offered}) {
    const gpuloan_status status = gpuloan_loan_wait_end(*lent, kWaitMs);
    // Its last references were dropped first, which returns a loan that is open.
    if (status != GPULOAN_ERR_RETURNED) expect_status(status, GPULOAN_ERR_PEER_LOST, "wait_end");
  }
  exporter.event(GPULOAN_EVENT_PEER_LOST);
  gpuloan_region* region = nullptr;
  gpuloan_loan* granted = nullptr;
  expect_status(gpuloan_request_grant(request.request, nullptr, &region, &granted), GPULOAN_ERR_PEER_LOST, "grant to a peer that is gone");
  expect_ok(gpuloan_request_deny(request.request, "too late"), "deny to a peer that is gone");
  if (bench.own_memory()) expect(becomes([&] { return exporter.stats().quarantined_bytes == 0; }), "quarantined for ever");
  held_region.destroy();
  offered_region.destroy();
  expect_nothing_kept(bench, exporter, used_at_start);
}

// What it said of its loans reaches the exporter before the end of its socket does, also while its GPU work goes on.
void closed_after_its_word(const Bench& bench) {
  // Closes the context, with a loop of its own or the caller's, or the connection alone.
  for (const auto& [context, flags] : {std::pair{true, 0U}, {true, std::uint32_t{OpenCallerLoop}}, {false, 0U}}) {
    Exporter exporter(bench);
    Worker worker(bench, {.flags = flags});
    gpuloan_peer* peer = exporter.attach(worker);
    Region failed_region(peer, kDeathBytes), done_region(peer, kDeathBytes);
    const Lent failed = lend(bench, peer, failed_region, {.access = GPULOAN_ACCESS_WRITE});
    const Lent done = lend(bench, peer, done_region, {.access = GPULOAN_ACCESS_WRITE});
    Borrowed fails = worker.offered(failed), does = worker.offered(done);
    fails.acquire();
    does.acquire();
    worker.delay(1);
    does.fill(6, 1);
    does.done(1);
    worker.delay(1);
    fails.fail_with("the lamp is out");
    Command close;
    close.op = Op::ClosePeer;
    if (context) worker.close();
    else worker.call(close);
    expect_status(gpuloan_loan_wait_end(failed, kWaitMs), GPULOAN_ERR_FAILED, "wait_end of the one that failed");
    expect_contains(failed.report().outcome_text, "the lamp is out", "its outcome_text");
    expect_equal(failed.report().memory_state, GPULOAN_MEMORY_RELEASED, "its memory_state");
    done.ended();
    expect_pattern(bench, done_region.pointer(), kDeathBytes, 6);
    failed_region.destroy();
    done_region.destroy();
    exporter.event(GPULOAN_EVENT_PEER_LOST);
    if (!context) worker.close();
  }
}

// Two peers of one exporter; what happens to one is nothing to the other.
void two_workers(const Bench& bench) {
  Exporter exporter(bench);
  auto first = std::make_unique<Worker>(bench);
  Worker second(bench);
  gpuloan_peer* first_peer = exporter.attach(*first, "one");
  gpuloan_peer* second_peer = exporter.attach(second, "two");
  expect(first_peer != second_peer, "two connections are one peer");
  auto info = init<gpuloan_peer_info>();
  expect_ok(gpuloan_peer_info_get(second_peer, &info), "gpuloan_peer_info_get");
  expect_contains(info.account, "two", "account");
  expect_equal(exporter.stats().peers, 2U, "peers");
  const Region in_one(first_peer, kDeathBytes);
  const Region in_two(second_peer, kDeathBytes);
  bench.gpu.upload(in_one.pointer(), kDeathBytes, 11);
  bench.gpu.upload(in_two.pointer(), kDeathBytes, 12);
  const Lent to_one = lend(bench, first_peer, in_one, {});
  const Lent to_two = lend(bench, second_peer, in_two, {});
  Borrowed one = first->offered(to_one);
  Borrowed two = second.offered(to_two);
  one.acquire();
  two.acquire();
  one.check(11);
  two.check(12);
  Borrowed wish = second.request(kDeathBytes);
  const gpuloan_event event = exporter.event(GPULOAN_EVENT_REQUEST);
  expect(event.peer == second_peer, "the request is the other peer's");
  const Granted granted = grant(bench, event.request, {});
  if (bench.habitat == Habitat::Process) {
    first->kill();
    to_one.ended(GPULOAN_ERR_PEER_LOST);
  } else {
    one.done();
    to_one.ended();
    first->close();
  }
  expect(exporter.event(GPULOAN_EVENT_PEER_LOST).peer == first_peer, "the wrong peer was lost");
  if (bench.own_memory()) expect(becomes([&] { return exporter.stats().quarantined_bytes == 0; }), "quarantined for ever");
  first.reset();
  wish.acquire();
  wish.fill(13);
  wish.done();
  granted.loan.ended();
  expect_pattern(bench, granted.region.pointer(), kDeathBytes, 13);
  two.check(12);
  two.done();
  to_two.ended();
  second.close();
}

// ---- The exporter dies --------------------------------------------------------------------------------------------

// Lends `keep` and, once told so, `late`; where a stream can wait, `late` is behind a stream that never goes on. Says the
// number of each loan and then waits to be killed.
int run_victim(int control, int loan_end, const Cell& cell) {
  Gpu gpu(cell.driver.c_str());
  const Bench bench{cell, gpu, Habitat::Process};
  Region::own_memory = bench.own_memory() ? &gpu : nullptr;
  if (cell.rung == GPULOAN_RUNG_POOL) gpu.alloc_from_pool();
  Exporter exporter(bench);
  expect_ok(gpuloan_context_attach(exporter.get(), loan_end, nullptr), "gpuloan_context_attach");
  gpuloan_peer* peer = exporter.event(GPULOAN_EVENT_PEER_READY).peer;
  const Region keep_region(peer, kDeathBytes);
  const Region late_region(peer, kDeathBytes);
  gpu.upload(keep_region.pointer(), kDeathBytes, 8);
  gpu.sync();
  const Lent keep = lend(bench, peer, keep_region, {});
  const auto say = [control](const Lent& lent) {
    const std::uint64_t id = lent.report().id;
    expect(::send(control, &id, sizeof id, MSG_NOSIGNAL) == sizeof id, "the test is gone");
  };
  say(keep);
  char word = 0;
  static_cast<void>(::recv(control, &word, 1, 0));
  if (no_stream_waits(bench) == nullptr) gpu.hold(1);
  gpu.upload(late_region.pointer(), kDeathBytes, 9, 1);
  const Lent late = lend(bench, peer, late_region, {.stream = 1});
  say(late);
  static_cast<void>(::recv(control, &word, 1, 0)); // never comes
  return 1;
}

namespace {

std::uint64_t hear(int control) {
  std::uint64_t id = 0;
  expect(::recv(control, &id, sizeof id, 0) == sizeof id, "the exporter ended by itself");
  return id;
}

Borrowed take(Worker& worker, std::uint64_t number, std::uint64_t id) {
  Command command;
  command.op = Op::Offered;
  command.loan = number;
  command.id = id;
  expect_status(worker.call(command).status, GPULOAN_OK, "LOAN_OFFERED");
  return {worker, number};
}

} // namespace

// The exporter's end of the socket stays open here, in a process that has no part in the loan: the death alone tells.
void killed_exporter(const Bench& bench) {
  Worker worker(bench);
  SocketPair control = make_socketpair();
  Fd loan_end(worker.take_loan_end());
  Process victim({"--victim", std::to_string(control.right.get()), std::to_string(loan_end.get()), "--driver", bench.cell.driver, "--rung",
                  gpuloan_rung_name(bench.cell.rung), "--gate", gpuloan_gate_name(bench.cell.gate), "--engine",
                  gpuloan_engine_name(bench.cell.engine)},
                 {control.right.get(), loan_end.get()});
  control.right.reset();
  const bool on_stream = no_stream_waits(bench) == nullptr;
  expect_status(worker.call(worker.open_command()).status, GPULOAN_OK, "the worker opens");
  Borrowed keep = take(worker, 1, hear(control.left.get()));
  keep.acquire();
  keep.check(8);
  expect(::send(control.left.get(), "", 1, MSG_NOSIGNAL) == 1, "the exporter ended by itself");
  Borrowed late = take(worker, 2, hear(control.left.get()));
  if (on_stream) {
    expect_status(late.try_acquire_on(10, kWaitMs).status, GPULOAN_OK, "acquire_on");
    expect(!worker.idle(10), "the stream does not wait for READY");
  }
  const std::uint64_t killed_at = now_ms();
  victim.kill();
  expect(!worker.event(GPULOAN_EVENT_PEER_LOST, GPULOAN_ERR_PEER_LOST).empty(), "no reason for the loss");
  expect(now_ms() - killed_at < kNoticedMs, "the death was not noticed within 5 s");
  if (on_stream) {
    expect(becomes([&] { return worker.idle(10); }, kNoticedMs), "the stream still waits for the dead exporter");
    expect_status(late.try_done(10).status, GPULOAN_ERR_PEER_LOST, "done after the exporter died");
  }
  expect_status(late.wait_end().status, GPULOAN_ERR_PEER_LOST, "wait_end of the loan that waited");
  keep.check(8); // what is held stays mapped
  expect_status(keep.try_done().status, GPULOAN_ERR_PEER_LOST, "done after the exporter died");
  expect_status(keep.wait_end().status, GPULOAN_ERR_PEER_LOST, "wait_end of the loan that was held");
  expect_equal(worker.stats().gpu_waits, 0U, "gpu_waits");
  worker.close();
}

} // namespace loan_test
