// SPDX-License-Identifier: MIT
//
// Canaries that fail, that are not answered in time, and that cannot be afforded: what becomes of the way, of the loan that
// asked for it, and of the peer.
#include "suite.hpp"

#include <array>
#include <csignal>
#include <cstdlib>
#include <thread>
#include <vector>

namespace loan_test {
namespace {

constexpr std::uint64_t kCanaryBytes = (std::uint64_t{1} << 20) + 3; // a chunk of its own
constexpr const char* kShapes[] = {"contiguous", "view", "odd", "large"};

// For the processes that are started while it lives; this one has read it already.
class WorkerFault {
 public:
  explicit WorkerFault(const std::string& plan) { expect(::setenv("GPULOAN_SIM_FAIL", plan.c_str(), 1) == 0, "setenv"); }
  WorkerFault(const WorkerFault&) = delete;
  WorkerFault& operator=(const WorkerFault&) = delete;
  ~WorkerFault() { ::unsetenv("GPULOAN_SIM_FAIL"); }
};

const char* first_call_of(gpuloan_rung rung) {
  switch (rung) {
    case GPULOAN_RUNG_POOL:
      return "cuMemPoolImportPointer";
    case GPULOAN_RUNG_IPC:
      return "cuIpcOpenMemHandle";
    default:
      return "cuMemImportFromShareableHandle";
  }
}

gpuloan_peer_info info_of(gpuloan_peer* peer) {
  auto info = init<gpuloan_peer_info>();
  expect_ok(gpuloan_peer_info_get(peer, &info), "gpuloan_peer_info_get");
  return info;
}

std::uint32_t canary_of(const Bench& bench, gpuloan_peer* peer) {
  const gpuloan_peer_info info = info_of(peer);
  switch (bench.cell.rung) {
    case GPULOAN_RUNG_VMM:
      return info.vmm_canary;
    case GPULOAN_RUNG_POOL:
      return info.pool_canary;
    case GPULOAN_RUNG_IPC:
      return info.ipc_canary;
    default:
      return info.host_canary;
  }
}

// By the cell's rung, or by the host rung where that is not to be had.
void with_host_below(const Bench& bench, gpuloan_context_options& options) {
  options.rungs = static_cast<std::uint32_t>(bench.cell.rung) | static_cast<std::uint32_t>(GPULOAN_RUNG_HOST);
}

gpuloan_loan_report carried(const Bench& bench, Worker& worker, gpuloan_peer* peer, gpuloan_access access = GPULOAN_ACCESS_READ) {
  const Region region(peer, kCanaryBytes);
  bench.gpu.upload(region.pointer(), kCanaryBytes, 7);
  const Lent lent = lend(bench, peer, region, {.access = access});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  if (access == GPULOAN_ACCESS_READ) loan.check(7);
  else loan.fill(8);
  loan.done();
  lent.ended();
  if (access == GPULOAN_ACCESS_WRITE) expect_pattern(bench, region.pointer(), kCanaryBytes, 8);
  return lent.report();
}

void demoted_by(const Bench& bench, Exporter& exporter, const std::string& plan, const std::string& text) {
  const WorkerFault fault(plan);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  expect_equal(canary_of(bench, peer), GPULOAN_CANARY_NOT_ATTEMPTED, "the canary before the first loan");
  const gpuloan_loan_report report = carried(bench, worker, peer);
  expect_equal(report.rung, GPULOAN_RUNG_HOST, plan + ": rung after a canary that failed");
  expect_contains(report.rung_reason, "its canary failed", plan + ": the reason");
  expect_equal(canary_of(bench, peer), GPULOAN_CANARY_DEMOTED, plan + ": the canary's verdict");
  expect_contains(info_of(peer).canary_text, text, plan + ": the peer's information");
  expect_equal(info_of(peer).host_canary, GPULOAN_CANARY_VERIFIED, plan + ": the host rung's canary");
  worker.close();
}

} // namespace

const char* no_rung_above(const Bench& bench) { return bench.zero_copy() ? only_simulated(bench) : "there is no rung below host"; }
const char* only_host_fails(const Bench& bench) { return bench.zero_copy() ? "only the host rung is the last" : only_simulated(bench); }
const char* no_zero_copy(const Bench& bench) { return bench.zero_copy() ? nullptr : "only rungs without a copy are passed over"; }

// I7, K1. The worker's driver fails the canary, at the first call or at one shape: the rung is out of use with this peer,
// and says so; the next worker's is not. A driver that lies (result 0: success, and nothing done) is found by the bytes.
void canary_fails(const Bench& bench) {
  Exporter exporter(bench, [&](gpuloan_context_options& options) { with_host_below(bench, options); });
  demoted_by(bench, exporter, first_call_of(bench.cell.rung) + std::string(":1+:999"), "shape contiguous");
  for (unsigned index = 0; index < std::size(kShapes); ++index) {
    const std::string nth = ":" + std::to_string(index + 1), shape = std::string("shape ") + kShapes[index];
    demoted_by(bench, exporter, "cuMemcpyDtoHAsync" + nth + ":999", shape + ": ");
    demoted_by(bench, exporter, "cuMemcpyDtoHAsync" + nth + ":0", shape + ": the importer does not see the exporter's bytes");
    demoted_by(bench, exporter, "cuMemcpyHtoDAsync" + nth + ":0", shape + ": byte 0 that came back is not the importer's");
  }
  Worker next(bench);
  gpuloan_peer* peer = exporter.attach(next);
  const gpuloan_loan_report report = carried(bench, next, peer);
  expect_equal(report.rung, bench.cell.rung, "rung of the next worker");
  expect_equal(report.canary, GPULOAN_CANARY_VERIFIED, "its loan's report");
  expect_equal(canary_of(bench, peer), GPULOAN_CANARY_VERIFIED, "the next worker's canary");
  expect(info_of(peer).canary_text[0] == '\0', "nothing was demoted");
  next.close();
}

// The host rung has nothing below it: the peer is refused, on every rung, and others are not.
void host_canary_fails(const Bench& bench) {
  Exporter exporter(bench, [&](gpuloan_context_options& options) { options.rungs = static_cast<std::uint32_t>(GPULOAN_RUNG_VMM) | static_cast<std::uint32_t>(GPULOAN_RUNG_HOST); });
  const auto refused_by = [&](const std::string& plan, gpuloan_access access, const std::string& text) {
    const WorkerFault fault(plan);
    Worker worker(bench);
    gpuloan_peer* peer = exporter.attach(worker);
    const Region region(peer, kCanaryBytes);
    gpuloan_loan* none = nullptr;
    for (const gpuloan_rung rungs : {GPULOAN_RUNG_HOST, GPULOAN_RUNG_VMM, GPULOAN_RUNG_HOST}) {
      expect_status(try_lend(bench, peer, region.pointer(), kCanaryBytes, {.access = access, .rungs = static_cast<std::uint32_t>(rungs)}, &none), GPULOAN_ERR_NO_RUNG, plan + ": lend");
      expect_contains(gpuloan_error_text(), "the peer is refused", plan + ": the sentence");
    }
    expect_equal(canary_of(bench, peer), GPULOAN_CANARY_DEMOTED, plan + ": the canary's verdict");
    expect_contains(info_of(peer).canary_text, text, plan + ": the peer's information");
    Borrowed wish = worker.request(100);
    gpuloan_request* request = exporter.event(GPULOAN_EVENT_REQUEST).request;
    gpuloan_region* granted = nullptr;
    expect_status(gpuloan_request_grant(request, nullptr, &granted, &none), GPULOAN_ERR_NO_RUNG, plan + ": grant");
    expect_ok(gpuloan_request_deny(request, "refused"), "gpuloan_request_deny");
    expect_status(wish.wait_end().status, GPULOAN_ERR_DENIED, "the request");
    worker.close();
  };
  refused_by("cuMemcpyDtoHAsync:2:999", GPULOAN_ACCESS_READ, "host (ring, read): shape "); // whichever the worker came to then
  refused_by("cuMemcpyHtoDAsync:4:0", GPULOAN_ACCESS_READ, ": the importer does not see the exporter's bytes");
  refused_by("cuMemcpyDtoHAsync:3:0", GPULOAN_ACCESS_WRITE, ": byte 0 that came back is not the importer's");
  Worker next(bench);
  gpuloan_peer* peer = exporter.attach(next);
  expect_equal(carried(bench, next, peer).canary, GPULOAN_CANARY_VERIFIED, "the next worker's loan for read");
  expect_equal(carried(bench, next, peer, GPULOAN_ACCESS_WRITE).canary, GPULOAN_CANARY_VERIFIED, "the next worker's loan for write");
  next.close();
}

// Want of memory proves nothing: this loan fails with that, the next one tries again.
void canary_without_memory(const Bench& bench) {
  const WorkerFault fault("cuMemCreate:1:2,cuMemAlloc:1:2"); // where the worker's private buffer comes from
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  {
    const Region region(peer, kCanaryBytes);
    gpuloan_loan* none = nullptr;
    expect_status(try_lend(bench, peer, region.pointer(), kCanaryBytes, {}, &none), GPULOAN_ERR_DEVICE_MEMORY, "lend to a worker without memory");
  }
  expect_equal(canary_of(bench, peer), GPULOAN_CANARY_NOT_ATTEMPTED, "the canary's verdict");
  expect_equal(carried(bench, worker, peer).canary, GPULOAN_CANARY_VERIFIED, "the next loan's canary");
  worker.close();
}

// Threads whose first loans come at once all wait for the one battery; none is refused or copied meanwhile.
void canary_shared(const Bench& bench) {
  Exporter exporter(bench, [&](gpuloan_context_options& options) {
    with_host_below(bench, options);
    options.canary_timeout_ms = 10'000;
  });
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const Region region(peer, kCanaryBytes);
  bench.gpu.upload(region.pointer(), kCanaryBytes, 7);
  constexpr std::size_t kThreads = 8;
  std::array<gpuloan_status, kThreads> status = {};
  std::array<gpuloan_loan*, kThreads> loans = {};
  std::vector<std::thread> threads;
  for (std::size_t index = 0; index < kThreads; ++index) {
    threads.emplace_back([&, index] { status[index] = try_lend(bench, peer, region.pointer(), kCanaryBytes, {}, &loans[index]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t index = 0; index < kThreads; ++index) {
    expect_status(status[index], GPULOAN_OK, "a first loan among others");
    const Lent lent(loans[index]);
    expect_equal(lent.report().rung, bench.cell.rung, "its rung");
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.check(7);
    loan.done();
    lent.ended();
  }
  expect_equal(canary_of(bench, peer), GPULOAN_CANARY_VERIFIED, "the canary's verdict");
  worker.close();
}

// A worker that stands still lets one budget pass, not one for each way; the host rung carries, unproven. Once it goes on
// its answers count.
void canary_unanswered(const Bench& bench) {
  Exporter exporter(bench, [&](gpuloan_context_options& options) {
    with_host_below(bench, options);
    options.canary_timeout_ms = 200;
  });
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const Region region(peer, kCanaryBytes);
  bench.gpu.upload(region.pointer(), kCanaryBytes, 7);
  ::kill(worker.pid(), SIGSTOP);
  const LendArgs either = {.rungs = static_cast<std::uint32_t>(bench.cell.rung) | static_cast<std::uint32_t>(GPULOAN_RUNG_HOST)};
  const Lent lent = lend(bench, peer, region, either);
  expect_equal(lent.report().rung, GPULOAN_RUNG_HOST, "rung without an answer");
  expect_equal(lent.report().canary, GPULOAN_CANARY_NOT_ATTEMPTED, "canary of that loan");
  expect_contains(lent.report().rung_reason, "its canary is still unanswered", "the reason");
  expect_equal(canary_of(bench, peer), GPULOAN_CANARY_NOT_ATTEMPTED, "the canary's verdict without an answer");
  ::kill(worker.pid(), SIGCONT);
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  loan.check(7);
  loan.done();
  lent.ended();
  expect(becomes([&] { return canary_of(bench, peer) == GPULOAN_CANARY_VERIFIED; }), "an answer that came late does not count");
  expect(becomes([&] { return info_of(peer).host_canary == GPULOAN_CANARY_VERIFIED; }), "nor that of the host rung");
  expect_equal(carried(bench, worker, peer).rung, bench.cell.rung, "rung after the answer");
  worker.close();
}

} // namespace loan_test
