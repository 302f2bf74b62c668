// SPDX-License-Identifier: MIT
//
// Many loans in one call: more than a message holds, in their order, and what becomes of the others when one is refused.
#include "../support/host.hpp"
#include "no_device.hpp"

#include <gpuloan/gpuloan.hpp>

#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

namespace loan_test {
namespace {

using gpuloan::Milliseconds;

constexpr std::uint64_t kBytes = 256;
constexpr std::size_t kMany = 100; // a message has room for 33 records

struct Pair {
  gpuloan::Context exporter, importer = make_without_device(GPULOAN_ROLE_IMPORTER);
  gpuloan::Peer peer, to_exporter;
  gpuloan::Region region;

  explicit Pair(gpuloan::Context lender = make_without_device(GPULOAN_ROLE_EXPORTER)) : exporter(std::move(lender)) {
    SocketPair ends = make_socketpair();
    exporter.attach(ends.left.get(), "many");
    static_cast<void>(ends.left.release());
    to_exporter = importer.adopt(ends.right.release(), kPatience);
    peer = next(exporter, GPULOAN_EVENT_PEER_READY).take_peer();
    auto wish = gpuloan::init<gpuloan_region_options>();
    wish.bytes = kMany * kBytes;
    wish.access = GPULOAN_ACCESS_WRITE;
    wish.memory = GPULOAN_MEMORY_HOST;
    region = peer.create_region(wish);
  }
  [[nodiscard]] gpuloan_range range(std::size_t at) const { return {reinterpret_cast<std::uint64_t>(region.host()) + at * kBytes, kBytes}; }
  [[nodiscard]] static gpuloan_lend_options options() {
    auto options = gpuloan::init<gpuloan_lend_options>();
    options.access = GPULOAN_ACCESS_WRITE;
    options.memory = GPULOAN_MEMORY_HOST;
    options.stream = GPULOAN_STREAM_CPU;
    return options;
  }
  [[nodiscard]] gpuloan::Loan offered() { return next(importer, GPULOAN_EVENT_LOAN_OFFERED).take_loan(); }
};

template <typename Call>
void expect_refused(gpuloan_status status, Call call) {
  try {
    call();
  } catch (const gpuloan::StatusError& error) {
    expect_equal(error.status(), status, "the refusal");
    return;
  }
  fail("it was not refused");
}

void in_order() {
  Pair pair;
  for (int round = 1; round <= 2; ++round) { // the first announces the chunk, with its descriptor, between the records
    std::vector<gpuloan_range> ranges;
    for (std::size_t at = 0; at < kMany; ++at) ranges.push_back(pair.range(at));
    std::vector<gpuloan::Loan> lent, taken;
    pair.peer.lend_many(ranges, Pair::options(), lent);
    expect_equal(lent.size(), kMany, "loans that are out");
    for (std::size_t at = 0; at < kMany; ++at) {
      taken.push_back(pair.offered());
      expect_equal(taken.back().report().id, lent[at].report().id, "the order of the offers");
      std::memset(taken.back().acquire(kPatience).host, static_cast<int>(at) + round, kBytes);
    }
    gpuloan::Loan::done_many(taken, GPULOAN_STREAM_CPU);
    for (std::size_t at = 0; at < kMany; ++at) {
      const gpuloan::Event ended = next(pair.exporter, GPULOAN_EVENT_LOAN_ENDED);
      expect(ended.loan() == lent[at].get() && ended.status() == GPULOAN_OK, "the order of the ends");
      const auto* bytes = static_cast<const unsigned char*>(pair.region.host()) + at * kBytes;
      expect(bytes[0] == at + static_cast<std::size_t>(round) && bytes[kBytes - 1] == bytes[0], "the bytes of a loan");
    }
  }
}

void one_refused() {
  Pair pair;
  std::vector<gpuloan_range> ranges;
  for (std::size_t at = 0; at < 8; ++at) ranges.push_back(pair.range(at));
  ranges[5] = pair.range(2); // is out by then
  std::vector<gpuloan::Loan> lent, taken;
  expect_refused(GPULOAN_ERR_BUSY, [&] { pair.peer.lend_many(ranges, Pair::options(), lent); });
  expect_equal(lent.size(), std::size_t{5}, "loans before the range that is refused");
  expect_equal(pair.exporter.stats().loans_out, std::uint64_t{5}, "loans that are out");
  for (std::size_t at = 0; at < lent.size(); ++at) taken.push_back(pair.offered());
  for (const std::size_t at : {0U, 1U, 2U, 4U}) static_cast<void>(taken[at].acquire(kPatience));
  std::vector<gpuloan_loan*> handles;
  for (const gpuloan::Loan& loan : taken) handles.push_back(loan.get());
  std::uint32_t count = 77;
  expect_equal(gpuloan_loan_done_many(handles.data(), 5, GPULOAN_STREAM_CPU, &count), GPULOAN_ERR_STATE, "a loan that was not acquired");
  expect_equal(count, 3U, "turns before it");
  for (int at = 0; at < 3; ++at) static_cast<void>(next(pair.exporter, GPULOAN_EVENT_LOAN_ENDED));
  expect_equal(pair.exporter.stats().loans_out, std::uint64_t{2}, "loans that are still out");
  static_cast<void>(taken[3].acquire(kPatience));
  gpuloan_loan* twice[] = {handles[3], handles[3]};
  expect_equal(gpuloan_loan_done_many(twice, 2, GPULOAN_STREAM_CPU, &count), GPULOAN_ERR_STATE, "a loan that is in the list twice");
  expect_contains(gpuloan_error_text(), "loans[1] is in the list twice", "the refusal");
  expect_equal(count, 1U, "turns before the second time");
  gpuloan_loan* rest[] = {handles[4]};
  expect_equal(gpuloan_loan_done_many(rest, 1, GPULOAN_STREAM_CPU, &count), GPULOAN_OK, "the last");
  for (int at = 0; at < 2; ++at) static_cast<void>(next(pair.exporter, GPULOAN_EVENT_LOAN_ENDED));
  pair.region.destroy();
  count = 77;
  expect_equal(gpuloan_loan_done_many(nullptr, 1, GPULOAN_STREAM_CPU, &count), GPULOAN_ERR_INVALID, "no loans");
  expect_equal(count, 0U, "turns of no loans");
  gpuloan_loan* with_none[] = {handles[0], nullptr};
  count = 77;
  expect_equal(gpuloan_loan_done_many(with_none, 2, GPULOAN_STREAM_CPU, &count), GPULOAN_ERR_INVALID, "a loan that is none");
  expect_equal(count, 0U, "turns beside a loan that is none");
  auto no_access = Pair::options();
  no_access.access = 0;
  gpuloan_loan* none[1] = {};
  count = 77;
  expect_equal(gpuloan_lend_many(pair.peer.get(), ranges.data(), 1, &no_access, none, &count), GPULOAN_ERR_INVALID, "no access");
  expect_equal(count, 0U, "loans of options that are wrong");
  count = 77;
  expect_equal(gpuloan_lend_many(nullptr, ranges.data(), 1, &no_access, none, &count), GPULOAN_ERR_INVALID, "no peer");
  expect_equal(count, 0U, "loans to no peer");
  expect_equal(gpuloan_loan_done_many(nullptr, 0, GPULOAN_STREAM_CPU, &count), GPULOAN_OK, "none of them");
}

// Nobody takes an event for a while; what is told then is about the loans that still have a name.
void events_of_dropped_loans() {
  Pair pair;
  std::vector<gpuloan::Loan> kept;
  for (int round = 0; round < 5; ++round) {
    std::vector<gpuloan_range> ranges;
    for (std::size_t at = 0; at < kMany; ++at) ranges.push_back(pair.range(at));
    std::vector<gpuloan::Loan> lent, taken;
    pair.peer.lend_many(ranges, Pair::options(), lent);
    for (std::size_t at = 0; at < kMany; ++at) {
      taken.push_back(pair.offered());
      static_cast<void>(taken.back().acquire(kPatience));
    }
    gpuloan::Loan::done_many(taken, GPULOAN_STREAM_CPU);
    for (std::size_t at = 0; at < kMany; ++at) {
      lent[at].wait_end(kPatience);
      if (at % 10 == 3) kept.push_back(std::move(lent[at]));
    }
  }
  std::map<const gpuloan_loan*, std::vector<gpuloan_event_type>> told;
  while (auto event = pair.exporter.next_event(Milliseconds(0))) told[event->loan()].push_back(event->type());
  for (const gpuloan::Loan& loan : kept) {
    expect(told[loan.get()] == std::vector{GPULOAN_EVENT_LOAN_DONE, GPULOAN_EVENT_LOAN_ENDED}, "the events of a loan that was kept");
  }
  expect_equal(told.size(), kept.size(), "loans of which something is told");
}

// A context needs room for a canary: four loans.
void few_slots() {
  auto options = gpuloan::init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_EXPORTER;
  options.flags = GPULOAN_CONTEXT_NO_DEVICE;
  for (options.slots = 1; options.slots < 4; ++options.slots) {
    gpuloan_context* context = nullptr;
    expect_equal(gpuloan_context_create(&options, &context), GPULOAN_ERR_INVALID, "too few slots");
    expect_contains(gpuloan_error_text(), "options.slots is under 4", "the refusal");
  }
  options.slots = 4;
  Pair pair(gpuloan::Context::create(options));
  std::vector<gpuloan_range> ranges;
  for (std::size_t at = 0; at < 5; ++at) ranges.push_back(pair.range(at));
  std::vector<gpuloan::Loan> lent;
  expect_refused(GPULOAN_ERR_LIMIT, [&] { pair.peer.lend_many(ranges, Pair::options(), lent); });
  expect_equal(lent.size(), std::size_t{4}, "loans that are out with 4 slots");
}

} // namespace
} // namespace loan_test

int main() {
  try {
    loan_test::in_order();
    loan_test::one_refused();
    loan_test::few_slots();
    loan_test::events_of_dropped_loans();
    return 0;
  } catch (const loan_test::Failure& failure) {
    std::fprintf(stderr, "many_test: %s\n", failure.text.c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "many_test: %s\n", error.what());
  }
  return 1;
}
