// SPDX-License-Identifier: MIT
//
// What a connection costs an importer: device addresses, and the CUDA context.
#include "suite.hpp"

namespace loan_test {
const char* no_costs(const Bench& bench) { return bench.gpu.simulated() ? only_vmm(bench) : "the driver counts them"; }

// D4. Each import takes the addresses of its chunk and no more; a chunk that is used again takes none.
void addresses_of_imports(const Bench& bench) {
  const std::size_t imports = bench.cell.gate == GPULOAN_GATE_EVENT ? 250 : 1000; // a peer has 256 pairs of events
  constexpr std::uint64_t kChunk = 2 * kMiB;
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  const std::int64_t before = worker.live("reserved-bytes");
  std::vector<Region> regions;
  std::vector<Lent> lents;
  std::vector<Borrowed> loans;
  for (std::size_t index = 0; index < imports; ++index) {
    regions.emplace_back(peer, kMiB + index, GPULOAN_ACCESS_READ);
    lents.push_back(lend(bench, peer, regions.back(), {}));
    loans.push_back(worker.offered(lents.back()));
    loans.back().acquire();
  }
  expect_equal(static_cast<std::uint64_t>(worker.live("reserved-bytes") - before), imports * kChunk, "addresses of imports that are held");
  for (Borrowed& loan : loans) loan.done();
  for (const Lent& lent : lents) lent.ended();
  for (std::size_t index = 0; index < imports; ++index) {
    const Lent again = lend(bench, peer, regions[index], {});
    Borrowed loan = worker.offered(again);
    loan.acquire();
    loan.done();
    again.ended();
  }
  expect_equal(static_cast<std::uint64_t>(worker.live("reserved-bytes") - before), imports * kChunk, "addresses after each was lent again");
  worker.close();
}

// D11
void no_context_before_a_loan(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench, {.flags = OpenLate});
  gpuloan_peer* peer = exporter.attach(worker);
  Borrowed denied = worker.request(kMiB);
  expect_ok(gpuloan_request_deny(exporter.event(GPULOAN_EVENT_REQUEST).request, "nothing today"), "gpuloan_request_deny");
  expect_status(denied.try_acquire(kWaitMs).status, GPULOAN_ERR_DENIED, "a request that is denied");
  expect_equal(worker.live("contexts"), 0, "CUDA contexts of a worker that is connected and borrows nothing");
  const Region region(peer, kMiB);
  const Lent lent = lend(bench, peer, region, {});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  expect_equal(worker.live("contexts"), 1, "with its first loan");
  loan.done(kCpuStream);
  lent.ended();
  worker.close();
}

} // namespace loan_test
