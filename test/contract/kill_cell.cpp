// SPDX-License-Identifier: MIT
#include "kill_cell.hpp"

#include <csignal>
#include <memory>
#include <optional>
#include <sys/socket.h>

namespace loan_test {
namespace {

constexpr std::uint64_t kBytes = 300'003;
constexpr std::uint64_t kSeed = 5;
constexpr std::uint32_t kNoticeMs = 1000; // of the end of the process
constexpr std::uint32_t kBackMs = 1000;   // of contract rule 5 being met
constexpr std::uint32_t kKeptMs = 30;     // so long is looked whether memory stays kept
constexpr unsigned kProducer = 1;         // the exporter's stream
constexpr unsigned kWorker = 10;          // the worker's

bool at_least(Point point, Point other) { return static_cast<int>(point) >= static_cast<int>(other); }

Lent lend_to(const Bench& bench, gpuloan_peer* peer, const Region& region, Point point) {
  if (point == Point::Exported) bench.gpu.hold(kProducer);
  bench.gpu.upload(region.pointer(), region.bytes(), kSeed, kProducer);
  return lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE, .stream = kProducer, .keep_open = point == Point::Done});
}

// The worker's part, up to `point`.
void work(Worker& worker, Borrowed& loan, Point point) {
  if (!at_least(point, Point::Imported)) return;
  loan.acquire();
  if (!at_least(point, Point::Writing)) return;
  const bool stuck = point == Point::Writing || point == Point::Posted;
  if (stuck) worker.hold(kWorker);
  loan.fill(kSeed + 1, kWorker);
  if (point == Point::Writing) return;
  if (point == Point::Written) {
    expect(becomes([&] { return worker.idle(kWorker); }), "the worker's fill does not end");
    return;
  }
  loan.done(kWorker);
  if (point == Point::Posted) return;
  expect_status((point == Point::Done ? loan.wait_done() : loan.wait_end()).status, GPULOAN_OK, "the worker's turn");
}

// ---- An importer dies ---------------------------------------------------------------------------------------------

class Sleeper {
 public:
  explicit Sleeper(pid_t pid) noexcept : pid_(pid) {}
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;
  ~Sleeper() { kill(); }
  [[nodiscard]] explicit operator bool() const noexcept { return pid_ > 0; }
  void kill() noexcept {
    if (pid_ > 0) ::kill(std::exchange(pid_, -1), SIGKILL);
  }

 private:
  pid_t pid_;
};

std::uint64_t kept_bytes(const Exporter& exporter) {
  const gpuloan_stats stats = exporter.stats();
  return stats.retired_bytes + stats.surrendered_bytes + stats.quarantined_bytes;
}

void one_loan(const Bench& bench, Exporter& exporter) {
  Worker next(bench);
  gpuloan_peer* peer = exporter.attach(next);
  const Region region(peer, kBytes);
  bench.gpu.upload(region.pointer(), kBytes, 9);
  const Lent lent = lend(bench, peer, region, {});
  Borrowed loan = next.offered(lent);
  loan.acquire();
  loan.check(9);
  loan.done();
  lent.ended();
  next.close();
  static_cast<void>(exporter.event(GPULOAN_EVENT_PEER_LOST));
  gpuloan_peer_close(peer);
}

// C4
Times importer_dies(const Bench& bench, bool with_child, Point point) {
  Exporter exporter(bench);
  const std::uint64_t used = bench.gpu.used_bytes();
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  warm_up(bench, peer, worker);
  Region region(peer, kBytes);
  std::optional<Lent> lent;
  std::optional<Borrowed> loan;
  if (point != Point::Connected) {
    lent.emplace(lend_to(bench, peer, region, point));
    loan.emplace(worker.offered(*lent));
    work(worker, *loan, point);
  }
  if (point == Point::Released) lent->ended();
  Sleeper child(with_child ? worker.fork_sleeper() : 0);
  worker.kill(); // and reaped: its pidfd is readable

  Times times;
  const std::uint64_t dead = now_ms();
  if (lent) {
    const bool good = at_least(point, Point::Done); // what was done before the death counts
    expect_status(gpuloan_loan_wait_end(*lent, kNoticeMs), good ? GPULOAN_OK : GPULOAN_ERR_PEER_LOST, "wait_end within 1 s of the death");
  }
  static_cast<void>(exporter.event(GPULOAN_EVENT_PEER_LOST, kNoticeMs));
  times.noticed_ms = now_ms() - dead;
  if (point == Point::Exported) bench.gpu.release(kProducer);
  expect(becomes([&] { return bench.gpu.idle(kProducer); }, kNoticeMs), "the exporter's stream is stranded");
  if (lent && at_least(point, Point::Done)) expect_pattern(bench, region.pointer(), kBytes, kSeed + 1);
  one_loan(bench, exporter);

  if (child) { // rule 5 is not met before it is gone
    const bool counted = kept_bytes(exporter) > 0;
    for (const std::uint64_t end = now_ms() + kKeptMs; now_ms() < end; nap()) {
      if (counted) expect(kept_bytes(exporter) > 0, "memory that the child may still write is not counted any more");
      if (lent && bench.own_memory() && point != Point::Released) {
        expect_equal(lent->report().memory_state, GPULOAN_MEMORY_QUARANTINED, "memory_state while the child lives");
      }
    }
    child.kill();
  }
  const std::uint64_t met = now_ms();
  if (lent && bench.own_memory()) {
    expect(becomes([&] { return lent->report().memory_state == GPULOAN_MEMORY_RELEASED; }, kBackMs), "the memory was not released");
  }
  region.destroy();
  const auto back = [&] { return kept_bytes(exporter) == 0 && exporter.stats().chunks == 0 && exporter.stats().loans_out == 0; };
  expect(becomes(back, kBackMs), "the exporter still counts " + std::to_string(kept_bytes(exporter)) + " bytes");
  const std::uint64_t noise = bench.gpu.simulated() ? 0 : std::uint64_t{64} << 20;
  expect(becomes([&] { return bench.gpu.settle_pool(), bench.gpu.used_bytes() <= used + noise; }, kBackMs), "device memory did not come back");
  times.back_ms = now_ms() - met;
  gpuloan_peer_close(peer);
  return times;
}

// ---- An exporter dies ---------------------------------------------------------------------------------------------

std::uint64_t hear(int control) {
  std::uint64_t id = 0;
  expect(::recv(control, &id, sizeof id, 0) == sizeof id, "the exporter ended by itself");
  return id;
}

// B1, B3
Times exporter_dies(const Bench& bench, Point point) {
  Worker worker(bench);
  SocketPair control = make_socketpair();
  Fd loan_end(worker.take_loan_end());
  Process victim({"--victim", std::to_string(control.right.get()), std::to_string(loan_end.get()), "--point", kPointNames[static_cast<int>(point)],
                  "--driver", bench.cell.driver, "--rung", gpuloan_rung_name(bench.cell.rung), "--gate", gpuloan_gate_name(bench.cell.gate),
                  "--engine", gpuloan_engine_name(bench.cell.engine)},
                 {control.right.get(), loan_end.get()});
  control.right.reset();
  loan_end.reset();
  expect_status(worker.call(worker.open_command()).status, GPULOAN_OK, "the worker opens");
  std::optional<Borrowed> loan;
  if (const std::uint64_t id = hear(control.left.get()); id != 0) {
    Command command;
    command.op = Op::Offered;
    command.loan = 1;
    command.id = id;
    expect_status(worker.call(command).status, GPULOAN_OK, "LOAN_OFFERED");
    loan.emplace(worker, 1);
    work(worker, *loan, point);
  }
  victim.kill();

  Times times;
  const std::uint64_t dead = now_ms();
  expect(!worker.event(GPULOAN_EVENT_PEER_LOST, GPULOAN_ERR_PEER_LOST).empty(), "no reason for the loss");
  times.noticed_ms = now_ms() - dead;
  expect(times.noticed_ms <= kNoticeMs, "the death was noticed after " + std::to_string(times.noticed_ms) + " ms");
  const std::uint64_t met = now_ms();
  if (point == Point::Writing || point == Point::Posted) worker.release(kWorker);
  if (loan && point != Point::Released) {
    const bool held = point == Point::Imported || point == Point::Writing || point == Point::Written;
    if (held) expect_status(loan->try_done(kWorker).status, GPULOAN_ERR_PEER_LOST, "done after the exporter died");
    expect_status(loan->wait_end().status, GPULOAN_ERR_PEER_LOST, "wait_end");
  }
  expect(becomes([&] { return worker.idle(kWorker); }, kBackMs), "the worker's stream is stranded");
  const auto back = [&] {
    const gpuloan_stats stats = worker.stats();
    return stats.imported_bytes == 0 && stats.loans_out == 0 && stats.gpu_waits == 0;
  };
  expect(becomes(back, kBackMs), "the worker still has " + std::to_string(worker.stats().imported_bytes) + " bytes mapped");
  times.back_ms = now_ms() - met;
  worker.close();
  return times;
}

} // namespace

const char* no_such_cell(const Bench& bench, Point point) {
  const bool stuck = point == Point::Exported || point == Point::Writing || point == Point::Posted;
  if (bench.host_gate() && (point == Point::Exported || point == Point::Posted)) return "under the host gate lend and done wait for the stream";
  if (stuck && !bench.gpu.simulated() && bench.own_memory()) return "on a real device freeing memory stands behind a stream that is held";
  return nullptr;
}

Times run_cell(const Bench& bench, Victim victim, Point point) {
  return victim == Victim::Exporter ? exporter_dies(bench, point) : importer_dies(bench, victim == Victim::ImporterWithChild, point);
}

int run_kill_victim(int control, int loan_end, const Cell& cell, Point point) {
  Gpu gpu(cell.driver.c_str());
  const Bench bench{cell, gpu, Habitat::Process};
  Region::own_memory = bench.own_memory() ? &gpu : nullptr;
  if (cell.rung == GPULOAN_RUNG_POOL) gpu.alloc_from_pool();
  Exporter exporter(bench);
  expect_ok(gpuloan_context_attach(exporter.get(), loan_end, nullptr), "gpuloan_context_attach");
  gpuloan_peer* peer = exporter.event(GPULOAN_EVENT_PEER_READY).peer;
  const Region region(peer, kBytes);
  std::optional<Lent> lent;
  if (point != Point::Connected) lent.emplace(lend_to(bench, peer, region, point));
  const std::uint64_t id = lent ? lent->report().id : 0;
  expect(::send(control, &id, sizeof id, MSG_NOSIGNAL) == sizeof id, "the test is gone");
  char word = 0;
  static_cast<void>(::recv(control, &word, 1, 0)); // never comes
  return 1;
}

} // namespace loan_test
