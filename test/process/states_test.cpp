// SPDX-License-Identifier: MIT
//
// Every function of a loan, in every state of a loan, at the right side and at the wrong one (case J10). Each cell of the two
// tables is a loan of its own: it is brought into the state, the function is called, what it says is compared, and then both
// sides bring the loan to its end, after which its region can be destroyed.
#include "../support/check.hpp"
#include "../support/gpu.hpp"
#include "../support/host.hpp"

#include <gpuloan/gpuloan.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <span>
#include <sstream>
#include <string>

namespace loan_test {
namespace {

constexpr std::uint64_t kBytes = 10'000;

struct Sides {
  Gpu& gpu;
  gpuloan_context* exporter = nullptr;
  gpuloan_context* importer = nullptr;
  gpuloan_peer* to_importer = nullptr; // the exporter's
  gpuloan_peer* to_exporter = nullptr;
};

gpuloan_context* make(std::uint32_t role) {
  auto options = init<gpuloan_context_options>();
  options.role = role;
  options.driver = "sim";
  gpuloan_context* context = nullptr;
  expect_ok(gpuloan_context_create(&options, &context), "gpuloan_context_create");
  return context;
}

gpuloan_event next(gpuloan_context* context, std::uint32_t type) {
  auto event = init<gpuloan_event>();
  do expect_ok(gpuloan_context_next_event(context, kWaitMs, &event), "gpuloan_context_next_event");
  while (event.type != type);
  return event;
}

void connect(Sides& sides) {
  SocketPair pair = make_socketpair();
  expect_ok(gpuloan_context_attach(sides.exporter, pair.left.release(), "states"), "gpuloan_context_attach");
  expect_ok(gpuloan_context_adopt(sides.importer, pair.right.release(), kWaitMs, &sides.to_exporter), "gpuloan_context_adopt");
  sides.to_importer = next(sides.exporter, GPULOAN_EVENT_PEER_READY).peer;
}

// A loan as both sides have it.
struct Pair {
  gpuloan_region* region = nullptr;
  gpuloan_loan* lent = nullptr;
  gpuloan_loan* borrowed = nullptr;
};

enum State { Requested, NotReady, Ready, Held, Finishing, Idle, Cancelled, Ended, Lost, kStates };
constexpr const char* kStateNames[kStates] = {"requested", "not ready", "ready", "held", "finishing", "idle", "cancelled", "ended", "lost"};
constexpr unsigned kProducer = 1, kWorker = 2; // streams

void hold_borrowed(const Pair& pair) {
  auto view = init<gpuloan_view>();
  expect_ok(gpuloan_loan_acquire(pair.borrowed, kWaitMs, &view), "gpuloan_loan_acquire");
}

void bring(Sides& sides, Pair& pair, State state) {
  auto wish = init<gpuloan_region_options>();
  wish.bytes = kBytes;
  wish.access = GPULOAN_ACCESS_WRITE;
  if (state == Requested) {
    auto request = init<gpuloan_request_options>();
    request.bytes = kBytes;
    expect_ok(gpuloan_request_send(sides.to_exporter, &request, &pair.borrowed), "gpuloan_request_send");
    return;
  }
  expect_ok(gpuloan_region_create(sides.to_importer, &wish, &pair.region), "gpuloan_region_create");
  const std::uint64_t pointer = gpuloan_region_pointer(pair.region);
  if (state == NotReady) {
    sides.gpu.hold(kProducer);
    sides.gpu.upload(pointer, kBytes, 1, kProducer);
  }
  auto options = init<gpuloan_lend_options>();
  options.access = GPULOAN_ACCESS_WRITE;
  options.keep_open = state == Idle ? 1 : 0;
  options.stream = sides.gpu.stream(state == NotReady ? kProducer : 0);
  expect_ok(gpuloan_lend(sides.to_importer, pointer, kBytes, &options, &pair.lent), "gpuloan_lend");
  pair.borrowed = next(sides.importer, GPULOAN_EVENT_LOAN_OFFERED).loan;
  if (state == NotReady || state == Ready) return;
  hold_borrowed(pair);
  if (state == Held) return;
  if (state == Cancelled) {
    expect_ok(gpuloan_loan_cancel(pair.lent, "cancelled on purpose"), "gpuloan_loan_cancel");
    expect(becomes([&] {
             auto report = init<gpuloan_loan_report>();
             expect_ok(gpuloan_loan_report_get(pair.borrowed, &report), "gpuloan_loan_report_get");
             return report.outcome != GPULOAN_OK;
           }), "the importer does not hear of the end");
    return;
  }
  if (state == Finishing) {
    sides.gpu.hold(kWorker);
    sides.gpu.upload(pointer, kBytes, 2, kWorker);
  }
  expect_ok(gpuloan_loan_done(pair.borrowed, sides.gpu.stream(state == Finishing ? kWorker : 0)), "gpuloan_loan_done");
  if (state == Finishing) return;
  expect_ok(gpuloan_loan_wait_done(pair.lent, kWaitMs), "gpuloan_loan_wait_done");
  expect_ok(gpuloan_loan_wait_done(pair.borrowed, kWaitMs), "gpuloan_loan_wait_done");
  if (state == Ended) {
    expect_ok(gpuloan_loan_wait_end(pair.lent, kWaitMs), "gpuloan_loan_wait_end");
    expect_ok(gpuloan_loan_wait_end(pair.borrowed, kWaitMs), "gpuloan_loan_wait_end");
  }
}

// A state of its own pair of contexts: the other side has closed the connection while the loan was held.
void bring_lost(Sides& sides, Pair& pair, bool exporter_goes) {
  bring(sides, pair, Held);
  gpuloan_peer_close(exporter_goes ? sides.to_importer : sides.to_exporter);
  (exporter_goes ? sides.to_importer : sides.to_exporter) = nullptr;
  next(exporter_goes ? sides.importer : sides.exporter, GPULOAN_EVENT_PEER_LOST);
}

void end(Sides& sides, Pair& pair) {
  sides.gpu.release_all();
  gpuloan_loan_unref(pair.borrowed); // returns it, where it is open
  if (pair.lent == nullptr && sides.to_importer != nullptr) { // a request
    const gpuloan_event event = next(sides.exporter, GPULOAN_EVENT_REQUEST);
    expect_ok(gpuloan_request_deny(event.request, "enough"), "gpuloan_request_deny");
  }
  if (pair.lent == nullptr) return;
  const gpuloan_status reclaimed = gpuloan_reclaim(pair.lent, kWaitMs);
  expect(reclaimed != GPULOAN_ERR_TIMEOUT, "the loan does not end");
  gpuloan_loan_unref(pair.lent);
  expect_ok(gpuloan_region_destroy(pair.region), "gpuloan_region_destroy");
}

struct Function {
  const char* name;
  gpuloan_status (*call)(gpuloan_loan* loan, void* stream);
};
constexpr std::array<Function, 11> kFunctions = {{
    {"acquire", [](gpuloan_loan* loan, void*) { auto view = init<gpuloan_view>(); return gpuloan_loan_acquire(loan, 0, &view); }},
    {"acquire_on", [](gpuloan_loan* loan, void* stream) { auto view = init<gpuloan_view>(); return gpuloan_loan_acquire_on(loan, stream, 0, &view); }},
    {"used_on", [](gpuloan_loan* loan, void* stream) { return gpuloan_loan_used_on(loan, stream); }},
    {"done", [](gpuloan_loan* loan, void* stream) { return gpuloan_loan_done(loan, stream); }},
    {"return", [](gpuloan_loan* loan, void*) { return gpuloan_loan_return(loan); }},
    {"fail", [](gpuloan_loan* loan, void*) { return gpuloan_loan_fail(loan, "on purpose"); }},
    {"ready", [](gpuloan_loan* loan, void* stream) { return gpuloan_loan_ready(loan, stream); }},
    {"reclaim", [](gpuloan_loan* loan, void*) { return gpuloan_reclaim(loan, 0); }},
    {"cancel", [](gpuloan_loan* loan, void*) { return gpuloan_loan_cancel(loan, "on purpose"); }},
    {"wait_done", [](gpuloan_loan* loan, void*) { return gpuloan_loan_wait_done(loan, 0); }},
    {"wait_end", [](gpuloan_loan* loan, void*) { return gpuloan_loan_wait_end(loan, 0); }},
}};

// One line for a state: what each of kFunctions says, in that order. SOON: OK or TIMEOUT, as the other side's library is quick or not.
struct Row {
  State state;
  const char* says;
};
constexpr Row kImporter[] = {
    {Requested, "TIMEOUT TIMEOUT STATE STATE OK OK STATE STATE STATE STATE TIMEOUT"},
    {NotReady, "TIMEOUT OK STATE STATE OK OK STATE STATE STATE STATE TIMEOUT"},
    {Ready, "OK OK STATE STATE OK OK STATE STATE STATE STATE TIMEOUT"},
    {Held, "STATE STATE OK OK OK OK STATE STATE STATE STATE TIMEOUT"},
    {Finishing, "STATE STATE STATE STATE OK OK STATE STATE STATE TIMEOUT TIMEOUT"},
    {Idle, "TIMEOUT TIMEOUT STATE STATE OK OK STATE STATE STATE OK TIMEOUT"},
    {Cancelled, "CANCELLED CANCELLED OK CANCELLED OK OK STATE STATE STATE CANCELLED TIMEOUT"},
    {Ended, "STATE STATE STATE STATE OK OK STATE STATE STATE OK OK"},
    {Lost, "PEER_LOST PEER_LOST OK PEER_LOST OK OK STATE STATE STATE PEER_LOST TIMEOUT"},
};
constexpr Row kExporter[] = {
    {NotReady, "STATE STATE STATE STATE STATE STATE STATE TIMEOUT OK TIMEOUT TIMEOUT"},
    {Ready, "STATE STATE STATE STATE STATE STATE STATE TIMEOUT OK TIMEOUT TIMEOUT"},
    {Held, "STATE STATE STATE STATE STATE STATE STATE TIMEOUT OK TIMEOUT TIMEOUT"},
    {Finishing, "STATE STATE STATE STATE STATE STATE STATE TIMEOUT OK TIMEOUT TIMEOUT"},
    {Idle, "STATE STATE STATE STATE STATE STATE OK SOON OK OK TIMEOUT"},
    {Cancelled, "STATE STATE STATE STATE STATE STATE STATE TIMEOUT OK CANCELLED TIMEOUT"},
    {Ended, "STATE STATE STATE STATE STATE STATE STATE OK STATE OK OK"},
    {Lost, "STATE STATE STATE STATE STATE STATE STATE PEER_LOST STATE PEER_LOST PEER_LOST"},
};

// "GPULOAN_ERR_STATE" as "STATE".
std::string short_name(gpuloan_status status) {
  const std::string name = gpuloan_status_name(status);
  return name.substr(name.starts_with("GPULOAN_ERR_") ? 12 : 8);
}

bool agrees(const std::string& says, const std::string& wanted) {
  std::istringstream left(says), right(wanted);
  for (std::string one, other; right >> other;) {
    if (!(left >> one) || (one != other && !(other == "SOON" && (one == "OK" || one == "TIMEOUT")))) return false;
  }
  return true;
}

std::string call_in_state(Sides& sides, State state, bool at_importer, const Function& function) {
  Pair pair;
  const bool lost = state == Lost;
  if (lost) bring_lost(sides, pair, at_importer);
  else bring(sides, pair, state);
  const gpuloan_status status = function.call(at_importer ? pair.borrowed : pair.lent, sides.gpu.stream());
  if (status != GPULOAN_OK) expect(std::strlen(gpuloan_error_text()) > 0, "a status without a text");
  end(sides, pair);
  if (lost) connect(sides);
  return short_name(status);
}

int compare(Sides& sides, std::span<const Row> rows, bool at_importer) {
  int wrong = 0;
  for (const Row& row : rows) {
    std::string says;
    for (const Function& function : kFunctions) {
      watchdog(60, function.name);
      says += (says.empty() ? "" : " ") + call_in_state(sides, row.state, at_importer, function);
    }
    const bool good = agrees(says, row.says);
    std::printf("%s %s, %s\n", good ? "ok" : "not ok", at_importer ? "importer" : "exporter", kStateNames[row.state]);
    if (!good) std::printf("  # got    %s\n  # wanted %s\n", says.c_str(), row.says);
    wrong += good ? 0 : 1;
  }
  return wrong;
}

// A caller that does not look at the status finds nothing of the call before.
void clear_outputs(gpuloan_context* context) {
  auto event = init<gpuloan_event>();
  while (gpuloan_context_next_event(context, 0, &event) == GPULOAN_OK) {}
  for (gpuloan_context* const each : {context, static_cast<gpuloan_context*>(nullptr)}) {
    event.type = GPULOAN_EVENT_LOAN_OFFERED;
    event.loan = reinterpret_cast<gpuloan_loan*>(&event);
    event.text[0] = 'x';
    expect_status(gpuloan_context_next_event(each, 0, &event), each != nullptr ? GPULOAN_ERR_TIMEOUT : GPULOAN_ERR_INVALID, "gpuloan_context_next_event");
    expect(event.type == GPULOAN_EVENT_NONE && event.loan == nullptr && event.text[0] == '\0' && event.size == sizeof event, "out_event is not cleared");
  }
  auto view = init<gpuloan_view>();
  view.pointer = 1;
  view.host = &view;
  expect_status(gpuloan_loan_acquire(nullptr, 0, &view), GPULOAN_ERR_INVALID, "gpuloan_loan_acquire");
  expect(view.pointer == 0 && view.host == nullptr && view.size == sizeof view, "out_view is not cleared");
}

int run(int, char**) {
  const TempFolder folder("gpuloan-states");
  use_private_sim(folder);
  Gpu gpu("sim");
  Sides sides{gpu, make(GPULOAN_ROLE_EXPORTER), make(GPULOAN_ROLE_IMPORTER)};
  connect(sides);
  const int wrong = compare(sides, kImporter, true) + compare(sides, kExporter, false);
  clear_outputs(sides.exporter);
  gpuloan_context_destroy(sides.importer);
  gpuloan_context_destroy(sides.exporter);
  return wrong == 0 ? 0 : 1;
}

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
