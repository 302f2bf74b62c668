// SPDX-License-Identifier: MIT
//
// profile_test NAME: a whole loan, end to end, on the simulated driver that plays one known bad driver (GPULOAN_SIM_PROFILE).
// Memory of the arena and a cuMemAlloc block are lent for read and for write; each takes the best rung and gate that work
// there, and says why no better one. Where the driver cannot be used at all, the context says so. The watchdog ends what hangs.
//
//   profile_test --list    the profiles
#include "../support/cell.hpp"
#include "../support/run.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>

namespace loan_test {
namespace {

constexpr unsigned kSeconds = 60;
constexpr auto kAllRungs = static_cast<gpuloan_rung>(GPULOAN_RUNG_VMM | GPULOAN_RUNG_IPC | GPULOAN_RUNG_HOST);

struct Way {
  gpuloan_rung rung;
  bool copied;
  const char* reason; // in rung_reason
};

struct Profile {
  const char* name;
  gpuloan_status refused; // by gpuloan_context_create; OK: it works
  Way arena, block;
  gpuloan_gate gate;
  const char* gate_reason; // or, where it is refused, what the error says
};

constexpr Way kDirect = {GPULOAN_RUNG_VMM, false, ""}, kLegacy = {GPULOAN_RUNG_IPC, false, ""}, kNone = {};

constexpr Profile kProfiles[] = {
    {"wsl2", GPULOAN_OK, {GPULOAN_RUNG_HOST, true, "no VMM memory"}, {GPULOAN_RUNG_HOST, true, "ipc: its canary failed"}, GPULOAN_GATE_HOST,
     "interprocess events fail"},
    {"vgpu", GPULOAN_OK, {GPULOAN_RUNG_HOST, true, "no VMM memory"}, kLegacy, GPULOAN_GATE_MEMOP, ""},
    {"integrated", GPULOAN_OK, {GPULOAN_RUNG_HOST, true, "no VMM memory"}, {GPULOAN_RUNG_HOST, true, "no legacy memory handles"}, GPULOAN_GATE_MEMOP, ""},
    {"legacy-opens-once", GPULOAN_OK, kDirect, kLegacy, GPULOAN_GATE_MEMOP, ""},
    {"pid-namespaces", GPULOAN_OK, kDirect, {GPULOAN_RUNG_VMM, true, "ipc: its canary failed"}, GPULOAN_GATE_MEMOP, ""},
    {"unknown-error", GPULOAN_OK, kDirect, {GPULOAN_RUNG_VMM, true, "ipc: its canary failed"}, GPULOAN_GATE_MEMOP, ""},
    {"pool-imports-die", GPULOAN_OK, kDirect, kLegacy, GPULOAN_GATE_MEMOP, ""},
    {"cuda-11.4", GPULOAN_OK, kDirect, kLegacy, GPULOAN_GATE_EVENT, "64-bit stream memory operations"},
    {"old-abi", GPULOAN_OK, kDirect, kLegacy, GPULOAN_GATE_MEMOP, ""},
    {"no-memops", GPULOAN_OK, kDirect, kLegacy, GPULOAN_GATE_EVENT, "64-bit stream memory operations"},
    {"events-fail", GPULOAN_OK, kDirect, kLegacy, GPULOAN_GATE_HOST, "interprocess events fail with this peer: the importer's driver refuses them"},
    {"no-host-register", GPULOAN_OK, kDirect, {GPULOAN_RUNG_VMM, true, "could never be released"}, GPULOAN_GATE_EVENT, "host registration"},
    {"pinning-fails", GPULOAN_OK, {GPULOAN_RUNG_HOST, true, "not pinned here: cuMemHostRegister"}, {GPULOAN_RUNG_HOST, true, "ipc: its canary failed"},
     GPULOAN_GATE_EVENT, "the control words cannot be pinned: cuMemHostRegister"},
    {"memlock", GPULOAN_OK, kDirect, kLegacy, GPULOAN_GATE_EVENT, "RLIMIT_MEMLOCK"},
    {"mps", GPULOAN_OK, kDirect, {GPULOAN_RUNG_VMM, true, "MPS"}, GPULOAN_GATE_MEMOP, ""},
    {"stub", GPULOAN_ERR_STUB_DRIVER, kNone, kNone, GPULOAN_GATE_AUTO, "stub"},
    {"no-device", GPULOAN_ERR_NO_DEVICE, kNone, kNone, GPULOAN_GATE_AUTO, "100"},
    {"compat-mismatch", GPULOAN_ERR_DRIVER_MISMATCH, kNone, kNone, GPULOAN_GATE_AUTO, "803"},
    {"compat-device", GPULOAN_ERR_DRIVER_MISMATCH, kNone, kNone, GPULOAN_GATE_AUTO, "804"},
};

void expect_way(const Profile& profile, const Way& way, const gpuloan_loan_report& report, const char* what) {
  expect_equal(report.rung, way.rung, std::string("rung of the ") + what + " (" + report.rung_reason + ")");
  expect_equal(report.copied_bytes > 0, way.copied, std::string("copied bytes of the ") + what);
  expect_contains(report.rung_reason, way.reason, "rung_reason");
  expect_equal(report.gate, profile.gate, std::string("gate of the ") + what + " (" + report.gate_reason + ")");
  expect_contains(report.gate_reason, profile.gate_reason, "gate_reason");
}

void lend_both_ways(const Bench& bench, const Profile& profile, gpuloan_peer* peer, Worker& worker, std::uint64_t pointer, std::uint64_t bytes,
                    const Way& way, const char* what) {
  bench.gpu.upload(pointer, bytes, 1);
  const Lent read = lend(bench, peer, pointer, bytes, {});
  Borrowed reader = worker.offered(read);
  reader.acquire();
  reader.check(1);
  reader.done();
  read.ended();
  expect_way(profile, way, read.report(), what);
  if (way.copied) { // R14, E3: never in silence
    gpuloan_loan* none = nullptr;
    expect_status(try_lend(bench, peer, pointer, bytes, {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY}, &none), GPULOAN_ERR_NO_RUNG, "a copy under require zero-copy");
    expect_contains(gpuloan_error_text(), "require", "the text of NO_RUNG");
  }
  const Lent write = lend(bench, peer, pointer, bytes, {.access = GPULOAN_ACCESS_WRITE});
  Borrowed writer = worker.offered(write);
  writer.acquire();
  writer.fill(2);
  writer.done();
  write.ended();
  expect_pattern(bench, pointer, bytes, 2);
  expect_way(profile, way, write.report(), what);
}

// P3, where the rung pool is allowed: the importer dies of it. Typed at the exporter; the next worker is served.
void lend_pool_memory(const Bench& bench) {
  bench.gpu.alloc_from_pool();
  const std::uint64_t pointer = bench.gpu.alloc(1U << 20);
  {
    Exporter exporter(bench, [](gpuloan_context_options& options) { options.rungs |= GPULOAN_RUNG_POOL; });
    Worker worker(bench);
    gpuloan_peer* peer = exporter.attach(worker);
    gpuloan_loan* none = nullptr;
    const gpuloan_status status = try_lend(bench, peer, pointer, 1U << 20, {.rungs = GPULOAN_RUNG_POOL | GPULOAN_RUNG_HOST}, &none);
    expect_status(status, GPULOAN_ERR_PEER_LOST, "lend to a worker that dies of the pool's canary");
  }
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const Lent lent = lend(bench, peer, pointer, 1U << 20, {});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  loan.done();
  lent.ended();
  expect_equal(lent.report().rung, GPULOAN_RUNG_VMM, "rung of pool memory");
  worker.close();
  bench.gpu.free(pointer);
}

// C8: a peer has 256 pairs of events; the loan after that takes the next gate, and says so. A pair that is free again serves again.
void lend_beyond_the_events(const Bench& bench, gpuloan_peer* peer, Worker& worker) {
  constexpr std::size_t kPairs = 256;
  const Region region(peer, 1000);
  bench.gpu.upload(region.pointer(), region.bytes(), 1);
  std::vector<Lent> lents;
  std::vector<Borrowed> loans;
  for (std::size_t index = 0; index < kPairs + 2; ++index) {
    lents.push_back(lend(bench, peer, region, {}));
    loans.push_back(worker.offered(lents.back()));
    const gpuloan_loan_report report = lents.back().report();
    expect_equal(report.gate, index < kPairs ? GPULOAN_GATE_EVENT : GPULOAN_GATE_HOST, "gate of loan " + std::to_string(index + 1));
    if (index >= kPairs) expect_contains(report.gate_reason, "event", "gate_reason beyond the pairs");
  }
  for (Borrowed& loan : loans) {
    loan.acquire();
    loan.check(1);
    loan.done();
  }
  for (const Lent& lent : lents) lent.ended();
  const Lent next = lend(bench, peer, region, {});
  expect_equal(next.report().gate, GPULOAN_GATE_EVENT, "gate of the next loan");
  Borrowed loan = worker.offered(next);
  loan.acquire();
  loan.done();
  next.ended();
}

// The first context that a program makes there: its status and what it says.
void expect_refused(const Profile& profile) {
  auto options = init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_EXPORTER;
  options.driver = "sim";
  gpuloan_context* context = nullptr;
  expect_status(gpuloan_context_create(&options, &context), profile.refused, "gpuloan_context_create");
  expect_contains(gpuloan_error_text(), profile.gate_reason, "the text");
}

int run_profile(const Profile& profile) {
  expect(::setenv("GPULOAN_SIM_PROFILE", profile.name, 1) == 0, "setenv");
  watchdog(kSeconds, profile.name);
  const TempFolder folder("gpuloan-profile");
  use_private_sim(folder);
  if (profile.refused != GPULOAN_OK) {
    expect_refused(profile);
    return 0;
  }
  Cell cell;
  cell.driver = "sim";
  cell.rung = kAllRungs;
  cell.gate = GPULOAN_GATE_AUTO;
  Gpu gpu("sim");
  gpu.warm_up();
  const Bench bench{cell, gpu};
  const std::string wrong = run_guarded(bench, profile.name, [&] {
    Exporter exporter(bench, [](gpuloan_context_options& options) { options.rungs = static_cast<std::uint32_t>(kAllRungs); });
    Worker worker(bench);
    gpuloan_peer* peer = exporter.attach(worker);
    const Region region(peer, (1U << 20) + 3);
    lend_both_ways(bench, profile, peer, worker, region.pointer(), region.bytes(), profile.arena, "region");
    const std::uint64_t block = gpu.alloc(300'007);
    lend_both_ways(bench, profile, peer, worker, block, 300'007, profile.block, "block");
    if (std::strcmp(profile.name, "no-memops") == 0) lend_beyond_the_events(bench, peer, worker);
    worker.close();
    gpu.free(block);
  });
  expect(wrong.empty(), wrong);
  if (std::strcmp(profile.name, "pool-imports-die") == 0) lend_pool_memory(bench);
  return 0;
}

int run(int count, char** words) {
  const std::string_view word = count > 1 ? words[1] : "";
  if (word == "--worker" && count >= 4) {
    die_with_parent();
    const int control = std::atoi(words[2]), loan_end = std::atoi(words[3]);
    for (const int fd : {control, loan_end}) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    return serve(control, loan_end, Habitat::Process);
  }
  for (const Profile& profile : kProfiles) {
    if (word == "--list") std::printf("%s\n", profile.name);
    else if (word == profile.name) return run_profile(profile);
  }
  expect(word == "--list", "no profile '" + std::string(word) + "'; --list names them");
  return 0;
}

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
