// SPDX-License-Identifier: MIT
//
// The exporter's side of a test, in its own thread.
#include "bench.hpp"

#include <algorithm>

namespace loan_test {

std::string cell_name(const Cell& cell) {
  return std::string(gpuloan_rung_name(cell.rung)) + "/" + gpuloan_gate_name(cell.gate) + "/" + gpuloan_engine_name(cell.engine);
}

// ---- Exporter -----------------------------------------------------------------------------------------------------

Exporter::Exporter(const Bench& bench, const ContextTweak& tweak) {
  auto options = init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_EXPORTER;
  options.engine = bench.cell.engine;
  options.driver = bench.cell.driver.c_str();
  options.rungs = bench.cell.rung;
  options.gate = bench.cell.gate;
  options.canary_timeout_ms = kWaitMs; // a slow machine must not look like a deaf peer
  if (tweak) tweak(options);
  expect_ok(gpuloan_context_create(&options, &context_), "gpuloan_context_create");
}

Exporter::~Exporter() { destroy(); }

void Exporter::destroy() noexcept {
  gpuloan_context_destroy(context_);
  context_ = nullptr;
}

gpuloan_peer* Exporter::attach(Worker& worker, const char* account, Where where) {
  const int fd = worker.take_loan_end();
  expect_ok(gpuloan_context_attach(context_, fd, account), "gpuloan_context_attach", where);
  worker.post(worker.open_command(), where);
  gpuloan_peer* peer = event(GPULOAN_EVENT_PEER_READY, kWaitMs, where).peer;
  const Reply reply = worker.reply(where);
  if (reply.status != GPULOAN_OK) fail(std::string("the worker cannot open: ") + reply.text, where);
  expect(peer != nullptr, "PEER_READY names no peer", where);
  return peer;
}

gpuloan_event Exporter::event(gpuloan_event_type type, std::uint32_t timeout_ms, Where where) {
  const auto wanted = [type](const gpuloan_event& event) { return event.type == static_cast<std::uint32_t>(type); };
  const std::uint64_t end = now_ms() + timeout_ms;
  while (std::none_of(events_.begin(), events_.end(), wanted)) {
    auto next = init<gpuloan_event>();
    const std::uint64_t now = now_ms();
    const auto left = static_cast<std::uint32_t>(end > now ? end - now : 0);
    const gpuloan_status status = gpuloan_context_next_event(context_, left, &next);
    if (status != GPULOAN_OK) fail("event " + std::to_string(type) + " did not come: " + gpuloan_error_text(), where);
    events_.push_back(next);
  }
  const auto found = std::find_if(events_.begin(), events_.end(), wanted);
  const gpuloan_event event = *found;
  events_.erase(found);
  return event;
}

gpuloan_stats Exporter::stats() const {
  auto stats = init<gpuloan_stats>();
  expect_ok(gpuloan_context_stats(context_, &stats), "gpuloan_context_stats");
  return stats;
}

// ---- Region -------------------------------------------------------------------------------------------------------

Gpu* Region::own_memory = nullptr;

Region::Region(gpuloan_peer* peer, std::uint64_t bytes, gpuloan_access access, gpuloan_memory memory, Where where) {
  if (own_memory != nullptr && memory == GPULOAN_MEMORY_DEVICE) {
    bytes_ = bytes;
    if (bytes > 0) allocated_ = own_memory->alloc(bytes);
    return;
  }
  auto options = init<gpuloan_region_options>();
  options.bytes = bytes;
  options.access = access;
  options.memory = memory;
  expect_ok(gpuloan_region_create(peer, &options, &region_), "gpuloan_region_create", where);
}

Region::~Region() {
  if (region_ != nullptr) static_cast<void>(gpuloan_region_destroy(region_));
  if (allocated_ != 0) own_memory->free(allocated_);
}

void Region::destroy(Where where) {
  if (region_ != nullptr) expect_ok(gpuloan_region_destroy(std::exchange(region_, nullptr)), "gpuloan_region_destroy", where);
  if (allocated_ != 0) own_memory->free(std::exchange(allocated_, 0));
}

// ---- Loans --------------------------------------------------------------------------------------------------------

Lent& Lent::operator=(Lent&& other) noexcept {
  std::swap(loan_, other.loan_);
  return *this;
}

gpuloan_loan_report Lent::report(Where where) const {
  auto report = init<gpuloan_loan_report>();
  expect_ok(gpuloan_loan_report_get(loan_, &report), "gpuloan_loan_report_get", where);
  return report;
}

void Lent::done(Where where) const { expect_ok(gpuloan_loan_wait_done(loan_, kWaitMs), "gpuloan_loan_wait_done", where); }

void Lent::ended(gpuloan_status outcome, Where where) const {
  expect_status(gpuloan_loan_wait_end(loan_, kWaitMs), outcome, "gpuloan_loan_wait_end", where);
  const gpuloan_loan_report seen = report(where);
  expect_equal(seen.ended, 1, "report.ended", where);
  expect_status(seen.outcome, outcome, "report.outcome", where);
}

namespace {

gpuloan_lend_options lend_options(const Bench& bench, const LendArgs& args) {
  auto options = init<gpuloan_lend_options>();
  options.access = args.access;
  options.keep_open = args.keep_open ? 1 : 0;
  options.memory = args.memory;
  options.policy = args.policy;
  options.exclusive = args.exclusive ? 1 : 0;
  options.stream = bench.gpu.stream(args.stream);
  options.metadata = args.metadata.empty() ? nullptr : args.metadata.data();
  options.metadata_bytes = args.metadata.size();
  options.rungs = args.rungs;
  options.release = args.release;
  options.release_user = args.release_user;
  return options;
}

} // namespace

gpuloan_status try_lend(const Bench& bench, gpuloan_peer* peer, std::uint64_t pointer, std::uint64_t bytes, const LendArgs& args,
                        gpuloan_loan** out_loan) {
  const gpuloan_lend_options options = lend_options(bench, args);
  return gpuloan_lend(peer, pointer, bytes, &options, out_loan);
}

Lent lend(const Bench& bench, gpuloan_peer* peer, std::uint64_t pointer, std::uint64_t bytes, const LendArgs& args, Where where) {
  gpuloan_loan* loan = nullptr;
  expect_ok(try_lend(bench, peer, pointer, bytes, args, &loan), "gpuloan_lend", where);
  return Lent(loan);
}

Granted grant(const Bench& bench, gpuloan_request* request, const LendArgs& args, Where where) {
  const gpuloan_lend_options options = lend_options(bench, args);
  gpuloan_region* region = nullptr;
  gpuloan_loan* loan = nullptr;
  if (bench.own_memory()) {
    auto info = init<gpuloan_request_info>();
    expect_ok(gpuloan_request_info_get(request, &info), "gpuloan_request_info_get", where);
    Region own(info.bytes > 0 ? bench.gpu.alloc(info.bytes) : 0, info.bytes);
    expect_ok(gpuloan_request_grant_with(request, own.pointer(), &options, &loan), "gpuloan_request_grant_with", where);
    return {std::move(own), Lent(loan)};
  }
  expect_ok(gpuloan_request_grant(request, &options, &region, &loan), "gpuloan_request_grant", where);
  return {Region(region), Lent(loan)};
}

void warm_up(const Bench& bench, gpuloan_peer* peer, Worker& worker) {
  for (const gpuloan_access access : {GPULOAN_ACCESS_READ, GPULOAN_ACCESS_WRITE}) {
    const Region region(peer, 64);
    const Lent lent = lend(bench, peer, region, {.access = access});
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.done();
    lent.ended();
  }
}

// ---- Checks -------------------------------------------------------------------------------------------------------

void expect_steps(const gpuloan_loan_report& report, Where where) {
  std::uint64_t last = 0;
  for (unsigned step = 0; step < GPULOAN_STEP_COUNT; ++step) {
    const std::string name = gpuloan_step_name(static_cast<gpuloan_step>(step));
    if (report.step_ns[step] == 0) fail(name + " is missing in the report", where);
    if (report.step_ns[step] < last) {
      fail(name + " is " + std::to_string(last - report.step_ns[step]) + " ns before the step that precedes it", where);
    }
    last = report.step_ns[step];
  }
}

void expect_carried(const Bench& bench, const gpuloan_loan_report& report, Where where) {
  if (report.rung != static_cast<std::uint32_t>(bench.cell.rung) || report.gate != static_cast<std::uint32_t>(bench.cell.gate)) {
    fail(std::string("the loan went over ") + gpuloan_rung_name(report.rung) + "/" + gpuloan_gate_name(report.gate) + ", asked was " +
             cell_name(bench.cell),
         where);
  }
  if (bench.zero_copy()) {
    expect_equal(report.copied_bytes, 0U, "copied bytes on a rung that does not copy", where);
    if (report.bytes > 0) expect_equal(report.canary, GPULOAN_CANARY_VERIFIED, "report.canary", where);
  }
}

void expect_pattern(const Bench& bench, std::uint64_t pointer, std::uint64_t bytes, std::uint64_t seed, unsigned stream, Where where) {
  const std::string wrong = bench.gpu.mismatch(pointer, bytes, seed, stream);
  if (!wrong.empty()) fail("what the exporter sees: " + wrong, where);
}

} // namespace loan_test
