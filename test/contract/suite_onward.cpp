// SPDX-License-Identifier: MIT
//
// A worker's result lent on to another worker (contract rule 6): as it is where it has its chunk to itself, exclusively
// where its maker unmaps it first, else as a copy on the device.
#include "suite.hpp"

#include <cstdlib>

namespace loan_test {
namespace {

constexpr std::uint64_t kAlone = (std::uint64_t{3} << 20) + 5; // a chunk of its own
constexpr std::uint64_t kShared = 70'001;

struct Scene {
  // `setting`: of the maker's driver alone.
  explicit Scene(const Bench& bench_, const char* setting = nullptr, const char* value = nullptr)
      : bench(bench_), exporter(bench_), maker((set(setting, value), bench_)), reader((set(setting, nullptr), bench_)), maker_peer(exporter.attach(maker, "maker")),
        reader_peer(exporter.attach(reader, "reader")) {
    warm_up(bench, reader_peer, reader);
  }
  static void set(const char* setting, const char* value) {
    if (setting != nullptr) expect((value != nullptr ? ::setenv(setting, value, 1) : ::unsetenv(setting)) == 0, "setenv");
  }
  [[nodiscard]] Granted result(std::uint64_t bytes, std::uint64_t seed) {
    Borrowed wish = maker.request(bytes);
    Granted granted = grant(bench, exporter.event(GPULOAN_EVENT_REQUEST).request, {});
    wish.acquire();
    wish.fill(seed);
    wish.done();
    granted.loan.ended();
    return granted;
  }
  // The whole life of a read loan to the reader; its report.
  gpuloan_loan_report read(const Region& region, std::uint64_t seed, const LendArgs& args = {}) {
    const Lent lent = lend(bench, reader_peer, region, args);
    Borrowed loan = reader.offered(lent);
    loan.acquire();
    loan.check(seed);
    expect_status(gpuloan_region_destroy(region.get()), GPULOAN_ERR_BUSY, "destroy of what is lent on");
    loan.done();
    lent.ended();
    return lent.report();
  }
  const Bench& bench;
  Exporter exporter;
  Worker maker, reader;
  gpuloan_peer* maker_peer;
  gpuloan_peer* reader_peer;
};

} // namespace

const char* only_vmm(const Bench& bench) { return bench.cell.rung == GPULOAN_RUNG_VMM ? nullptr : "a form of the vmm rung"; }
const char* only_simulated_vmm(const Bench& bench) { return only_vmm(bench) != nullptr ? only_vmm(bench) : only_simulated(bench); }

// I4
void lent_on(const Bench& bench) {
  Scene scene(bench);
  {
    const Granted alone = scene.result(kAlone, 1);
    const gpuloan_loan_report as_it_is = scene.read(alone.region, 1, {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY});
    expect_equal(as_it_is.rung, GPULOAN_RUNG_VMM, "rung");
    expect_equal(as_it_is.copied_bytes, 0U, "copied bytes of what is lent on as it is");
    expect_equal(as_it_is.exposed_bytes, (std::uint64_t{4} << 20) - kAlone, "exposed bytes: the rest of its chunk");
    expect_contains(as_it_is.writers, "maker", "who may still write it");

    const gpuloan_loan_report exclusive = scene.read(alone.region, 1, {.exclusive = true});
    expect_equal(exclusive.copied_bytes, 0U, "copied bytes of an exclusive loan");
    expect(exclusive.writers[0] == '\0', std::string("who may still write it: ") + exclusive.writers);

    // Its maker gets it back: the chunk is made known again.
    const Lent again = lend(bench, scene.maker_peer, alone.region, {.access = GPULOAN_ACCESS_WRITE});
    Borrowed loan = scene.maker.offered(again);
    loan.acquire();
    loan.check(1);
    loan.fill(2);
    loan.done();
    again.ended();
    expect_equal(scene.read(alone.region, 2).copied_bytes, 0U, "copied bytes");
  }
  {
    const Granted shared = scene.result(kShared, 3);
    gpuloan_loan* none = nullptr;
    const LendArgs zero_copy = {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY};
    expect_status(try_lend(bench, scene.reader_peer, shared.region.pointer(), kShared, zero_copy, &none), GPULOAN_ERR_NO_RUNG, "zero-copy of a shared chunk");
    expect_contains(gpuloan_error_text(), "shares its chunk", "the reason");
    const gpuloan_loan_report copied = scene.read(shared.region, 3);
    expect_equal(copied.rung, GPULOAN_RUNG_VMM, "rung of the copy");
    expect_equal(copied.copied_bytes, kShared, "copied bytes");
    expect(copied.writers[0] == '\0', "nobody else writes the copy");
    // For write, too, and what the reader wrote comes back.
    const Lent write = lend(bench, scene.reader_peer, shared.region, {.access = GPULOAN_ACCESS_WRITE});
    Borrowed writer = scene.reader.offered(write);
    writer.acquire();
    writer.fill(4);
    writer.done();
    write.ended();
    expect_equal(write.report().copied_bytes, kShared, "copied bytes of the write loan");
    expect_pattern(bench, shared.region.pointer(), kShared, 4);
  }
  scene.reader.close();
  scene.maker.close();
}

// I4. The reader dies with it: the maker's region cannot go before the reader is proven gone.
void lent_on_and_killed(const Bench& bench) {
  Scene scene(bench);
  Granted alone = scene.result(kAlone, 1);
  const Lent lent = lend(bench, scene.reader_peer, alone.region, {});
  Borrowed loan = scene.reader.offered(lent);
  loan.acquire();
  scene.reader.kill();
  lent.ended(GPULOAN_ERR_PEER_LOST);
  expect(becomes([&] { return lent.report().memory_state == GPULOAN_MEMORY_RELEASED; }), "quarantined for ever");
  expect_equal(scene.exporter.stats().quarantined_bytes, 0U, "quarantined bytes");
  alone.region.destroy();
  scene.maker.close();
}

// Rule 6. Nobody can ask a lost maker to unmap: `exclusive` needs the proof that it is gone, which none is under MPS.
void exclusive_of_a_lost_maker(const Bench& bench) {
  {
    Scene scene(bench);
    const Granted alone = scene.result(kAlone, 1);
    scene.maker.kill();
    expect(becomes([&] { return scene.exporter.stats().surrendered_bytes == 0; }), "no proof that the maker is gone");
    const gpuloan_loan_report report = scene.read(alone.region, 1, {.exclusive = true});
    expect(report.writers[0] == '\0', std::string("who may still write it: ") + report.writers);
    scene.reader.close();
  }
  Scene scene(bench, "GPULOAN_SIM_MPS", "1");
  const Granted alone = scene.result(kAlone, 1);
  scene.maker.kill();
  expect(becomes([&] { return scene.exporter.stats().surrendered_bytes == 0; }), "the tether of a dead maker did not let go");
  gpuloan_loan* none = nullptr;
  expect_status(try_lend(bench, scene.reader_peer, alone.region.pointer(), kAlone, {.exclusive = true}, &none), GPULOAN_ERR_PEER_LOST, "exclusive without a proof");
  expect_contains(gpuloan_error_text(), "under MPS", "the reason");
  expect_contains(scene.read(alone.region, 1).writers, "maker", "who may still write it");
  scene.reader.close();
}

} // namespace loan_test
