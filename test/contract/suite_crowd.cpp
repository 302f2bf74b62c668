// SPDX-License-Identifier: MIT
//
// Many of one kind: readers of one region, views of one block, chunks one after the other, exporters one after the other.
#include "suite.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sys/socket.h>

namespace loan_test {
namespace {

constexpr std::uint64_t kCrowdBytes = 150'001;

} // namespace

const char* no_eight_peers(const Bench&) {
  const char* limit = std::getenv("GPULOAN_SIM_PIN_LIMIT_KIB");
  return limit != nullptr && *limit != '\0' ? "the driver pins too little for the control words of eight peers" : nullptr;
}

// K6. Eight workers read one region at once, again and again, and its owner writes it anew in between.
void eight_readers(const Bench& bench) {
  Exporter exporter(bench);
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<gpuloan_peer*> peers;
  for (int index = 0; index < 8; ++index) {
    workers.push_back(std::make_unique<Worker>(bench));
    peers.push_back(exporter.attach(*workers.back()));
  }
  const Region region(peers[0], kCrowdBytes);
  for (std::uint64_t round = 1; round <= 3; ++round) {
    bench.gpu.upload(region.pointer(), kCrowdBytes, round);
    std::vector<Lent> lents;
    std::vector<Borrowed> loans;
    for (std::size_t index = 0; index < workers.size(); ++index) {
      lents.push_back(lend(bench, peers[index], region, {}));
      loans.push_back(workers[index]->offered(lents.back()));
    }
    for (Borrowed& loan : loans) loan.acquire();
    for (Borrowed& loan : loans) loan.check(round);
    for (Borrowed& loan : loans) loan.done();
    for (const Lent& lent : lents) lent.ended();
  }
  for (const auto& worker : workers) worker->close();
}

// A8. Two loans of one allocation are held at once; the end of one leaves the other its mapping.
void one_view_ends(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const Region region(peer, kCrowdBytes);
  bench.gpu.upload(region.pointer(), kCrowdBytes, 1);
  for (const bool first_ends : {true, false}) {
    const Lent first = lend(bench, peer, region, {});
    const Lent second = lend(bench, peer, region, {});
    Borrowed one = worker.offered(first), two = worker.offered(second);
    one.acquire();
    two.acquire();
    Borrowed& ends = first_ends ? one : two;
    Borrowed& stays = first_ends ? two : one;
    ends.check(1);
    ends.done();
    (first_ends ? first : second).ended();
    stays.check(1);
    stays.done();
    (first_ends ? second : first).ended();
  }
  worker.close();
}

// A5. Regions that have a chunk to themselves come and go; what is idle beyond the limit is recalled from the worker.
void chunks_come_and_go(const Bench& bench) {
  constexpr std::uint64_t kChunk = 4 * kMiB;
  Exporter exporter(bench, [](gpuloan_context_options& options) { options.idle_bytes = 2 * kChunk; });
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  const std::int64_t imports = worker.live("imports"), addresses = worker.live("reserved-bytes");
  const std::uint64_t used = bench.gpu.used_bytes();
  for (std::uint64_t round = 0; round < 4; ++round) {
    std::vector<Region> regions;
    for (std::uint64_t index = 0; index < 8; ++index) {
      regions.emplace_back(peer, kChunk - index);
      const Lent lent = lend(bench, peer, regions.back(), {.access = GPULOAN_ACCESS_WRITE});
      Borrowed loan = worker.offered(lent);
      loan.acquire();
      loan.fill(round * 8 + index);
      loan.done();
      lent.ended();
      expect_pattern(bench, regions.back().pointer(), kChunk - index, round * 8 + index);
    }
    for (Region& region : regions) region.destroy();
    expect(becomes([&] { return exporter.stats().idle_bytes <= 2 * kChunk; }), "more is idle than the option allows");
    expect(becomes([&] { return worker.live("imports") <= imports + 2; }), "imports of chunks that were recalled");
    expect(becomes([&] { return worker.live("reserved-bytes") - addresses <= static_cast<std::int64_t>(2 * kChunk); }), "addresses of chunks that were recalled");
    expect(becomes([&] { return bench.gpu.used_bytes() <= used + 2 * kChunk; }), "device memory of chunks that were recalled");
  }
  worker.close();
}

namespace {

struct Held {
  std::size_t fds, threads, mappings;
};

std::size_t entries(const char* folder) {
  const auto all = std::filesystem::directory_iterator(folder);
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

Held held_now() {
  std::ifstream maps("/proc/self/maps");
  std::size_t lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  return {open_fds().size(), entries("/proc/self/task"), lines};
}

// This process is the importer of an exporter that lends one loan and is killed while that is held.
void outlive_one(const Bench& bench, gpuloan_context* context) {
  SocketPair control = make_socketpair(), connection = make_socketpair();
  Process victim({"--victim", std::to_string(control.right.get()), std::to_string(connection.right.get()), "--driver", bench.cell.driver, "--rung",
                  gpuloan_rung_name(bench.cell.rung), "--gate", gpuloan_gate_name(bench.cell.gate), "--engine", gpuloan_engine_name(bench.cell.engine)},
                 {control.right.get(), connection.right.get()});
  control.right.reset();
  connection.right.reset();
  gpuloan_peer* peer = nullptr;
  expect_ok(gpuloan_context_adopt(context, connection.left.release(), kWaitMs, &peer), "gpuloan_context_adopt");
  auto event = init<gpuloan_event>();
  const auto wait_for = [&](std::uint32_t type) {
    do expect_ok(gpuloan_context_next_event(context, kWaitMs, &event), "gpuloan_context_next_event");
    while (event.type != type);
  };
  wait_for(GPULOAN_EVENT_LOAN_OFFERED);
  const Lent loan(event.loan);
  auto view = init<gpuloan_view>();
  expect_ok(gpuloan_loan_acquire(loan, kWaitMs, &view), "gpuloan_loan_acquire");
  const std::string wrong = bench.gpu.mismatch(view.pointer, view.bytes, 8);
  expect(wrong.empty(), wrong);
  victim.kill();
  wait_for(GPULOAN_EVENT_PEER_LOST);
  expect_status(gpuloan_loan_done(loan, bench.gpu.stream()), GPULOAN_ERR_PEER_LOST, "done after the exporter died");
  expect_status(gpuloan_loan_wait_end(loan, kNoticedMs), GPULOAN_ERR_PEER_LOST, "wait_end after the exporter died");
  gpuloan_peer_close(peer);
}

} // namespace

// B2. One importer outlives twenty exporters; each was killed while a loan was held.
void many_exporters(const Bench& bench) {
  auto options = init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_IMPORTER;
  options.rungs = bench.cell.rung;
  options.driver = bench.cell.driver.c_str();
  gpuloan_context* context = nullptr;
  expect_ok(gpuloan_context_create(&options, &context), "gpuloan_context_create");
  const auto destroy = [](gpuloan_context* last) { gpuloan_context_destroy(last); };
  const std::unique_ptr<gpuloan_context, decltype(destroy)> owner(context, destroy);
  for (int count = 0; count < 3; ++count) outlive_one(bench, context);
  Held first = {};
  expect(becomes([&] {
           const Held before = std::exchange(first, held_now());
           nap();
           return before.fds == first.fds && before.threads == first.threads && before.mappings == first.mappings;
         }), "what the importer holds does not come to rest");
  for (int count = 3; count < 20; ++count) outlive_one(bench, context);
  // The driver keeps two mappings for each process whose events were ever opened (S18); the simulated one does not.
  const std::size_t kept = bench.cell.gate == GPULOAN_GATE_EVENT && only_simulated(bench) != nullptr ? 17 * 2 : 0;
  Held last = {};
  const auto back = [&] { return last = held_now(), last.fds <= first.fds && last.threads <= first.threads && last.mappings <= first.mappings + kept + 2; };
  if (!becomes(back)) {
    fail("after 20 exporters instead of 3: " + std::to_string(last.fds) + " descriptors instead of " + std::to_string(first.fds) + ", " +
         std::to_string(last.threads) + " threads instead of " + std::to_string(first.threads) + ", " + std::to_string(last.mappings) +
         " mappings instead of " + std::to_string(first.mappings));
  }
}

} // namespace loan_test
