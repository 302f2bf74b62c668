// SPDX-License-Identifier: MIT
//
// Memory of gpuloan_torch_malloc: one descriptor for each loan however large it is, and memory that is freed too early is not
// used again before its loan has ended.
#include "suite_foreign.hpp"

namespace loan_test {
namespace {


// The canary of the way has pieces of its own.
void first_loan(const Bench& bench, gpuloan_peer* peer, Worker& worker) {
  const Foreign first(bench, Made::Torch, {.bytes = 100});
  const Lent lent = lend(bench, peer, first.pointer(), first.bytes(), {});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  loan.done();
  lent.ended();
}

} // namespace

void torch_one_piece(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  first_loan(bench, peer, worker);
  const LendArgs args = {.access = GPULOAN_ACCESS_WRITE, .policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY};
  std::uint64_t seed = 0;
  for (const std::uint64_t bytes : {std::uint64_t{1}, 20 * kMiB, 20 * kMiB + 1, 300 * kMiB}) {
    Foreign memory(bench, Made::Torch, {.bytes = bytes});
    const bool counts = bench.gpu.simulated();
    const std::int64_t imported = counts ? worker.calls("cuMemImportFromShareableHandle") : 0;
    const Lent lent = lend(bench, peer, memory.pointer(), memory.bytes(), args);
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.fill(++seed);
    loan.done();
    lent.ended();
    expect_pattern(bench, memory.pointer(), bytes, seed);
    expect_equal(lent.report().rung, GPULOAN_RUNG_VMM, "report.rung");
    expect_equal(lent.report().copied_bytes, 0U, "report.copied_bytes");
    if (counts) expect_equal(worker.calls("cuMemImportFromShareableHandle"), imported + 1, "descriptors of a loan");
  }
  worker.close();
}

// Its owner frees it while the worker still writes there. The loan keeps the memory: none of it is handed out again, and the device has it
// back when the loan ends.
void torch_freed_early(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  first_loan(bench, peer, worker);
  constexpr std::uint64_t kBytes = 64 * kMiB;
  const std::uint64_t before = bench.gpu.used_bytes();
  Released released;
  Foreign memory(bench, Made::Torch, {.bytes = kBytes});
  memory.fill(1);
  const Lent lent = lend(bench, peer, memory.pointer(), memory.bytes(),
                         with_release({.access = GPULOAN_ACCESS_WRITE, .policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY}, released));
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  const std::uint64_t lent_out = bench.gpu.used_bytes();
  memory.free();
  expect(bench.gpu.used_bytes() + kNoise >= lent_out, "the device has memory back that the worker may still write");
  Foreign next(bench, Made::Torch, {.bytes = kBytes});
  next.fill(3);
  loan.check(1);
  loan.fill(2);
  next.check(3);
  loan.check(2);
  released.expect_none("the release function while the loan is out");
  loan.done();
  lent.ended();
  released.expect_once("the release function of a loan that ended");
  next.check(3);
  next.free();
  expect(becomes([&] { return bench.gpu.used_bytes() <= before + kNoise; }), "the memory did not come back");
  worker.close();
}

} // namespace loan_test
