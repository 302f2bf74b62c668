// SPDX-License-Identifier: MIT
//
// Several loans of one block: every view shows its own bytes (I1), the worker opens the block once and has closed it before
// its owner hears of the last loan's end, and memory in many chunks crosses however many loans want it at once.
#include "suite_foreign.hpp"

#include <csignal>

namespace loan_test {
namespace {


struct View {
  std::uint64_t offset, bytes, seed;
};
// Four that fill the block, and four that lie in them.
constexpr View kViews[] = {{0, kMiB, 1},
                           {kMiB, kMiB, 2},
                           {2 * kMiB, kMiB, 3},
                           {3 * kMiB, kMiB, 4},
                           {0, 64, 1},
                           {kMiB, 16 * 1024, 2},
                           {2 * kMiB, 128 * 1024, 3},
                           {3 * kMiB, 512 * 1024, 4}};

// Nobody has the block any more, so its memory is there as soon as it is freed; a real driver may take its time.
void free_block(const Bench& bench, std::uint64_t block) {
  const std::uint64_t used = bench.gpu.used_bytes();
  bench.gpu.free(block);
  const auto back = [&] { return bench.gpu.used_bytes() + 4 * kMiB <= used; };
  expect(bench.gpu.simulated() ? back() : becomes(back), "the block's memory did not come back");
}

// All views out for read at once; ended one after the other.
void read_views(const Bench& bench, gpuloan_peer* peer, Worker& worker, std::uint64_t block) {
  const std::int64_t opened = worker.calls("cuIpcOpenMemHandle");
  const std::int64_t closed = worker.calls("cuIpcCloseMemHandle");
  for (unsigned index = 0; index < 4; ++index) bench.gpu.upload(block + kViews[index].offset, kViews[index].bytes, kViews[index].seed);
  std::vector<Lent> lent;
  std::vector<Borrowed> loans;
  for (const View& view : kViews) {
    lent.push_back(lend(bench, peer, block + view.offset, view.bytes, {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY}));
    loans.push_back(worker.offered(lent.back()));
    expect_equal(loans.back().acquire().bytes, view.bytes, "view.bytes");
  }
  const bool counts = bench.gpu.simulated();
  if (counts) expect_equal(worker.calls("cuIpcOpenMemHandle"), opened + 1, "cuIpcOpenMemHandle for eight views of one block");
  for (std::size_t index = 0; index < loans.size(); ++index) {
    const View& view = kViews[index];
    loans[index].check(view.seed);
    const gpuloan_loan_report report = lent[index].report();
    expect_equal(report.rung, GPULOAN_RUNG_IPC, "report.rung");
    expect_equal(report.exposed_bytes, 4 * kMiB - view.bytes, "report.exposed_bytes");
    expect_equal(loans[index].report().exposed_bytes, report.exposed_bytes >> 10 << 10, "exposed_bytes at the worker");
  }
  for (std::size_t index = 0; index < loans.size(); ++index) {
    if (counts) expect_equal(worker.calls("cuIpcCloseMemHandle"), closed, "cuIpcCloseMemHandle while views are out");
    loans[index].done();
    lent[index].ended();
    expect_steps(lent[index].report());
  }
  if (!counts) return;
  expect_equal(worker.calls("cuIpcCloseMemHandle"), closed + 1, "cuIpcCloseMemHandle when the last loan ended");
  expect_equal(worker.calls("cuIpcOpenMemHandle"), opened + 1, "cuIpcOpenMemHandle in the end");
}

// Four writers at once, each in its part.
void write_views(const Bench& bench, gpuloan_peer* peer, Worker& worker, std::uint64_t block) {
  std::vector<Lent> lent;
  std::vector<Borrowed> loans;
  for (unsigned index = 0; index < 4; ++index) {
    lent.push_back(lend(bench, peer, block + kViews[index].offset, kMiB, {.access = GPULOAN_ACCESS_WRITE}));
    loans.push_back(worker.offered(lent.back()));
  }
  for (Borrowed& loan : loans) loan.acquire();
  for (unsigned index = 0; index < 4; ++index) loans[3 - index].fill(50 + 3 - index);
  for (unsigned index = 0; index < 4; ++index) {
    loans[index].done();
    lent[index].ended();
  }
  for (unsigned index = 0; index < 4; ++index) expect_pattern(bench, block + kViews[index].offset, kMiB, 50 + index);
}

} // namespace

// A1, A4, A7, I1, I2
void views_of_a_block(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  { // the canary has an opening of its own
    Foreign first(bench, Made::Alloc, {.bytes = 100});
    const Lent lent = lend(bench, peer, first.pointer(), 100, {});
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.done();
    lent.ended();
  }
  const std::uint64_t block = bench.gpu.alloc(4 * kMiB);
  read_views(bench, peer, worker, block);
  write_views(bench, peer, worker, block);
  const std::int64_t opened = worker.calls("cuIpcOpenMemHandle");
  if (bench.gpu.simulated()) expect_equal(worker.calls("cuIpcCloseMemHandle"), opened, "openings that were not closed");
  free_block(bench, block);
  worker.close();
}

// P14: a block that comes after another at the same address is another block.
void address_used_again(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  for (std::uint64_t round = 1; round <= 10; ++round) {
    Foreign memory(bench, Made::Alloc, {.bytes = 2 * kMiB, .before = 64});
    memory.fill(round);
    const Lent read = lend(bench, peer, memory.pointer(), memory.bytes(), {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY});
    const Lent part = lend(bench, peer, memory.pointer(), 1000, {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY});
    Borrowed reader = worker.offered(read);
    Borrowed part_reader = worker.offered(part);
    reader.acquire();
    part_reader.acquire();
    part_reader.check(round);
    part_reader.done();
    part.ended();
    reader.check(round);
    reader.done();
    read.ended();
    memory.free();
  }
  worker.close();
}

namespace {

constexpr std::uint64_t kManyChunks = 70; // the credit is 64

Shape many_chunks() { return {.bytes = kManyChunks * kChunk - 2000, .before = 1000}; }

} // namespace

// Three loans of 70 chunks are under way at once, and two of them are acquired in the other order.
void many_pieces(const Bench& bench) {
  const Foreign memory(bench, Made::VmmMany, many_chunks());
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const std::uint64_t seam = memory.base() + 69 * kChunk - 500; // a part that needs two chunks alone
  bench.gpu.upload(seam, 1000, 9);
  std::vector<Lent> lent;
  std::vector<Borrowed> loans;
  const LendArgs args = {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY};
  lent.push_back(lend(bench, peer, memory.pointer(), memory.bytes(), args));
  lent.push_back(lend(bench, peer, memory.pointer(), memory.bytes(), args));
  lent.push_back(lend(bench, peer, seam, 1000, args));
  for (const Lent& each : lent) loans.push_back(worker.offered(each));
  for (const std::size_t index : {std::size_t{2}, std::size_t{1}, std::size_t{0}}) loans[index].acquire();
  loans[2].check(9);
  for (const std::size_t index : {std::size_t{1}, std::size_t{2}, std::size_t{0}}) {
    loans[index].done();
    lent[index].ended();
    expect_equal(lent[index].report().rung, GPULOAN_RUNG_VMM, "report.rung");
  }
  worker.close();
}

// A loan whose chunks are still on their way is cancelled; the descriptors' credit comes back all the same.
void pieces_cancelled(const Bench& bench) {
  const Foreign memory(bench, Made::VmmMany, many_chunks());
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const LendArgs args = {.access = GPULOAN_ACCESS_WRITE, .policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY};
  for (int round = 0; round < 3; ++round) {
    const Lent lent = lend(bench, peer, memory.pointer(), memory.bytes(), args);
    expect_ok(gpuloan_loan_cancel(lent, "changed my mind"), "gpuloan_loan_cancel");
    lent.ended(GPULOAN_ERR_CANCELLED);
    expect_equal(lent.report().memory_state, GPULOAN_MEMORY_RELEASED, "memory_state");
  }
  bench.gpu.upload(memory.base() + 64 * kChunk - 8, 16, 1);
  const Lent lent = lend(bench, peer, memory.base() + 64 * kChunk - 8, 16, args);
  const Lent whole = lend(bench, peer, memory.pointer(), 63 * kChunk, args);
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  loan.check(1);
  loan.done();
  lent.ended();
  Borrowed rest = worker.offered(whole);
  rest.acquire();
  rest.done();
  whole.ended();
  worker.close();
}

// The worker stands still, so that pieces wait for credit, and is killed then: what was to follow is forgotten.
void pieces_killed(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  { // the canary of this way needs a worker that answers
    const Foreign first(bench, Made::VmmMany, {.bytes = 100});
    const Lent lent = lend(bench, peer, first.pointer(), first.bytes(), {});
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.done();
    lent.ended();
  }
  const std::uint64_t used_before = bench.gpu.used_bytes();
  Foreign memory(bench, Made::VmmMany, many_chunks());
  const LendArgs args = {.access = GPULOAN_ACCESS_WRITE, .policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY};
  const auto exports = [&] { return bench.gpu.simulated() ? bench.gpu.call.sim_calls("cuMemExportToShareableHandle") : 0; };
  const std::int64_t first = exports();
  ::kill(worker.pid(), SIGSTOP);
  const Lent lent = lend(bench, peer, memory.pointer(), memory.bytes(), args);
  if (bench.gpu.simulated()) expect(becomes([&] { return exports() >= first + 64; }), "64 descriptors were not sent");
  worker.kill();
  lent.ended(GPULOAN_ERR_PEER_LOST);
  expect(becomes([&] { return lent.report().memory_state == GPULOAN_MEMORY_RELEASED; }), "quarantined for ever");
  memory.free();
  const std::uint64_t noise = bench.gpu.simulated() ? 0 : kNoise;
  expect(becomes([&] { return bench.gpu.used_bytes() <= used_before + noise; }, 5000), "the chunks' memory did not come back");
}

// B4: closing a block's handle stands behind all work of the worker's context (S10), here behind a stream of the worker's own that goes
// on much later. The driver launches nothing else of the worker's meanwhile; its loop answers, and the block's loan ends when that
// stream does.
void closing_stuck(const Bench& bench) {
  constexpr unsigned kStuck = 10; // a stream of the worker's
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  const Region slow_region(peer, kMiB, GPULOAN_ACCESS_WRITE);
  const Lent slow = lend(bench, peer, slow_region, {.access = GPULOAN_ACCESS_WRITE});
  Borrowed slow_loan = worker.offered(slow);
  slow_loan.acquire();
  Foreign block(bench, Made::Alloc, {.bytes = kMiB});
  const LendArgs zero_copy = {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY};
  for (const bool stuck : {false, true}) { // the first: so that its canary is done
    block.fill(1);
    const Lent lent = lend(bench, peer, block.pointer(), block.bytes(), zero_copy);
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.check(1);
    if (stuck) {
      worker.hold(kStuck);
      slow_loan.fill(9, kStuck);
    }
    loan.done();
    if (stuck) {
      for (int round = 0; round < 3; ++round) {
        const Region region(peer, kMiB, GPULOAN_ACCESS_WRITE);
        const Lent other = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
        static_cast<void>(worker.offered(other));
        expect_ok(gpuloan_loan_cancel(other, "not needed"), "gpuloan_loan_cancel");
        other.ended(GPULOAN_ERR_CANCELLED);
      }
      expect_equal(lent.report().ended, 0, "the block was let go behind a stream that is stuck");
      expect_equal(worker.stats().loans_out, 2U, "loans out at the worker");
      worker.release(kStuck);
    }
    lent.ended();
  }
  slow_loan.done(kStuck);
  slow.ended();
  block.free();
  worker.close();
}

const char* no_stream_wait_skip(const Bench& bench) {
  if (under_mps(bench)) return under_mps_skip(bench);
  return bench.cell.gate == GPULOAN_GATE_MEMOP ? nullptr : "a stream waits for READY only with the memop gate";
}

// S10: no handle is closed while a stream waits for the exporter. Else the worker could launch nothing until READY, which may come behind
// what it is to launch. When the wait is over the block is let go.
void closing_waits(const Bench& bench) {
  constexpr unsigned kProducer = 1, kConsumer = 10;
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  Foreign block(bench, Made::Alloc, {.bytes = kMiB});
  const LendArgs zero_copy = {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY};
  const auto borrow_block = [&](const Lent& lent) {
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.check(1);
    return loan;
  };
  block.fill(1);
  const Lent early = lend(bench, peer, block.pointer(), block.bytes(), zero_copy); // so that its canary is done
  borrow_block(early).done();
  early.ended();
  const Lent lent = lend(bench, peer, block.pointer(), block.bytes(), zero_copy);
  Borrowed loan = borrow_block(lent);
  const Region late_region(peer, kMiB);
  bench.gpu.hold(kProducer);
  bench.gpu.upload(late_region.pointer(), kMiB, 7, kProducer);
  const Lent late = lend(bench, peer, late_region, {.stream = kProducer});
  Borrowed late_loan = worker.offered(late);
  expect_status(late_loan.try_acquire_on(kConsumer, kWaitMs).status, GPULOAN_OK, "acquire_on");
  loan.done();
  for (std::uint64_t seed = 2; seed < 5; ++seed) {
    const Region region(peer, kMiB, GPULOAN_ACCESS_WRITE);
    const Lent other = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
    Borrowed writer = worker.offered(other);
    writer.acquire();
    writer.fill(seed);
    writer.done();
    other.ended();
    expect_pattern(bench, region.pointer(), kMiB, seed);
  }
  const Lent second = lend(bench, peer, late_region, {.stream = kProducer});
  Borrowed second_loan = worker.offered(second);
  expect_status(second_loan.try_acquire_on(kConsumer + 1, kWaitMs).status, GPULOAN_OK, "acquire_on while a block is to be let go");
  expect_equal(lent.report().ended, 0, "the block was let go while a stream waits");
  bench.gpu.release(kProducer);
  lent.ended();
  for (const auto& [reader, stream] : {std::pair(&late_loan, kConsumer), std::pair(&second_loan, kConsumer + 1)}) {
    reader->check(7, stream);
    reader->done(stream);
  }
  late.ended();
  second.ended();
  block.free();
  worker.close();
}

} // namespace loan_test
