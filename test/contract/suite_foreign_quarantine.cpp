// SPDX-License-Identifier: MIT
//
// A worker is killed that had forked a child, which sleeps with all its parent's memory (S13, S17): the pidfd fires, the
// tether holds. Nothing of what was lent may be used for anything else before the child is gone too.
#include "suite_foreign.hpp"

#include <csignal>

namespace loan_test {
namespace {

constexpr std::uint64_t kQuarantineBytes = (std::uint64_t{3} << 20) + 5;
constexpr std::uint32_t kQuarantineKeptMs = 300; // at least: so long is looked
constexpr std::uint32_t kGoneMs = 5000;

class Sleeper {
 public:
  explicit Sleeper(pid_t pid) noexcept : pid_(pid) {}
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;
  ~Sleeper() { kill(); }
  void kill() noexcept {
    if (pid_ > 0) ::kill(std::exchange(pid_, -1), SIGKILL);
  }

 private:
  pid_t pid_;
};

// Holds for a while; what is checked may fail at no moment of it.
template <typename Check>
void holds(Check check) {
  for (const std::uint64_t end = now_ms() + kQuarantineKeptMs; now_ms() < end; nap()) check();
}

void quarantine(const Bench& bench, Made made) {
  Released released;
  Foreign memory(bench, made, {.bytes = kQuarantineBytes, .before = 4096});
  Exporter exporter(bench);
  Worker worker(bench);
  Worker other(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  gpuloan_peer* other_peer = exporter.attach(other);
  const LendArgs write = {.access = GPULOAN_ACCESS_WRITE, .policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY};
  Lent lent = lend(bench, peer, memory.pointer(), kQuarantineBytes, with_release(write, released));
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  loan.fill(3);
  Sleeper child(worker.fork_sleeper());
  worker.kill();
  lent.ended(GPULOAN_ERR_PEER_LOST);
  expect_equal(exporter.stats().loans_out, 0U, "loans out");
  holds([&] {
    expect_equal(lent.report().memory_state, GPULOAN_MEMORY_QUARANTINED, "memory_state while the child lives");
    expect_equal(exporter.stats().quarantined_bytes, kQuarantineBytes, "quarantined bytes while the child lives");
    released.expect_none("the release function while the child lives");
  });
  gpuloan_loan* none = nullptr;
  for (const std::uint64_t at : {memory.pointer(), memory.pointer() + kQuarantineBytes - 1}) {
    expect_status(try_lend(bench, other_peer, at, 1, {}, &none), GPULOAN_ERR_BUSY, "lend of quarantined memory to another peer");
  }
  child.kill();
  expect(becomes([&] { return lent.report().memory_state == GPULOAN_MEMORY_RELEASED; }, kGoneMs), "quarantined after the child was killed");
  expect_equal(exporter.stats().quarantined_bytes, 0U, "quarantined bytes in the end");
  released.expect_once("the release function in the end");
  memory.fill(4);
  Lent again = lend(bench, other_peer, memory.pointer(), kQuarantineBytes, {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY});
  Borrowed reader = other.offered(again);
  reader.acquire();
  reader.check(4);
  reader.done();
  again.ended();
  memory.free();
  other.close();
  exporter.destroy();
  for (Lent* each : {&lent, &again}) each->forget();
  released.expect_once("the release function behind the context's end");
}

} // namespace

void quarantine_alloc(const Bench& bench) { quarantine(bench, Made::Alloc); }
void quarantine_vmm(const Bench& bench) { quarantine(bench, Made::VmmMany); }

// The context is destroyed meanwhile.
void quarantine_behind_context(const Bench& bench) {
  for (const Made made : {Made::Alloc, Made::VmmMany}) {
    Released released;
    Foreign memory(bench, made, {.bytes = kQuarantineBytes});
    Exporter exporter(bench);
    Worker worker(bench);
    gpuloan_peer* peer = exporter.attach(worker);
    Lent lent = lend(bench, peer, memory.pointer(), kQuarantineBytes, with_release({.access = GPULOAN_ACCESS_WRITE}, released));
    worker.offered(lent).acquire();
    Sleeper child(worker.fork_sleeper());
    worker.kill();
    lent.ended(GPULOAN_ERR_PEER_LOST);
    exporter.destroy();
    lent.forget();
    holds([&] { released.expect_none("the release function while the child lives"); });
    child.kill();
    released.expect_once("the release function when the child is gone");
    memory.free();
  }
}

// What the arena gave up is counted until nobody can have it mapped.
void surrendered_arena(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  Region region(peer, kQuarantineBytes);
  const Lent lent = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE, .rungs = GPULOAN_RUNG_VMM});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  loan.fill(3);
  Sleeper child(worker.fork_sleeper());
  worker.kill();
  lent.ended(GPULOAN_ERR_PEER_LOST);
  expect_equal(lent.report().memory_state, GPULOAN_MEMORY_RETIRED, "memory_state");
  expect(exporter.stats().retired_bytes >= kQuarantineBytes, "retired bytes");
  region.destroy();
  const auto surrendered = [&] { return exporter.stats().retired_bytes == 0 && exporter.stats().surrendered_bytes >= kQuarantineBytes; };
  expect(becomes(surrendered, kGoneMs), "the chunk is not surrendered");
  holds([&] {
    expect_equal(lent.report().memory_state, GPULOAN_MEMORY_SURRENDERED, "memory_state while the child lives");
    expect(surrendered(), "surrendered bytes while the child lives");
  });
  child.kill();
  expect(becomes([&] { return exporter.stats().surrendered_bytes == 0; }, kGoneMs), "surrendered after the child was killed");
  expect_equal(lent.report().memory_state, GPULOAN_MEMORY_RELEASED, "memory_state in the end");
}

} // namespace loan_test
