// SPDX-License-Identifier: MIT
//
// Threads of one process on one context: four that lend, each from a pool of its own or all of one block, and at the other
// end four that take whatever was offered, acquire it, compare it and end it (cases A9, A10). The other end has two
// contexts with a connection each, since a driver's mappings are the process's. Each side is a process, so that under ThreadSanitizer
// each is looked at.
#include "../support/check.hpp"
#include "../support/gpu.hpp"
#include "../support/host.hpp"

#include <gpuloan/gpuloan.hpp>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <functional>
#include <thread>
#include <vector>

namespace loan_test {
namespace {

using gpuloan::Milliseconds;

constexpr Milliseconds kPatience{20'000};
constexpr unsigned kThreads = 4;
constexpr unsigned kLoans = 60; // of each thread

gpuloan::Context make(std::uint32_t role) {
  auto options = gpuloan::init<gpuloan_context_options>();
  options.role = role;
  options.driver = "sim";
  options.canary_timeout_ms = 20'000; // ThreadSanitizer on a busy machine
  options.rungs = GPULOAN_RUNG_VMM | GPULOAN_RUNG_POOL | GPULOAN_RUNG_IPC | GPULOAN_RUNG_HOST;
  return gpuloan::Context::create(options);
}

void in_threads(const std::function<void(unsigned)>& body) {
  std::vector<std::thread> threads;
  for (unsigned index = 0; index < kThreads; ++index) {
    threads.emplace_back([&body, index] {
      try {
        body(index);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "threads_test: thread %u: %s\n", index, error.what());
        std::_Exit(1);
      } catch (const Failure& failure) {
        std::fprintf(stderr, "threads_test: thread %u: %s\n", index, failure.text.c_str());
        std::_Exit(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// What is lent is filled with the pattern of its own size.
void take(gpuloan::Context& context, Gpu& gpu, std::atomic<bool>& over) {
  while (!over) {
    auto event = context.next_event(Milliseconds(100));
    if (event && event->type() == GPULOAN_EVENT_PEER_LOST) over = true;
    if (!event || event->type() != GPULOAN_EVENT_LOAN_OFFERED) continue;
    gpuloan::Loan loan = event->take_loan();
    const gpuloan_view view = loan.acquire(kPatience);
    const std::string wrong = gpu.mismatch(view.pointer, view.bytes, view.bytes);
    expect(wrong.empty(), wrong);
    loan.done(gpu.stream());
    loan.wait_end(kPatience);
  }
}

struct Connection {
  gpuloan::Context context;
  gpuloan::Peer peer;
  std::atomic<bool> over = false;
};

int run_importer(const std::array<int, 2>& ends) {
  die_with_parent();
  watchdog(120, "the importer's threads");
  std::array<Connection, 2> connections;
  for (std::size_t index = 0; index < ends.size(); ++index) {
    ::fcntl(ends[index], F_SETFD, FD_CLOEXEC);
    connections[index].context = make(GPULOAN_ROLE_IMPORTER);
    connections[index].peer = connections[index].context.adopt(ends[index], kPatience);
  }
  in_threads([&](unsigned thread) {
    Gpu gpu("sim");
    take(connections[thread % 2].context, gpu, connections[thread % 2].over);
  });
  return 0;
}

void lend_and_wait(gpuloan::Peer& peer, Gpu& gpu, std::uint64_t pointer, std::uint64_t bytes, std::uint32_t rung) {
  auto options = gpuloan::init<gpuloan_lend_options>();
  options.access = GPULOAN_ACCESS_READ;
  options.stream = gpu.stream();
  options.rungs = rung;
  options.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY;
  gpuloan::Loan loan = peer.lend(pointer, bytes, options);
  loan.wait_end(kPatience);
  expect(loan.report().rung == rung, "another rung");
}

// A10. Pools are made, exported, lent from and destroyed by all threads at once.
void lend_from_pools(std::array<gpuloan::Peer, 2>& peers) {
  in_threads([&](unsigned thread) {
    for (unsigned pool = 0; pool < 3; ++pool) {
      Gpu gpu("sim");
      gpu.alloc_from_pool();
      for (unsigned loan = 0; loan < kLoans / 3; ++loan) {
        const std::uint64_t bytes = 10'000 + 1000 * thread + loan;
        const std::uint64_t pointer = gpu.alloc(bytes);
        gpu.upload(pointer, bytes, bytes);
        lend_and_wait(peers[thread % 2], gpu, pointer, bytes, GPULOAN_RUNG_POOL);
        gpu.free(pointer);
      }
    }
  });
}

// A9. Everybody lends the same block, so that the importer's threads open, hold and close one and the same mapping.
void lend_one_block(std::array<gpuloan::Peer, 2>& peers, std::uint32_t rung) {
  Gpu gpu("sim");
  if (rung == GPULOAN_RUNG_POOL) gpu.alloc_from_pool();
  constexpr std::uint64_t bytes = 50'000;
  const std::uint64_t pointer = gpu.alloc(bytes);
  gpu.upload(pointer, bytes, bytes);
  gpu.sync();
  in_threads([&](unsigned thread) {
    Gpu own("sim");
    for (unsigned loan = 0; loan < kLoans; ++loan) lend_and_wait(peers[thread % 2], own, pointer, bytes, rung);
  });
  gpu.free(pointer);
}

int run_exporter() {
  watchdog(120, "the exporter's threads");
  const TempFolder folder("gpuloan-threads");
  use_private_sim(folder);
  SocketPair one = make_socketpair(), two = make_socketpair();
  Process importer({"--importer", std::to_string(one.right.get()), std::to_string(two.right.get())}, {one.right.get(), two.right.get()});
  one.right.reset();
  two.right.reset();
  {
    gpuloan::Context context = make(GPULOAN_ROLE_EXPORTER);
    context.attach(one.left.release(), "threads");
    context.attach(two.left.release(), "threads");
    std::array<gpuloan::Peer, 2> peers;
    while (!peers[1]) {
      auto event = context.next_event(kPatience);
      expect(event.has_value(), "no PEER_READY");
      if (event->type() == GPULOAN_EVENT_PEER_READY) peers[peers[0] ? 1 : 0] = event->take_peer();
    }
    lend_from_pools(peers);
    lend_one_block(peers, GPULOAN_RUNG_POOL);
    lend_one_block(peers, GPULOAN_RUNG_IPC);
    expect(context.stats().loans_out == 0, "loans are out in the end");
    expect(context.stats().quarantined_bytes == 0, "bytes are quarantined in the end");
  }
  const int status = importer.wait();
  expect(status == 0, "the importer ended with status " + std::to_string(status));
  std::printf("%u loans of %u threads\n", 3 * kThreads * kLoans, kThreads);
  return 0;
}

int run(int count, char** words) { return count > 3 ? run_importer({std::atoi(words[2]), std::atoi(words[3])}) : run_exporter(); }

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
