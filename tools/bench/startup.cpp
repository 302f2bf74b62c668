// SPDX-License-Identifier: MIT
#include "startup.hpp"

#include "link.hpp"

namespace gpuloan::tool::bench {
namespace {

constexpr std::uint64_t kBytes = 64 << 10;

const char* canary_text(std::uint32_t canary) {
  return canary == GPULOAN_CANARY_VERIFIED ? "verified" : canary == GPULOAN_CANARY_DEMOTED ? "demoted" : "not attempted";
}

// One loan that the worker fills; `called` is when lend was called.
gpuloan_loan_report lend_once(Peer& peer, const Region& region, const Deadline& deadline, std::uint64_t& called) {
  auto wish = init<gpuloan_lend_options>();
  wish.access = GPULOAN_ACCESS_WRITE;
  wish.stream = GPULOAN_STREAM_CPU;
  called = clock_ns();
  Loan loan = peer.lend(region.pointer(), region.bytes(), wish);
  wait_in_slices(deadline, [&](Milliseconds slice) { loan.wait_end(slice); });
  return loan.report();
}

} // namespace

Startup measure_startup(const BenchOptions& options, Session& session, const Run::Progress& progress) {
  enum { kProcess, kHandshake, kMemory, kCanary, kImport, kWork, kReturn, kTotal, kNext };
  Startup out{.bytes = kBytes, .workers = options.quick ? 3U : 9U, .canary = "", .steps = {
    {"process", "the worker's start, until its driver is open and it has a CUDA context and a stream", false},
    {"handshake", "from attach to PEER_READY", true},
    {"memory", "region_create: a chunk for the new peer", true},
    {"canary", "from the first lend to step EXPORT: the battery of canary loans", true},
    {"import", "EXPORT to IMPORT: the record crosses, the worker maps the chunk", true},
    {"work", "IMPORT to DONE: the worker's fill", true},
    {"return", "DONE to RELEASE", true},
    {"total", "from attach to RELEASE of the first loan", false},
    {"next loan", "from lend to RELEASE of the second loan", false},
  }};
  const Deadline deadline(options.common.timeout_ms);
  const Cuda cuda(session.driver, options.common.device);
  for (std::uint32_t worker = 0; worker < out.workers; ++worker) {
    progress("startup, worker " + std::to_string(worker + 1));
    std::uint64_t at = clock_ns();
    // Each step begins where the one before ended.
    const auto until = [&](int step, std::uint64_t end) {
      out.steps[static_cast<std::size_t>(step)].us.push_back((static_cast<double>(end) - static_cast<double>(at)) / 1000);
      at = end;
    };
    Link link = start_worker(options);
    until(kProcess, clock_ns());
    const std::uint64_t attached = at;
    join(link, session.context, deadline);
    until(kHandshake, clock_ns());
    auto wish = init<gpuloan_region_options>();
    wish.bytes = kBytes;
    wish.access = GPULOAN_ACCESS_WRITE;
    Region region = link.peer.create_region(wish);
    link.channel->send({.op = Op::Loans, .count = 2, .bytes = kBytes});
    std::uint64_t called = 0;
    const gpuloan_loan_report first = lend_once(link.peer, region, deadline, called);
    until(kMemory, called);
    until(kCanary, first.step_ns[GPULOAN_STEP_EXPORT]);
    until(kImport, first.step_ns[GPULOAN_STEP_IMPORT]);
    until(kWork, first.step_ns[GPULOAN_STEP_DONE]);
    until(kReturn, first.step_ns[GPULOAN_STEP_RELEASE]);
    at = attached;
    until(kTotal, first.step_ns[GPULOAN_STEP_RELEASE]);
    out.canary = canary_text(first.canary);
    const gpuloan_loan_report next = lend_once(link.peer, region, deadline, called);
    at = called;
    until(kNext, next.step_ns[GPULOAN_STEP_RELEASE]);
    static_cast<void>(link.channel->expect(Op::Loans));
    region.destroy();
    link.channel->send({.op = Op::Bye});
    link.child.wait(deadline);
  }
  return out;
}

} // namespace gpuloan::tool::bench
