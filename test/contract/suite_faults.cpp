// SPDX-License-Identifier: MIT
//
// Things that break on one side while the other goes on: a CUDA context that fails with a loan out, one of two readers that
// dies.
#include "suite.hpp"

namespace loan_test {
namespace {

constexpr std::uint64_t kFaultsBytes = (std::uint64_t{1} << 20) + 3; // a chunk of its own

} // namespace

const char* only_simulated(const Bench& bench) { return bench.gpu.simulated() ? nullptr : "a fault on purpose"; }

// K5. The worker's CUDA context fails while it holds a loan: typed on both sides, and nothing of it disturbs the next worker.
void failed_context(const Bench& bench) {
  Exporter exporter(bench);
  {
    Worker worker(bench);
    gpuloan_peer* peer = exporter.attach(worker);
    warm_up(bench, peer, worker);
    Region region(peer, kFaultsBytes);
    const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    worker.fail_context();
    const gpuloan_status done = loan.try_done().status;
    expect(done != GPULOAN_OK && done != GPULOAN_ERR_TIMEOUT, "done in a failed context says " + std::string(gpuloan_status_name(done)));
    loan.give_back();
    const gpuloan_status ended = gpuloan_loan_wait_end(lent, kWaitMs);
    expect(ended != GPULOAN_OK && ended != GPULOAN_ERR_TIMEOUT, "the loan ended with " + std::string(gpuloan_status_name(ended)));
    expect(gpuloan_error_text()[0] != '\0', "no sentence");
    worker.kill();
    static_cast<void>(exporter.event(GPULOAN_EVENT_PEER_LOST));
    if (bench.own_memory()) expect(becomes([&] { return exporter.stats().quarantined_bytes == 0; }), "quarantined for ever");
    region.destroy();
    gpuloan_peer_close(peer);
  }
  Worker next(bench);
  warm_up(bench, exporter.attach(next), next);
  next.close();
}

// B6. Two workers read the same memory; one is killed, the other does not notice.
void one_reader_killed(const Bench& bench) {
  Exporter exporter(bench);
  Worker first(bench), second(bench);
  gpuloan_peer* first_peer = exporter.attach(first);
  gpuloan_peer* second_peer = exporter.attach(second);
  warm_up(bench, first_peer, first);
  warm_up(bench, second_peer, second);
  Region region(first_peer, kFaultsBytes);
  bench.gpu.upload(region.pointer(), kFaultsBytes, 3);
  const Lent one = lend(bench, first_peer, region, {});
  const Lent two = lend(bench, second_peer, region, {});
  Borrowed killed = first.offered(one);
  Borrowed reader = second.offered(two);
  killed.acquire();
  reader.acquire();
  killed.check(3);
  first.kill();
  one.ended(GPULOAN_ERR_PEER_LOST);
  reader.check(3);
  expect_equal(two.report().ended, 0, "the other reader's loan ended");
  reader.done();
  two.ended();
  if (bench.own_memory()) expect(becomes([&] { return one.report().memory_state == GPULOAN_MEMORY_RELEASED; }), "quarantined for ever");
  region.destroy();
  second.close();
}

} // namespace loan_test
