// SPDX-License-Identifier: MIT
//
// The host rung where a driver refuses to pin host memory, on either side or on both: the same bytes, slower, and the report
// says why. And where there can be no ring at all: a typed error, no hang.
#include "suite.hpp"

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <sys/resource.h>

namespace loan_test {
namespace {

// KiB. What one peer has pinned beside rings and chunks: its tether, and under the memop gate its control pages.
std::uint64_t small_only(const Bench& bench) { return bench.cell.gate == GPULOAN_GATE_MEMOP ? 2560 : 512; }

// For the processes that are started while it lives; this one has read it already.
class WorkerSetting {
 public:
  WorkerSetting(const char* name, const char* value) : name_(name) { expect(::setenv(name, value, 1) == 0, "setenv"); }
  WorkerSetting(const WorkerSetting&) = delete;
  WorkerSetting& operator=(const WorkerSetting&) = delete;
  ~WorkerSetting() { ::unsetenv(name_); }

 private:
  const char* name_;
};

// This process's driver pins no more.
class PinLimit {
 public:
  PinLimit(const Bench& bench, std::uint64_t bytes) : gpu_(bench.gpu) { gpu_.call.sim_pin_limit(bytes); }
  PinLimit(const PinLimit&) = delete;
  PinLimit& operator=(const PinLimit&) = delete;
  ~PinLimit() { gpu_.call.sim_pin_limit(UINT64_MAX); }

 private:
  Gpu& gpu_;
};

// How often the library said that memory is not pinned.
class Warnings {
 public:
  Warnings() { gpuloan_log_set(count, this, GPULOAN_LOG_WARNING); }
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;
  ~Warnings() { gpuloan_log_set(nullptr, nullptr, GPULOAN_LOG_OFF); }
  [[nodiscard]] int seen() const { return seen_; }

 private:
  static void count(void* user, gpuloan_log_level, const char* text) {
    if (std::strstr(text, "host memory cannot be pinned") != nullptr) ++static_cast<Warnings*>(user)->seen_;
  }
  std::atomic<int> seen_{0};
};

void expect_reason(const gpuloan_loan_report& report, bool unpinned, const char* side) {
  const bool says = std::strstr(report.rung_reason, "not pinned here: ") != nullptr;
  expect_equal(says, unpinned, std::string("the ") + side + "'s report says that its memory is not pinned (" + report.rung_reason + ")");
  if (unpinned) expect_contains(report.rung_reason, "RLIMIT_MEMLOCK", "the reason");
}

// 36 MiB + 1: each of the four slots is used more than twice.
void lend_all_sizes(const Bench& bench, gpuloan_peer* peer, Worker& worker, bool here, bool there) {
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{300'007}, 4 * kMiB, 36 * kMiB + 1}) {
    const Region region(peer, bytes);
    bench.gpu.upload(region.pointer(), bytes, 1);
    const Lent read = lend(bench, peer, region, {});
    Borrowed reader = worker.offered(read);
    reader.acquire();
    reader.check(1);
    const gpuloan_loan_report theirs = reader.report();
    reader.done();
    read.ended();
    if (bytes > 0) {
      expect_equal(read.report().rung, GPULOAN_RUNG_HOST, "rung");
      expect_reason(read.report(), here, "exporter");
      expect_reason(theirs, there, "importer");
    }
    const Lent write = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE, .keep_open = true});
    Borrowed writer = worker.offered(write);
    for (std::uint64_t seed = 2; seed < 4; ++seed) {
      writer.acquire();
      writer.fill(seed);
      writer.done();
      write.done();
      expect_pattern(bench, region.pointer(), bytes, seed);
      if (seed == 2) expect_ok(gpuloan_loan_ready(write, bench.gpu.stream()), "gpuloan_loan_ready");
    }
    expect_ok(gpuloan_reclaim(write, kWaitMs), "gpuloan_reclaim");
  }
}

// Host memory of the arena, and staging pages.
void lend_host_memory(const Bench& bench, gpuloan_peer* peer, Worker& worker) {
  const std::uint64_t bytes = 300'007;
  const Region region(peer, bytes);
  bench.gpu.upload(region.pointer(), bytes, 1);
  const Lent read = lend(bench, peer, region, {.memory = GPULOAN_MEMORY_HOST});
  Borrowed reader = worker.offered(read);
  expect_equal(reader.acquire().host, 1, "the view has a host address");
  reader.check(1);
  reader.done(kCpuStream);
  read.ended();
  expect_reason(read.report(), true, "exporter");
  const Lent write = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE, .memory = GPULOAN_MEMORY_HOST});
  Borrowed writer = worker.offered(write);
  writer.acquire();
  writer.fill(2);
  writer.done(kCpuStream);
  write.ended();
  expect_pattern(bench, region.pointer(), bytes, 2);
  Region pages(peer, bytes, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_HOST);
  expect_equal(pages.pointer(), 0U, "the device's address of pages that are not pinned");
  const Lent direct = lend(bench, peer, reinterpret_cast<std::uint64_t>(gpuloan_region_host(pages.get())), bytes,
                           {.access = GPULOAN_ACCESS_WRITE, .memory = GPULOAN_MEMORY_HOST, .policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY});
  Borrowed worked = worker.offered(direct);
  worked.acquire();
  worked.fill(3);
  worked.done(kCpuStream);
  direct.ended();
}

} // namespace

const char* no_pin_limit(const Bench& bench) {
  if (!bench.gpu.simulated()) return "a limit on purpose";
  for (const char* name : {"GPULOAN_SIM_WITHOUT", "GPULOAN_SIM_PIN_LIMIT_KIB"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return "this driver has a limit of its own";
  }
  return only_host_rung(bench);
}

// A limit on locked memory: what is small is pinned, what is large is not.
void unpinned_ring(const Bench& bench) {
  for (const auto& [here, there] : {std::pair{true, false}, {false, true}, {true, true}}) {
    const Warnings warnings;
    {
      const PinLimit limit(bench, here ? small_only(bench) << 10 : UINT64_MAX);
      const WorkerSetting setting("GPULOAN_SIM_PIN_LIMIT_KIB", there ? std::to_string(small_only(bench)).c_str() : "");
      Exporter exporter(bench);
      Worker worker(bench);
      gpuloan_peer* peer = exporter.attach(worker);
      lend_all_sizes(bench, peer, worker, here, there);
      expect_equal(worker.calls("cuStreamWriteValue64"), 0U, "words written by the worker's device, which could come after the ACK");
      if (here) lend_host_memory(bench, peer, worker);
      worker.close();
    }
    expect_equal(warnings.seen(), here ? 1 : 0, "lines in the log");
  }
}

// Nothing at all can be pinned where the control words are to be written by the device: another gate, or the host's way.
void nothing_pinned(const Bench& bench) {
  for (const auto& [here, there] : {std::pair{true, false}, {false, true}}) {
    const PinLimit limit(bench, here ? 0 : UINT64_MAX);
    const WorkerSetting setting("GPULOAN_SIM_PIN_LIMIT_KIB", there ? "0" : "");
    Exporter exporter(bench, [](gpuloan_context_options& options) { options.gate = GPULOAN_GATE_AUTO; });
    Worker worker(bench);
    gpuloan_peer* peer = exporter.attach(worker);
    const Region region(peer, kMiB + 3, GPULOAN_ACCESS_WRITE, here ? GPULOAN_MEMORY_DEVICE : GPULOAN_MEMORY_HOST);
    const Lent lent = lend(bench, peer, region.pointer(), region.bytes(), // the ring's words are the CPU's to store; those of shared pages need not be
                           {.access = GPULOAN_ACCESS_WRITE, .memory = here ? GPULOAN_MEMORY_DEVICE : GPULOAN_MEMORY_HOST});
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.fill(5);
    loan.done();
    lent.ended();
    expect_pattern(bench, region.pointer(), region.bytes(), 5);
    const gpuloan_loan_report theirs = loan.report();
    if (here) {
      expect(lent.report().gate != GPULOAN_GATE_MEMOP, "the memop gate without pinned words");
      expect_contains(lent.report().gate_reason, "the control words cannot be pinned", "gate_reason");
      gpuloan_loan* none = nullptr;
      auto options = init<gpuloan_lend_options>();
      options.access = GPULOAN_ACCESS_READ;
      options.gate = GPULOAN_GATE_MEMOP;
      options.stream = bench.gpu.stream();
      expect_status(gpuloan_lend(peer, region.pointer(), region.bytes(), &options, &none), GPULOAN_ERR_UNSUPPORTED, "memop by name");
      expect_contains(gpuloan_error_text(), "cannot be pinned", "the text");
    } else {
      expect_contains(theirs.gate_reason, "the control words cannot be pinned here", "the importer's gate_reason");
    }
    worker.close();
  }
}

// No file as large as the exporter's ring; no stream for the worker's.
void no_ring(const Bench& bench) {
  Exporter exporter(bench);
  {
    const WorkerSetting setting("GPULOAN_SIM_FAIL", "cuStreamCreate:1+:2");
    Worker worker(bench);
    gpuloan_peer* peer = exporter.attach(worker);
    const Region region(peer, kMiB);
    gpuloan_loan* loan = nullptr;
    expect_status(try_lend(bench, peer, region.pointer(), region.bytes(), {}, &loan), GPULOAN_ERR_DEVICE_MEMORY, "lend to a worker that can have no ring");
    expect_contains(gpuloan_error_text(), "the ring of the host rung", "what failed");
    expect_contains(gpuloan_error_text(), "connect again", "what to do");
    worker.kill();
  }
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const Region region(peer, kMiB);
  rlimit before = {};
  expect(::getrlimit(RLIMIT_FSIZE, &before) == 0, "getrlimit");
  const rlimit small = {8 * kMiB, before.rlim_max}; // the canary's block is smaller than that, the ring larger
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  expect(::setrlimit(RLIMIT_FSIZE, &small) == 0, "setrlimit");
  gpuloan_loan* loan = nullptr;
  const gpuloan_status status = try_lend(bench, peer, region.pointer(), region.bytes(), {}, &loan);
  const std::string text = gpuloan_error_text();
  expect(::setrlimit(RLIMIT_FSIZE, &before) == 0, "setrlimit");
  static_cast<void>(std::signal(SIGXFSZ, handler));
  expect(status != GPULOAN_OK && status != GPULOAN_ERR_TIMEOUT, std::string("lend without a ring says ") + gpuloan_status_name(status));
  expect_contains(text.c_str(), "the ring of the host rung cannot be made", "what failed");
  expect_contains(text.c_str(), "lend again", "what to do");
  warm_up(bench, peer, worker); // and now it can
  worker.close();
}

} // namespace loan_test
