// SPDX-License-Identifier: MIT
//
// What may not be done, and loans that end without success.
#include "suite.hpp"

#include "../support/pattern.hpp"

namespace loan_test {
namespace {

constexpr std::uint64_t kRulesBytes = 200'000;

void finish(Borrowed loan, const Lent& lent) {
  loan.acquire();
  loan.done();
  lent.ended();
}

void expect_busy(const Bench& bench, gpuloan_peer* peer, std::uint64_t pointer, std::uint64_t bytes, gpuloan_access access,
                 std::string_view what) {
  gpuloan_loan* none = nullptr;
  expect_status(try_lend(bench, peer, pointer, bytes, {.access = access}, &none), GPULOAN_ERR_BUSY, what);
  expect(none == nullptr, "an output was written by a call that failed");
  expect_contains(gpuloan_error_text(), "is lent for", what);
}

} // namespace

// A6, A16
void busy_rules(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  Region region(peer, kRulesBytes);
  const std::uint64_t at = region.pointer();
  {
    const Lent first = lend(bench, peer, region, {});
    const Lent second = lend(bench, peer, region, {});
    const Lent part = lend(bench, peer, at + 1000, 1000, {});
    expect_busy(bench, peer, at, kRulesBytes, GPULOAN_ACCESS_WRITE, "write under read");
    expect_busy(bench, peer, at + kRulesBytes - 1, 1, GPULOAN_ACCESS_WRITE, "write under the last byte of a read loan");
    if (!bench.own_memory()) expect_status(gpuloan_region_destroy(region.get()), GPULOAN_ERR_BUSY, "destroy under read");
    finish(worker.offered(second), second);
    finish(worker.offered(part), part);
    expect_busy(bench, peer, at, kRulesBytes, GPULOAN_ACCESS_WRITE, "write under the reader that is left");
    finish(worker.offered(first), first);
  }
  {
    const Lent low = lend(bench, peer, at, kRulesBytes / 2, {.access = GPULOAN_ACCESS_WRITE});
    const Lent high = lend(bench, peer, at + kRulesBytes / 2, kRulesBytes / 2, {.access = GPULOAN_ACCESS_WRITE});
    expect_busy(bench, peer, at, 1, GPULOAN_ACCESS_WRITE, "write under write");
    expect_busy(bench, peer, at + kRulesBytes / 2 - 1, 2, GPULOAN_ACCESS_READ, "read under two writers");
    if (!bench.own_memory()) expect_status(gpuloan_region_destroy(region.get()), GPULOAN_ERR_BUSY, "destroy under write");
    finish(worker.offered(high), high);
    finish(worker.offered(low), low);
  }
  region.destroy();
  worker.close();
}

// The worker holds the loan when it is cancelled: failed at once, held until the worker lets go, then as good as new.
void cancel_held(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  Region region(peer, kRulesBytes);
  const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  loan.fill(1);
  expect_ok(gpuloan_loan_cancel(lent, "the request was withdrawn"), "gpuloan_loan_cancel");
  expect_status(lent.report().outcome, GPULOAN_ERR_CANCELLED, "outcome right after cancel");
  expect_status(gpuloan_loan_wait_done(lent, kWaitMs), GPULOAN_ERR_CANCELLED, "wait_done after cancel");
  expect_contains(gpuloan_error_text(), "the request was withdrawn", "the text of wait_done");
  expect(becomes([&] { return loan.report().outcome == GPULOAN_ERR_CANCELLED; }), "the worker does not learn of the cancel");
  expect_contains(loan.report().outcome_text, "the request was withdrawn", "the reason at the worker");
  expect_equal(lent.report().memory_state, GPULOAN_MEMORY_HELD, "memory_state while the worker holds it");
  expect_equal(lent.report().ended, 0, "ended while the worker holds it");
  expect_busy(bench, peer, region.pointer(), kRulesBytes, GPULOAN_ACCESS_READ, "lend of held memory");
  if (!bench.own_memory()) expect_status(gpuloan_region_destroy(region.get()), GPULOAN_ERR_BUSY, "destroy of held memory");
  expect_status(loan.try_done().status, GPULOAN_ERR_CANCELLED, "done of a cancelled loan");
  lent.ended(GPULOAN_ERR_CANCELLED);
  expect_status(loan.wait_end().status, GPULOAN_ERR_CANCELLED, "wait_end at the worker");
  expect_equal(lent.report().memory_state, GPULOAN_MEMORY_RELEASED, "memory_state after the ACK");
  bench.gpu.upload(region.pointer(), kRulesBytes, 9);
  const Lent again = lend(bench, peer, region, {});
  Borrowed next = worker.offered(again);
  next.acquire();
  next.check(9);
  next.done();
  again.ended();
  region.destroy();
  worker.close();
}

// A3. Cancelled before the worker took it, and between two turns: it ends by itself.
void cancel_waiting(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const Region region(peer, kRulesBytes);
  {
    const Lent lent = lend(bench, peer, region, {});
    Borrowed loan = worker.offered(lent);
    expect_ok(gpuloan_loan_cancel(lent, nullptr), "gpuloan_loan_cancel");
    lent.ended(GPULOAN_ERR_CANCELLED);
    expect_status(loan.try_acquire(kWaitMs).status, GPULOAN_ERR_CANCELLED, "acquire of a cancelled loan");
    expect_status(gpuloan_loan_cancel(lent, nullptr), GPULOAN_ERR_STATE, "cancel of a loan that has ended");
  }
  const Lent open = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE, .keep_open = true});
  Borrowed loan = worker.offered(open);
  loan.acquire();
  loan.fill(4);
  loan.done();
  open.done();
  worker.post(loan.command(Op::Acquire)); // waits for turn 2
  expect_ok(gpuloan_loan_cancel(open, "no more"), "gpuloan_loan_cancel");
  expect_status(worker.reply().status, GPULOAN_ERR_CANCELLED, "a waiting acquire");
  open.ended(GPULOAN_ERR_CANCELLED);
  expect_status(gpuloan_loan_ready(open, bench.gpu.stream()), GPULOAN_ERR_STATE, "ready after the end");
  worker.close();
}

void failed_work(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  Region region(peer, kRulesBytes);
  const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  loan.fail_with("the kernel said 42");
  expect_status(gpuloan_loan_wait_done(lent, kWaitMs), GPULOAN_ERR_FAILED, "wait_done");
  expect_contains(gpuloan_error_text(), "the kernel said 42", "the text of wait_done");
  lent.ended(GPULOAN_ERR_FAILED);
  expect_contains(lent.report().outcome_text, "the kernel said 42", "outcome_text");
  expect_equal(lent.report().memory_state, GPULOAN_MEMORY_RELEASED, "memory_state");
  expect_equal(static_cast<int>(exporter.event(GPULOAN_EVENT_LOAN_ENDED).status), GPULOAN_ERR_FAILED, "status of LOAN_ENDED");
  expect_status(loan.wait_end().status, GPULOAN_ERR_FAILED, "wait_end at the worker");
  expect_equal(exporter.stats().loans_failed, 1U, "loans_failed");
  region.destroy();
  worker.close();
}

// Returned with a turn acquired, and without one ever being acquired.
void returned_unfinished(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const Region region(peer, kRulesBytes);
  for (const bool acquired : {true, false}) {
    const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
    Borrowed loan = worker.offered(lent);
    if (acquired) loan.acquire();
    loan.give_back();
    expect_status(gpuloan_loan_wait_done(lent, kWaitMs), GPULOAN_ERR_RETURNED, "wait_done");
    lent.ended(GPULOAN_ERR_RETURNED);
    expect_status(loan.wait_end().status, GPULOAN_ERR_RETURNED, "wait_end at the worker");
    expect(lent.report().outcome_text[0] != '\0', "no sentence for the outcome");
  }
  const Lent dropped = lend(bench, peer, region, {});
  Borrowed loan = worker.offered(dropped);
  worker.call(loan.command(Op::Unref)); // the last reference: as a return
  dropped.ended(GPULOAN_ERR_RETURNED);
  const Lent open = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE, .keep_open = true});
  Borrowed kept = worker.offered(open);
  kept.acquire();
  kept.fill(3);
  kept.done();
  expect_status(kept.wait_done().status, GPULOAN_OK, "wait_done at the worker");
  kept.give_back(); // every turn is done: a good end
  open.ended();
  expect_pattern(bench, region.pointer(), region.bytes(), 3);
  worker.close();
}

void denied_request(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  exporter.attach(worker);
  Borrowed wish = worker.request(kRulesBytes);
  expect_status(wish.try_acquire(0).status, GPULOAN_ERR_TIMEOUT, "acquire before the answer");
  const gpuloan_event event = exporter.event(GPULOAN_EVENT_REQUEST);
  expect_ok(gpuloan_request_deny(event.request, "no room for you"), "gpuloan_request_deny");
  const Reply reply = wish.try_acquire(kWaitMs);
  expect_status(reply.status, GPULOAN_ERR_DENIED, "acquire after the denial");
  expect_contains(reply.text, "no room for you", "the reason at the worker");
  expect_status(wish.wait_end().status, GPULOAN_ERR_DENIED, "wait_end");
  // A wish that its worker gave up is granted into the void.
  Borrowed dropped = worker.request(kRulesBytes);
  dropped.give_back();
  const Granted granted = grant(bench, exporter.event(GPULOAN_EVENT_REQUEST).request, {});
  granted.loan.ended(GPULOAN_ERR_RETURNED);
  worker.close();
}

void metadata(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  std::vector<unsigned char> bytes(GPULOAN_METADATA_MAX + 1);
  write_pattern(bytes, 77);
  const std::span all(bytes);
  const Region region(peer, 100);
  const Lent lent = lend(bench, peer, region, {.metadata = all.first(GPULOAN_METADATA_MAX)});
  Borrowed reader = worker.offered(lent);
  reader.acquire();
  reader.metadata(GPULOAN_METADATA_MAX, 77);
  reader.done();
  lent.ended();
  gpuloan_loan* none = nullptr;
  expect_status(try_lend(bench, peer, region.pointer(), 100, {.metadata = all}, &none), GPULOAN_ERR_LIMIT, "4097 bytes of metadata");

  Borrowed writer = worker.request(100, GPULOAN_METADATA_MAX, 78);
  const gpuloan_event event = exporter.event(GPULOAN_EVENT_REQUEST);
  auto info = init<gpuloan_request_info>();
  expect_ok(gpuloan_request_info_get(event.request, &info), "gpuloan_request_info_get");
  expect_equal(info.metadata_bytes, GPULOAN_METADATA_MAX, "metadata_bytes of the request");
  const std::span seen(static_cast<const unsigned char*>(info.metadata), info.metadata_bytes);
  expect(pattern_mismatch(seen, 78) == seen.size(), "the metadata of the request is not what was sent");
  const Granted granted = grant(bench, event.request, {});
  writer.acquire();
  writer.metadata(GPULOAN_METADATA_MAX, 78); // grant gave none, so the request's comes back
  writer.done();
  granted.loan.ended();
  Command too_much;
  too_much.op = Op::Request;
  too_much.loan = 999;
  too_much.bytes = 1;
  too_much.metadata_bytes = GPULOAN_METADATA_MAX + 1;
  expect_status(worker.call(too_much).status, GPULOAN_ERR_LIMIT, "a request with 4097 bytes of metadata");
  worker.close();
}

// A2, C3, M2. Calls that are wrong in the loan's state get STATE and change nothing.
void wrong_calls(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const Region region(peer, kRulesBytes);
  const Lent lent = lend(bench, peer, region, {});
  Borrowed loan = worker.offered(lent);
  expect_status(loan.try_done().status, GPULOAN_ERR_STATE, "done before acquire");
  loan.acquire();
  expect_status(loan.try_acquire(0).status, GPULOAN_ERR_STATE, "acquire of a turn that is acquired");
  expect_status(gpuloan_loan_ready(lent, bench.gpu.stream()), GPULOAN_ERR_STATE, "ready without keep_open");
  gpuloan_view view = init<gpuloan_view>();
  expect_status(gpuloan_loan_acquire(lent, 0, &view), GPULOAN_ERR_STATE, "acquire at the exporter");
  loan.done();
  lent.ended();
  expect_status(loan.try_done().status, GPULOAN_ERR_STATE, "done twice");
  expect_status(loan.try_acquire(0).status, GPULOAN_ERR_STATE, "acquire after the end");
  gpuloan_loan* none = nullptr;
  if (!bench.own_memory()) {
    const Region read_only(peer, kRulesBytes, GPULOAN_ACCESS_READ);
    expect_status(try_lend(bench, peer, read_only.pointer(), kRulesBytes, {.access = GPULOAN_ACCESS_WRITE}, &none), GPULOAN_ERR_INVALID,
                  "write loan of a region made for reading");
  }
  expect_status(try_lend(bench, peer, UINT64_MAX, 2, {}, &none), GPULOAN_ERR_INVALID, "a range that wraps around");
  worker.close();
}

} // namespace loan_test
