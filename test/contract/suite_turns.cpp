// SPDX-License-Identifier: MIT
//
// Turns that follow each other closely: the importer goes by an event in front of DONE, which the device writes a moment later.
#include "suite.hpp"

#include <atomic>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>

namespace loan_test {
namespace {

constexpr std::uint64_t kTurnsBytes = 100'003;

// Stores 0 into DONE of every slot, all the time: this process, the exporter, has the same pages as the library in it.
class Spoiler {
 public:
  Spoiler() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      unsigned long begin = 0, end = 0;
      if (line.find("gpuloan-words") == std::string::npos || std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2) continue;
      for (; begin < end; begin += kSlotBytes) words_.push_back(reinterpret_cast<std::uint64_t*>(begin + kDoneAt));
    }
    expect(!words_.empty(), "the control words are mapped here");
    thread_ = std::thread([this] {
      while (!stop_) {
        for (std::uint64_t* word : words_) std::atomic_ref(*word).store(0);
      }
    });
  }
  Spoiler(const Spoiler&) = delete;
  Spoiler& operator=(const Spoiler&) = delete;
  ~Spoiler() {
    stop_ = true;
    thread_.join();
  }

 private:
  static constexpr std::size_t kSlotBytes = 128, kDoneAt = 64; // docs/protocol.md
  std::vector<std::uint64_t*> words_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

void fill_turn(Borrowed& loan, std::uint64_t seed) {
  loan.acquire();
  loan.fill(seed);
  loan.done();
}

} // namespace

// As a stream waits for them.
const char* no_words_by_device(const Bench& bench) {
  return no_stream_waits(bench) == nullptr ? nullptr : "the device writes DONE behind its event only on vmm with the memop gate";
}

// The worker's work is over whatever the word says. The exporter that spoils it waits for nothing but its own turn, the slot serves the next loan, and
// a worker that turns its loop itself does not stand behind its other streams for it.
void spoiled_done(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench, {.flags = OpenCallerLoop});
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  const Region region(peer, kTurnsBytes), other_region(peer, kTurnsBytes);
  const Lent other = lend(bench, peer, other_region, {.access = GPULOAN_ACCESS_WRITE, .keep_open = true});
  Borrowed kept = worker.offered(other);
  fill_turn(kept, 4);
  other.done();
  for (const bool taken_back : {true, false}) {
    const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE, .keep_open = true});
    Borrowed loan = worker.offered(lent);
    fill_turn(loan, 1);
    lent.done();
    expect_pattern(bench, region.pointer(), kTurnsBytes, 1);
    expect_ok(gpuloan_loan_ready(lent, bench.gpu.stream()), "gpuloan_loan_ready");
    loan.acquire();
    worker.delay(0);
    loan.fill(2);
    {
      const Spoiler spoiler;
      loan.done();
      expect_status(loan.wait_done().status, GPULOAN_OK, "wait_done at the worker, whose word is spoiled");
      worker.hold(1);
      worker.delay(1);
      if (taken_back) loan.give_back();
      else expect_ok(gpuloan_loan_cancel(lent, "spoiled"), "gpuloan_loan_cancel");
      expect_status(kept.try_acquire(100).status, GPULOAN_ERR_TIMEOUT, "acquire of another loan, while one is on its way to its end");
      worker.release(1);
      expect(loan.wait_end().status != GPULOAN_ERR_TIMEOUT, "the loan ends at the worker, whose word is spoiled");
    }
    expect_status(gpuloan_loan_wait_end(lent, kWaitMs), lent.report().outcome, "the loan ends at the exporter");
    const Lent next = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE});
    Borrowed again = worker.offered(next);
    fill_turn(again, 3);
    next.ended();
    expect_pattern(bench, region.pointer(), kTurnsBytes, 3);
  }
  expect_ok(gpuloan_reclaim(other, kWaitMs), "gpuloan_reclaim");
  worker.close();
}

} // namespace loan_test
