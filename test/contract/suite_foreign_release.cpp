// SPDX-License-Identifier: MIT
//
// The release function: called exactly once for each loan that gpuloan_lend gave, once nobody else may touch the memory.
#include "suite_foreign.hpp"

#include <array>
#include <fcntl.h>
#include <memory>
#include <sys/resource.h>
#include <unistd.h>

namespace loan_test {
namespace {

constexpr std::uint64_t kReleaseBytes = (std::uint64_t{2} << 20) + 77;
constexpr std::uint32_t kReleaseKeptMs = 100;

// Memory for each way to carry it: cuMemAlloc memory (ipc), others' VMM memory (vmm), a pool's (host, and with a copy on the
// device), and the arena's own.
class Memory {
 public:
  static constexpr int kCount = 5, kArena = 4;
  Memory(const Bench& bench, gpuloan_peer* peer, int number) {
    if (number == kArena) region_.emplace_back(peer, kReleaseBytes);
    else foreign_ = std::make_unique<Foreign>(bench, kMade[number], Shape{.bytes = kReleaseBytes, .before = 512});
  }
  [[nodiscard]] std::uint64_t pointer() const { return foreign_ ? foreign_->pointer() : region_.front().pointer(); }
  // Whether it may be touched, and is kept, behind the loss of a peer.
  [[nodiscard]] static bool quarantined(int number) { return number < 2; }
  [[nodiscard]] static LendArgs args(int number) {
    return {.access = GPULOAN_ACCESS_WRITE, .rungs = static_cast<std::uint32_t>(kRungs[number])};
  }
  void free() {
    if (foreign_) foreign_->free();
    for (Region& region : region_) region.destroy();
  }
  void forget() { // it ended with its context
    for (Region& region : region_) region.forget();
  }

 private:
  static constexpr Made kMade[] = {Made::Alloc, Made::VmmMany, Made::PoolPrivate, Made::PoolPrivate};
  static constexpr gpuloan_rung kRungs[] = {GPULOAN_RUNG_IPC, GPULOAN_RUNG_VMM, GPULOAN_RUNG_HOST, GPULOAN_RUNG_VMM, GPULOAN_RUNG_VMM};
  std::unique_ptr<Foreign> foreign_;
  std::vector<Region> region_;
};

// Ends a loan in one of the ways that need no death.
gpuloan_status end_somehow(Borrowed loan, const Lent& lent, int way) {
  switch (way) {
    case 0:
      loan.done();
      return GPULOAN_OK;
    case 1:
      expect_ok(gpuloan_loan_cancel(lent, "enough"), "gpuloan_loan_cancel");
      expect(becomes([&] { return loan.report().outcome == GPULOAN_ERR_CANCELLED; }), "the worker does not learn of the cancel");
      expect_status(loan.try_done().status, GPULOAN_ERR_CANCELLED, "done of a cancelled loan");
      return GPULOAN_ERR_CANCELLED;
    case 2:
      loan.fail_with("it went wrong");
      return GPULOAN_ERR_FAILED;
    default:
      loan.give_back();
      return GPULOAN_ERR_RETURNED;
  }
}

} // namespace

// A14
void release_ends(const Bench& bench) {
  std::array<Released, Memory::kCount * 4> released;
  Released empty;
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  for (int number = 0; number < Memory::kCount; ++number) {
    Memory memory(bench, peer, number);
    for (int way = 0; way < 4; ++way) {
      Released& mine = released[static_cast<std::size_t>(number * 4 + way)];
      const Lent lent = lend(bench, peer, memory.pointer(), kReleaseBytes, with_release(Memory::args(number), mine));
      Borrowed loan = worker.offered(lent);
      loan.acquire();
      mine.expect_none("the release function while the loan is out");
      lent.ended(end_somehow(loan, lent, way));
      mine.expect_once("the release function of a loan that ended");
    }
    memory.free();
  }
  Lent nothing = lend(bench, peer, 0, 0, with_release({}, empty));
  Borrowed loan = worker.offered(nothing);
  loan.acquire();
  loan.done();
  nothing.ended();
  empty.expect_once("the release function of a loan of 0 bytes");
  worker.close();
  exporter.destroy();
  nothing.forget();
  for (const Released& each : released) each.expect_once("the release function in the end");
  empty.expect_once("the release function of a loan of 0 bytes in the end");
}

// Memory of the caller's own for what the worker asked for.
void release_grants(const Bench& bench) {
  Released released;
  Foreign memory(bench, Made::Alloc, {.bytes = kReleaseBytes});
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  Borrowed wish = worker.request(kReleaseBytes);
  gpuloan_request* request = exporter.event(GPULOAN_EVENT_REQUEST).request;
  auto options = init<gpuloan_lend_options>();
  options.release = Released::call;
  options.release_user = &released;
  options.stream = bench.gpu.stream();
  gpuloan_loan* granted = nullptr;
  const gpuloan_status refused = gpuloan_request_grant_with(request, memory.pointer() + 1, &options, &granted);
  expect_status(refused, GPULOAN_ERR_INVALID, "grant with too few bytes");
  released.expect_none("the release function of a grant that failed");
  expect_ok(gpuloan_request_grant_with(request, memory.pointer(), &options, &granted), "gpuloan_request_grant_with");
  const Lent lent(granted);
  expect_equal(lent.report().rung, GPULOAN_RUNG_IPC, "report.rung");
  wish.acquire();
  wish.fill(5);
  wish.done();
  lent.ended();
  released.expect_once("the release function of a granted request");
  memory.check(1, 5, 2);
  expect(lent.report().access == GPULOAN_ACCESS_WRITE && peer != nullptr, "a granted loan is for write");
  worker.close();
}

namespace {

// Lends the same bytes to the next, from inside the release function.
struct Chain {
  gpuloan_peer* peer = nullptr;
  std::uint64_t pointer = 0;
  std::atomic<int> calls = 0;
  std::atomic<int> status = GPULOAN_OK;
  std::atomic<gpuloan_loan*> next = nullptr;

  static void call(void* user) { static_cast<Chain*>(user)->lend_again(); }
  void lend_again() {
    ++calls;
    auto options = init<gpuloan_lend_options>();
    options.access = GPULOAN_ACCESS_WRITE;
    options.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY;
    options.stream = GPULOAN_STREAM_CPU;
    gpuloan_loan* made = nullptr;
    status = gpuloan_lend(peer, pointer, kReleaseBytes, &options, &made);
    next = made;
  }
};

} // namespace

// B9
void release_lends_again(const Bench& bench) {
  Chain chain;
  Foreign memory(bench, Made::Alloc, {.bytes = kReleaseBytes});
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  chain.peer = peer;
  chain.pointer = memory.pointer();
  LendArgs args = {.access = GPULOAN_ACCESS_WRITE};
  args.release = Chain::call;
  args.release_user = &chain;
  const Lent first = lend(bench, peer, memory.pointer(), kReleaseBytes, args);
  Borrowed writer = worker.offered(first);
  writer.acquire();
  writer.fill(1);
  writer.done();
  first.ended();
  expect(becomes([&] { return chain.next != nullptr || chain.status != GPULOAN_OK; }), "the release function lent nothing");
  expect_status(static_cast<gpuloan_status>(chain.status.load()), GPULOAN_OK, "gpuloan_lend in a release function");
  const Lent second(chain.next.load());
  Borrowed next = worker.offered(second);
  next.acquire();
  next.check(1);
  next.done();
  second.ended();
  expect_equal(chain.calls.load(), 1, "calls of the release function");
  worker.close();
}

// ---- The worker goes ----------------------------------------------------------------------------------------------

namespace {

// Notes, when it is called, what the loan's report says then.
struct Witness {
  std::atomic<gpuloan_loan*> loan = nullptr;
  std::atomic<int> calls = 0;
  std::atomic<std::uint32_t> state = UINT32_MAX;
  static void call(void* user) {
    auto* self = static_cast<Witness*>(user);
    auto report = init<gpuloan_loan_report>();
    if (gpuloan_loan_report_get(self->loan, &report) == GPULOAN_OK) self->state = report.memory_state;
    ++self->calls;
  }
};

// Nobody says when a call that must not come would have come: some time is watched.
void stays_uncalled(const Released& released) {
  for (const std::uint64_t end = now_ms() + kReleaseKeptMs; now_ms() < end; nap()) released.expect_none("the release function, too early");
}

enum class Leaves { Killed, Closes };

void release_lost(const Bench& bench, Leaves how) {
  for (int number = 0; number < Memory::kCount; ++number) {
    Witness witness;
    Exporter exporter(bench);
    Worker worker(bench, {.flags = OpenKeepHandles});
    gpuloan_peer* peer = exporter.attach(worker);
    Memory memory(bench, peer, number);
    LendArgs args = Memory::args(number);
    args.release = Witness::call;
    args.release_user = &witness;
    Lent lent = lend(bench, peer, memory.pointer(), kReleaseBytes, args);
    witness.loan = lent.get();
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    if (how == Leaves::Killed) {
      worker.kill();
    } else {
      worker.close();
    }
    lent.ended(GPULOAN_ERR_PEER_LOST);
    expect(becomes([&] { return witness.calls > 0; }), "the release function is not called");
    const gpuloan_memory_state wanted = number == Memory::kArena ? GPULOAN_MEMORY_RETIRED : GPULOAN_MEMORY_RELEASED;
    expect_equal(witness.state.load(), wanted, "memory_state in the release function");
    expect_equal(exporter.stats().quarantined_bytes, 0U, "quarantined bytes behind the release function");
    memory.free();
    exporter.destroy();
    lent.forget();
    expect_equal(witness.calls.load(), 1, "calls of the release function");
  }
}

} // namespace

void release_killed(const Bench& bench) { release_lost(bench, Leaves::Killed); }
void release_closed(const Bench& bench) { release_lost(bench, Leaves::Closes); }

// The connection ends here, and the worker lives on with what it has mapped.
void release_peer_closed(const Bench& bench) {
  for (int number = 0; number < Memory::kCount; ++number) {
    Released released;
    Exporter exporter(bench);
    Worker worker(bench);
    gpuloan_peer* peer = exporter.attach(worker);
    Memory memory(bench, peer, number);
    Lent lent = lend(bench, peer, memory.pointer(), kReleaseBytes, with_release(Memory::args(number), released));
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    gpuloan_peer_close(peer);
    lent.ended(GPULOAN_ERR_PEER_LOST);
    if (Memory::quarantined(number)) {
      stays_uncalled(released);
      expect_equal(lent.report().memory_state, GPULOAN_MEMORY_QUARANTINED, "memory_state while the worker lives");
    } else {
      released.expect_once("the release function of a connection that was closed");
    }
    worker.close();
    released.expect_once("the release function when the worker is gone");
    expect_equal(exporter.stats().quarantined_bytes, 0U, "quarantined bytes");
    memory.free();
    exporter.destroy();
    lent.forget();
    released.expect_once("the release function in the end");
  }
}

// The context ends with the loan out. What the worker has mapped is released when the worker is gone; the rest at once.
void release_context(const Bench& bench) {
  for (int number = 0; number < Memory::kCount; ++number) {
    Released released;
    Exporter exporter(bench);
    Worker worker(bench);
    gpuloan_peer* peer = exporter.attach(worker);
    Memory memory(bench, peer, number);
    Lent lent = lend(bench, peer, memory.pointer(), kReleaseBytes, with_release(Memory::args(number), released));
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    exporter.destroy();
    lent.forget();
    memory.forget();
    if (Memory::quarantined(number)) {
      stays_uncalled(released);
      loan.fill(1); // it may
      released.expect_none("the release function while the worker writes");
      worker.kill();
    }
    released.expect_once("the release function behind the context's end");
    if (!Memory::quarantined(number)) worker.kill();
    if (number != Memory::kArena) memory.free();
  }
}

// ---- gpuloan_lend fails -------------------------------------------------------------------------------------------

namespace {

// While it lives no descriptor can be opened.
class NoDescriptors {
 public:
  NoDescriptors() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const Fd next(::open("/dev/null", O_RDONLY | O_CLOEXEC)); // the lowest free number
    rlimit tight = before_;
    tight.rlim_cur = static_cast<rlim_t>(next.get());
    ::setrlimit(RLIMIT_NOFILE, &tight);
  }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};

// So that the next copy needs a chunk, and no canary.
void prove_copies(const Bench& bench, gpuloan_peer* peer, Worker& worker) {
  const Foreign first(bench, Made::Alloc, {.bytes = 100});
  const Lent lent = lend(bench, peer, first.pointer(), first.bytes(), {.rungs = GPULOAN_RUNG_VMM});
  Borrowed loan = worker.offered(lent);
  loan.acquire();
  loan.done();
  lent.ended();
}

} // namespace

// D1
void release_refused(const Bench& bench) {
  Released released;
  Foreign memory(bench, Made::Alloc, {.bytes = kReleaseBytes});
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  gpuloan_loan* none = nullptr;
  const auto lend_to_fail = [&](std::uint64_t pointer, LendArgs args) {
    return try_lend(bench, peer, pointer, kReleaseBytes, with_release(args, released), &none);
  };
  expect_status(lend_to_fail(memory.pointer() + 1, {}), GPULOAN_ERR_INVALID, "lend of a range that leaves the block");
  expect_status(lend_to_fail(memory.pointer(), {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY, .rungs = GPULOAN_RUNG_VMM}),
                GPULOAN_ERR_NO_RUNG, "lend without a rung");
  if (bench.gpu.simulated()) { // late: the loan is in the ledger already
    prove_copies(bench, peer, worker);
    const NoDescriptors limit;
    const gpuloan_status status = lend_to_fail(memory.pointer(), {.rungs = GPULOAN_RUNG_VMM});
    expect(status == GPULOAN_ERR_FD_LIMIT || status == GPULOAN_ERR_DRIVER, std::string("lend without a descriptor for the copy: ") + gpuloan_status_name(status));
    expect_contains(gpuloan_error_text(), "RLIMIT_NOFILE", "the sentence");
  }
  {
    const Lent lent = lend(bench, peer, memory.pointer(), kReleaseBytes, {});
    expect_status(lend_to_fail(memory.pointer(), {.access = GPULOAN_ACCESS_WRITE}), GPULOAN_ERR_BUSY, "lend of what is lent");
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.done();
    lent.ended();
  }
  worker.close();
  exporter.event(GPULOAN_EVENT_PEER_LOST);
  expect_status(lend_to_fail(memory.pointer(), {}), GPULOAN_ERR_PEER_LOST, "lend to a peer that is gone");
  expect(none == nullptr, "an output was written by a call that failed");
  exporter.destroy();
  released.expect_none("a release function of a loan that was never made");
}

} // namespace loan_test
