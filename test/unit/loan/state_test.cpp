// SPDX-License-Identifier: MIT
//
// The two state machines against what the contract says of every (state, event) pair. The expectation is written as the
// transitions that exist and the pairs that are too late to matter; every other pair is illegal.
#include <doctest/doctest.h>

#include <loan/state.hpp>

#include <map>
#include <random>
#include <set>
#include <string_view>
#include <vector>

using namespace gpuloan::loan;
using ES = ExportState;
using EE = ExportEvent;
using IS = ImportState;
using IE = ImportEvent;

namespace {

template <typename State, typename Event>
struct Expectation {
  std::map<std::pair<State, Event>, State> leads_to;
  std::set<std::pair<State, Event>> too_late;
};

Expectation<ES, EE> export_expectation() {
  Expectation<ES, EE> all;
  auto& to = all.leads_to;
  to[{ES::Preparing, EE::Send}] = ES::Out;
  // Nothing was handed out: whatever ends it, the memory is ours at once.
  for (const EE event : {EE::Fail, EE::LostRetire, EE::LostRelease, EE::LostQuarantine}) to[{ES::Preparing, event}] = ES::Released;
  to[{ES::Out, EE::Done}] = ES::Home;
  to[{ES::Home, EE::Ready}] = ES::Out;
  for (const ES held : {ES::Out, ES::Home, ES::Failing}) { // the importer has it
    to[{held, EE::Ack}] = ES::Released;
    to[{held, EE::LostRetire}] = ES::Retired;
    to[{held, EE::LostRelease}] = ES::Released;
    to[{held, EE::LostQuarantine}] = ES::Quarantined;
  }
  to[{ES::Out, EE::Fail}] = ES::Failing;
  to[{ES::Home, EE::Fail}] = ES::Failing;
  to[{ES::Retired, EE::Drop}] = ES::Surrendered;
  to[{ES::Surrendered, EE::Gone}] = ES::Released;
  to[{ES::Quarantined, EE::Gone}] = ES::Released;

  auto& late = all.too_late;
  late = {{ES::Home, EE::Done}, {ES::Failing, EE::Done}, {ES::Failing, EE::Fail}};
  for (const ES over : {ES::Released, ES::Retired, ES::Surrendered, ES::Quarantined}) {
    for (const EE event : {EE::Done, EE::Fail, EE::LostRetire, EE::LostRelease, EE::LostQuarantine}) late.insert({over, event});
  }
  late.insert({{ES::Released, EE::Drop}, {ES::Released, EE::Gone}, {ES::Retired, EE::Gone}, {ES::Surrendered, EE::Drop}});
  return all;
}

Expectation<IS, IE> import_expectation() {
  Expectation<IS, IE> all;
  auto& to = all.leads_to;
  to[{IS::Requested, IE::Export}] = IS::Offered;
  to[{IS::Requested, IE::Deny}] = IS::Ended;
  to[{IS::Requested, IE::Cancel}] = IS::Ended;
  to[{IS::Requested, IE::Return}] = IS::Requested; // the answer is still to come
  to[{IS::Offered, IE::Acquire}] = IS::Held;
  to[{IS::Held, IE::Done}] = IS::Finishing;
  to[{IS::Finishing, IE::Complete}] = IS::Idle;
  to[{IS::Idle, IE::Ready}] = IS::Offered;
  for (const IS free : {IS::Offered, IS::Idle}) { // no work of ours is under way
    to[{free, IE::Return}] = IS::Ended;
    to[{free, IE::Cancel}] = IS::Ended;
  }
  to[{IS::Held, IE::Return}] = IS::Letting;
  to[{IS::Held, IE::Cancel}] = IS::Held; // the caller still works on it
  to[{IS::Finishing, IE::Return}] = IS::Letting;
  to[{IS::Finishing, IE::Cancel}] = IS::Letting;
  to[{IS::Letting, IE::Complete}] = IS::Ended;

  auto& late = all.too_late;
  late = {{IS::Offered, IE::Complete}, {IS::Held, IE::Complete}, {IS::Idle, IE::Complete}, {IS::Letting, IE::Return}, {IS::Letting, IE::Cancel}};
  for (const IE event : {IE::Deny, IE::Ready, IE::Complete, IE::Return, IE::Cancel}) late.insert({IS::Ended, event});
  return all;
}

template <typename State, typename Event, typename Visit>
void each_pair(int states, int events, Visit visit) {
  for (int state = 0; state < states; ++state) {
    for (int event = 0; event < events; ++event) visit(static_cast<State>(state), static_cast<Event>(event));
  }
}

template <typename Visit>
void each_export(Visit visit) { each_pair<ES, EE>(kExportStates, kExportEvents, visit); }
template <typename Visit>
void each_import(Visit visit) { each_pair<IS, IE>(kImportStates, kImportEvents, visit); }

template <typename State, typename Event>
void compare(const Expectation<State, Event>& expected, State state, Event event) {
  CAPTURE(std::string(name(state)));
  CAPTURE(std::string(name(event)));
  const auto got = step(state, event);
  const std::pair pair{state, event};
  if (const auto found = expected.leads_to.find(pair); found != expected.leads_to.end()) {
    CHECK(got.verdict == Verdict::Go);
    CHECK(got.next == found->second);
  } else {
    CHECK(got.verdict == (expected.too_late.contains(pair) ? Verdict::Ignore : Verdict::Illegal));
    CHECK(got.next == state);
  }
}

// How far the memory has come on its way back (contract rule 10).
int stage(ES state) {
  switch (state) {
    case ES::Retired:
    case ES::Quarantined:
      return 1;
    case ES::Surrendered:
      return 2;
    case ES::Released:
      return 3;
    default:
      return 0;
  }
}

template <typename State, typename Event, typename Step>
std::set<State> reachable(State from, int events, Step next_of) {
  std::set<State> seen = {from};
  std::vector<State> open = {from};
  while (!open.empty()) {
    const State state = open.back();
    open.pop_back();
    for (int event = 0; event < events; ++event) {
      const auto got = next_of(state, static_cast<Event>(event));
      if (got.verdict == Verdict::Go && seen.insert(got.next).second) open.push_back(got.next);
    }
  }
  return seen;
}

std::set<ES> reachable(ES from) {
  return reachable<ES, EE>(from, kExportEvents, [](ES state, EE event) { return step(state, event); });
}
std::set<IS> reachable(IS from) {
  return reachable<IS, IE>(from, kImportEvents, [](IS state, IE event) { return step(state, event); });
}

constexpr bool is_loss(EE event) { return event == EE::LostRetire || event == EE::LostRelease || event == EE::LostQuarantine; }

} // namespace

TEST_CASE("exporter: every state and event") {
  const auto expected = export_expectation();
  each_export([&](ES state, EE event) { compare(expected, state, event); });
}

TEST_CASE("importer: every state and event") {
  const auto expected = import_expectation();
  each_import([&](IS state, IE event) { compare(expected, state, event); });
}

TEST_CASE("exporter: memory only moves forward") {
  each_export([](ES state, EE event) {
    const ExportStep got = step(state, event);
    CHECK(stage(got.next) >= stage(state));
    if (state == ES::Quarantined && got.verdict == Verdict::Go) CHECK(got.next == ES::Released);
    if (state == ES::Retired && got.verdict == Verdict::Go) CHECK(got.next == ES::Surrendered);
  });
}

TEST_CASE("exporter: an ended loan never returns") {
  each_export([](ES state, EE event) {
    if (ended(state)) CHECK(ended(step(state, event).next));
  });
  for (const ES state : {ES::Preparing, ES::Out, ES::Home, ES::Failing}) CHECK_FALSE(ended(state));
  for (const ES state : {ES::Released, ES::Retired, ES::Surrendered, ES::Quarantined}) CHECK(ended(state));
}

TEST_CASE("exporter: ACK only while the loan is out of our hands") {
  each_export([](ES state, EE event) {
    if (event != EE::Ack) return;
    const bool out = state == ES::Out || state == ES::Home || state == ES::Failing;
    CHECK((step(state, event).verdict == Verdict::Go) == out);
    CHECK(step(state, event).verdict != Verdict::Ignore); // a second ACK breaks the protocol
  });
}

TEST_CASE("exporter: only what lost its peer is not simply released") {
  each_export([](ES state, EE event) {
    const ExportStep got = step(state, event);
    if (got.verdict != Verdict::Go || ended(state)) return;
    if (got.next == ES::Retired || got.next == ES::Quarantined) CHECK(is_loss(event));
    if (got.next == ES::Released) CHECK((event == EE::Ack || event == EE::LostRelease || state == ES::Preparing));
    CHECK(got.next != ES::Surrendered);
  });
}

TEST_CASE("exporter: a failing loan is never good again") {
  for (int event = 0; event < kExportEvents; ++event) {
    const ES next = step(ES::Failing, static_cast<EE>(event)).next;
    CHECK((next == ES::Failing || ended(next)));
  }
}

TEST_CASE("what makes an open outcome a failure") {
  each_export([](ES state, EE event) {
    CAPTURE(std::string(name(state)));
    CAPTURE(std::string(name(event)));
    const bool expected = event == EE::Fail || (is_loss(event) && state != ES::Home);
    CHECK(fails(state, event) == expected);
  });
  CHECK_FALSE(fails(ES::Home, EE::LostRetire)); // every turn was done, then the peer died
  CHECK(fails(ES::Out, EE::LostRetire));
  CHECK_FALSE(fails(ES::Out, EE::Ack));
}

TEST_CASE("every state can be reached, and the end from every state") {
  CHECK(reachable(ES::Preparing).size() == kExportStates);
  CHECK(reachable(IS::Requested).size() == kImportStates);
  for (int state = 0; state < kExportStates; ++state) CHECK(reachable(static_cast<ES>(state)).contains(ES::Released));
  for (int state = 0; state < kImportStates; ++state) CHECK(reachable(static_cast<IS>(state)).contains(IS::Ended));
}

TEST_CASE("importer: no ACK before its own work is complete") {
  each_import([](IS state, IE event) {
    const ImportStep got = step(state, event);
    const bool working = state == IS::Held || state == IS::Finishing || state == IS::Letting;
    if (working && got.next == IS::Ended) CHECK(event == IE::Complete);
    if (state == IS::Ended) CHECK(got.next == IS::Ended);
  });
}

// C3
TEST_CASE("importer: a view only behind READY, one turn at a time") {
  each_import([](IS state, IE event) {
    const ImportStep got = step(state, event);
    if (event == IE::Acquire) CHECK((got.verdict == Verdict::Go) == (state == IS::Offered));
    if (got.verdict == Verdict::Go && got.next == IS::Held && state != IS::Held) CHECK(event == IE::Acquire);
    if (event == IE::Done) CHECK((got.verdict == Verdict::Go) == (state == IS::Held));
    if (event == IE::Ready) CHECK((got.verdict == Verdict::Go) == (state == IS::Idle));
  });
}

// Any order of events, as a hostile peer and a careless caller would bring them.
TEST_CASE("random walks end where they may") {
  std::mt19937 random(20240607);
  for (int walk = 0; walk < 2000; ++walk) {
    ES lent = ES::Preparing;
    IS borrowed = IS::Requested;
    bool lent_ended = false;
    for (int at = 0; at < 40; ++at) {
      lent = step(lent, static_cast<EE>(random() % kExportEvents)).next;
      borrowed = step(borrowed, static_cast<IE>(random() % kImportEvents)).next;
      if (lent_ended) REQUIRE(ended(lent));
      lent_ended = ended(lent);
      REQUIRE(static_cast<int>(lent) < kExportStates);
      REQUIRE(static_cast<int>(borrowed) < kImportStates);
    }
  }
}

TEST_CASE("names are distinct") {
  std::set<std::string_view> names;
  for (int state = 0; state < kExportStates; ++state) names.insert(name(static_cast<ES>(state)));
  CHECK(names.size() == kExportStates);
  names.clear();
  for (int event = 0; event < kExportEvents; ++event) names.insert(name(static_cast<EE>(event)));
  CHECK(names.size() == kExportEvents);
  names.clear();
  for (int state = 0; state < kImportStates; ++state) names.insert(name(static_cast<IS>(state)));
  CHECK(names.size() == kImportStates);
  names.clear();
  for (int event = 0; event < kImportEvents; ++event) names.insert(name(static_cast<IE>(event)));
  CHECK(names.size() == kImportEvents);
}
