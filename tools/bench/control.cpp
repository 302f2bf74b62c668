// SPDX-License-Identifier: MIT
#include "control.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/epoll.h>
#include <sys/socket.h>

namespace gpuloan::tool::bench {
namespace {

constexpr std::uint64_t kBlockLoans = 8192; // of acks, at least; four rounds of what is in flight where that is more
constexpr std::uint32_t kOutFew = 10, kOutMany = 10'000, kOutPeers = 256;
constexpr std::size_t kKeepStep = 1000;

double cpu_us(clockid_t clock) {
  timespec now = {};
  ::clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

[[noreturn]] void fail_call(const char* call) { throw Failure(ExitSystem, std::string(call) + ": " + std::strerror(errno)); }

struct Ends {
  Fd ours, theirs;
};

Ends socket_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) fail_call("socketpair");
  return {Fd(ends[0]), Fd(ends[1])};
}

gpuloan_context_options exporter_options(const LoanOptions& loans) {
  auto options = init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_EXPORTER;
  options.loop = loans.loop;
  options.engine = loans.engine;
  options.flags = GPULOAN_CONTEXT_NO_DEVICE | loans.sleep;
  return options;
}

// Whether an exporter with a loop thread can have io_uring here.
bool has_ring() {
  try {
    static_cast<void>(Context::create(exporter_options({.engine = GPULOAN_ENGINE_IO_URING})));
    return true;
  } catch (const StatusError&) {
    return false;
  }
}

double median(const std::vector<double>& values) { return spread_of(values).middle; }

Comparison& add(std::vector<Comparison>& out, Comparison row) { return out.emplace_back(std::move(row)); }

} // namespace

Control::Control(const BenchOptions& options) : options_(options), deadline_(options.common.timeout_ms) {
  raise_descriptor_limit();
  Ends control = socket_pair();
  child_ = Child::start({"bench-worker", "--control", "--fd", std::to_string(Child::kInheritedFd), "--timeout",
                         std::to_string(options.common.timeout_ms / 1000 + 1)},
                        control.theirs.get());
  channel_ = std::make_unique<Channel>(std::move(control.ours), options.common.timeout_ms);
  static_cast<void>(channel_->expect(Op::Hello));
  syscalls_ = std::make_unique<SyscallCount>();
}

std::vector<Comparison> Control::all(const Run::Progress& progress) {
  std::vector<Comparison> out;
  if (options_.wants("acks")) acks(out, progress);
  if (options_.wants("roundtrip")) roundtrip(out, progress);
  if (options_.wants("out")) out_of(out, progress);
  channel_->send({.op = Op::Bye});
  child_.wait(deadline_);
  return out;
}

// ---- Both sides ---------------------------------------------------------------------------------------------------

Control::Side::Lender& Control::Side::lender_of(gpuloan_peer* handle) {
  const auto at = std::lower_bound(by_handle.begin(), by_handle.end(), std::pair{handle, std::size_t{0}});
  if (at == by_handle.end() || at->first != handle) throw Failure(ExitInternal, "an event of an unknown peer");
  return lenders[at->second];
}

void Control::join(Side& side, std::uint32_t places, std::uint32_t worker_sleep) {
  Ends ends = socket_pair();
  side.context.attach(ends.ours.get(), "bench");
  static_cast<void>(ends.ours.release());
  channel_->send({.op = Op::Join, .count = worker_sleep, .value = side.number}, ends.theirs.get());
  Side::Lender lender;
  while (!lender.peer) {
    auto event = next_event(side.context, deadline_);
    if (!event) throw Failure(ExitTimeout, "the worker did not join within " + deadline_.text());
    if (event->type() == GPULOAN_EVENT_PEER_READY) lender.peer = event->take_peer();
    else if (event->type() == GPULOAN_EVENT_PEER_REFUSED) throw Failure(exit_code(event->status()), std::string("the worker was refused: ") + event->text());
  }
  static_cast<void>(channel_->expect(Op::Join));
  auto wish = init<gpuloan_region_options>();
  wish.bytes = places * kLoanBytes;
  wish.access = GPULOAN_ACCESS_WRITE;
  wish.memory = GPULOAN_MEMORY_HOST;
  lender.region = lender.peer.create_region(wish);
  lender.loans.resize(places);
  side.by_handle.emplace_back(lender.peer.get(), side.lenders.size());
  side.lenders.push_back(std::move(lender));
}

std::unique_ptr<Control::Side> Control::make_side(std::uint32_t peers, std::uint32_t places, const LoanOptions& loans, std::uint32_t worker_sleep) {
  auto side = std::make_unique<Side>();
  side->number = sides_++;
  const auto options = exporter_options(loans);
  side->context = attempt("cannot make a context", [&] { return Context::create(options); });
  side->what = std::to_string(peers) + (peers == 1 ? " peer, " : " peers, ") + (side->context.stats().engine == GPULOAN_ENGINE_IO_URING ? "io_uring" : "epoll") +
               (loans.loop == GPULOAN_LOOP_CALLER ? ", caller's loop" : "") + (loans.sleep != 0 ? ", both sleep" : worker_sleep != 0 ? ", importer sleeps" : "");
  for (std::uint32_t peer = 0; peer < peers; ++peer) join(*side, places, worker_sleep);
  std::sort(side->by_handle.begin(), side->by_handle.end());
  // The canaries, and the worker's mapping of the region.
  ask(Op::Answer, side->number, peers);
  for (Side::Lender& lender : side->lenders) lend(lender, 0);
  for (std::uint32_t ended = 0; ended < peers;) ended += take_end(*side) ? 1U : 0U;
  static_cast<void>(channel_->expect(Op::Answer));
  return side;
}

void Control::ask(Op op, std::uint64_t side, std::uint64_t count) {
  channel_->send({.op = op, .count = static_cast<std::uint32_t>(count), .value = side});
}

namespace {

gpuloan_lend_options lend_options() {
  auto options = init<gpuloan_lend_options>();
  options.access = GPULOAN_ACCESS_WRITE;
  options.memory = GPULOAN_MEMORY_HOST;
  options.stream = GPULOAN_STREAM_CPU;
  return options;
}

gpuloan_range range_of(const Region& region, std::size_t place) {
  return {reinterpret_cast<std::uint64_t>(region.host()) + place * kLoanBytes, kLoanBytes};
}

} // namespace

void Control::lend(Side::Lender& lender, std::size_t place) {
  const gpuloan_range range = range_of(lender.region, place);
  lender.loans[place] = lender.peer.lend(range.pointer, range.bytes, lend_options());
}

void Control::lend_many(Side::Lender& lender, std::span<const std::size_t> places) {
  std::vector<gpuloan_range> ranges;
  for (const std::size_t place : places) ranges.push_back(range_of(lender.region, place));
  std::vector<Loan> loans;
  lender.peer.lend_many(ranges, lend_options(), loans);
  for (std::size_t at = 0; at < places.size(); ++at) lender.loans[places[at]] = std::move(loans[at]);
}

std::optional<std::pair<Control::Side::Lender*, std::size_t>> Control::take_end(Side& side) {
  const auto event = next_event(side.context, deadline_);
  if (!event) throw Failure(ExitTimeout, "the loans did not come back within " + deadline_.text());
  return ended(side, *event);
}

std::optional<std::pair<Control::Side::Lender*, std::size_t>> Control::ended(Side& side, const Event& event) {
  if (event.type() == GPULOAN_EVENT_PEER_LOST) throw Failure(ExitPeerLost, std::string("the worker was lost: ") + event.text());
  if (event.type() != GPULOAN_EVENT_LOAN_ENDED) return std::nullopt;
  if (event.status() != GPULOAN_OK) throw Failure(ExitLoanFailed, std::string("a loan failed: ") + event.text());
  Side::Lender& lender = side.lender_of(event.peer());
  const auto at = std::find_if(lender.loans.begin(), lender.loans.end(), [&](const Loan& loan) { return loan.get() == event.loan(); });
  if (at == lender.loans.end()) throw Failure(ExitInternal, "an event of an unknown loan");
  at->reset();
  return std::pair{&lender, static_cast<std::size_t>(at - lender.loans.begin())};
}

// ---- acks ---------------------------------------------------------------------------------------------------------

Control::Block Control::ack_block(Side& side, std::uint64_t loans) {
  ask(Op::Answer, side.number, loans);
  const std::uint64_t calls = syscalls_->now();
  const double start = cpu_us(CLOCK_PROCESS_CPUTIME_ID);
  std::uint64_t lent = 0, done = 0;
  const auto lend_back = [&](Side::Lender& lender) {
    const std::size_t more = std::min<std::uint64_t>(lender.back.size(), loans - lent);
    if (more > 0) lend_many(lender, std::span(lender.back).first(more));
    lent += more;
    lender.back.clear();
  };
  for (Side::Lender& lender : side.lenders) {
    for (std::size_t place = 0; place < kInFlight; ++place) lender.back.push_back(place);
    lend_back(lender);
  }
  while (done < loans) { // what has come back by now is lent again together
    std::vector<Side::Lender*> touched;
    for (auto event = next_event(side.context, deadline_); event; event = side.context.next_event(Milliseconds(0))) {
      const auto back = ended(side, *event);
      if (!back) continue;
      ++done;
      if (back->first->back.empty()) touched.push_back(back->first);
      back->first->back.push_back(back->second);
    }
    if (deadline_.passed()) throw Failure(ExitTimeout, "the loans did not come back within " + deadline_.text());
    for (Side::Lender* lender : touched) lend_back(*lender);
  }
  const double us = cpu_us(CLOCK_PROCESS_CPUTIME_ID) - start;
  const Block block{us / static_cast<double>(loans), static_cast<double>(syscalls_->now() - calls) / static_cast<double>(loans)};
  static_cast<void>(channel_->expect(Op::Answer));
  return block;
}

std::vector<Fd> Control::make_plain(std::uint32_t peers) {
  std::vector<Fd> out;
  for (std::uint32_t peer = 0; peer < peers; ++peer) {
    Ends ends = socket_pair();
    channel_->send({.op = Op::Plain}, ends.theirs.get());
    static_cast<void>(channel_->expect(Op::Plain));
    out.push_back(std::move(ends.ours));
  }
  return out;
}

// The floor: one epoll_wait, then for each socket that has something one recvmsg and one send.
Control::Block Control::plain_block(const std::vector<Fd>& ends, std::uint64_t loans) {
  ask(Op::PlainAnswer, 0, loans);
  const Fd epoll(::epoll_create1(EPOLL_CLOEXEC));
  const std::uint64_t calls = syscalls_->now();
  const double start = cpu_us(CLOCK_THREAD_CPUTIME_ID); // the library's loops are idle, or not ours to count
  alignas(16) std::array<std::byte, 128> record = {};
  alignas(cmsghdr) std::array<std::byte, 64> control = {};
  for (std::size_t at = 0; at < ends.size(); ++at) {
    epoll_event event = {.events = EPOLLIN, .data = {.u64 = at}};
    if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, ends[at].get(), &event) != 0) fail_call("epoll_ctl");
  }
  std::uint64_t lent = 0, ended = 0;
  const auto send = [&](const Fd& end) {
    if (::send(end.get(), record.data(), record.size(), MSG_NOSIGNAL) < 0) fail_call("send");
    ++lent;
  };
  for (const Fd& end : ends) {
    for (std::uint32_t place = 0; place < kInFlight; ++place) send(end);
  }
  std::array<epoll_event, 64> events = {};
  while (ended < loans) {
    const int ready = ::epoll_wait(epoll.get(), events.data(), static_cast<int>(events.size()), 100);
    check_interrupted();
    if (deadline_.passed()) throw Failure(ExitTimeout, "the bare floor's worker did not answer within " + deadline_.text());
    for (int at = 0; at < ready; ++at) {
      const Fd& end = ends[events[static_cast<std::size_t>(at)].data.u64];
      iovec part = {record.data(), record.size()};
      msghdr message = {};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      if (::recvmsg(end.get(), &message, MSG_CMSG_CLOEXEC) <= 0) fail_call("recvmsg");
      ++ended;
      if (lent < loans) send(end);
    }
  }
  const double us = cpu_us(CLOCK_THREAD_CPUTIME_ID) - start;
  const Block block{us / static_cast<double>(loans), static_cast<double>(syscalls_->now() - calls) / static_cast<double>(loans)};
  static_cast<void>(channel_->expect(Op::PlainAnswer));
  return block;
}

void Control::acks(std::vector<Comparison>& out, const Run::Progress& progress) {
  struct Kind {
    std::uint32_t peers;
    std::uint32_t engine;
    std::unique_ptr<Side> side;
    std::vector<double> us, calls;
  };
  const std::uint32_t few = options_.quick ? 4 : 8, some = options_.quick ? 16 : 64, many = options_.quick ? 32 : 256;
  std::vector<Kind> kinds;
  for (const std::uint32_t engine : {GPULOAN_ENGINE_EPOLL, GPULOAN_ENGINE_IO_URING}) {
    if (engine == GPULOAN_ENGINE_IO_URING && (options_.loans.loop == GPULOAN_LOOP_CALLER || !has_ring())) continue;
    for (const std::uint32_t peers : {few, some, many}) {
      progress("acks: " + std::to_string(peers) + " peers join");
      LoanOptions loans = options_.loans;
      loans.engine = engine;
      kinds.push_back({peers, engine, make_side(peers, kInFlight, loans, loans.sleep), {}, {}});
    }
  }
  const std::vector<Fd> plain = make_plain(some);
  std::vector<double> floor_us, floor_calls;
  const std::uint32_t blocks = options_.quick ? 3 : 15;
  for (std::uint32_t block = 0; block <= blocks; ++block) {
    progress("acks: block " + std::to_string(block) + " of " + std::to_string(blocks));
    const Block floor = plain_block(plain, kBlockLoans);
    if (block > 0) {
      floor_us.push_back(floor.us);
      floor_calls.push_back(floor.calls);
    }
    for (Kind& kind : kinds) {
      const Block result = ack_block(*kind.side, std::max(kBlockLoans, std::uint64_t{kind.peers} * kInFlight * 4));
      if (block == 0) continue; // it warms up
      kind.us.push_back(result.us);
      kind.calls.push_back(result.calls);
    }
  }
  const auto compare = [&](const Kind& kind, const char* floor, const std::vector<double>& than) {
    Comparison& row = add(out, {.name = "acks", .floor = floor, .what = kind.side->what, .rate = true});
    for (std::size_t block = 0; block < kind.us.size(); ++block) row.add_block({than[block]}, {kind.us[block]});
    if (syscalls_->refusal().empty()) row.calls = median(kind.calls);
  };
  for (std::size_t at = 0; at < kinds.size(); at += 3) {
    compare(kinds[at + 1], "recvmsg and send for each loan", floor_us);
    compare(kinds[at + 2], options_.quick ? "4 peers" : "8 peers", kinds[at].us);
    if (at != 0) compare(kinds[at + 1], "epoll", kinds[1].us);
  }
}

// ---- roundtrip ----------------------------------------------------------------------------------------------------

std::vector<double> Control::plain_trips(const Fd& end, std::uint32_t count) {
  ask(Op::PlainTrips, 0, count);
  alignas(16) std::array<std::byte, 128> record = {};
  std::vector<double> times;
  for (std::uint32_t trip = 0; trip < count; ++trip) {
    const std::uint64_t start = clock_ns();
    plain_send(end, record);
    plain_receive(end, record);
    times.push_back(static_cast<double>(clock_ns() - start) / 1000);
  }
  static_cast<void>(channel_->expect(Op::PlainTrips));
  return times;
}

// With a loop thread the trip is over when the loop has taken the ACK (step RELEASE); that the caller's thread hears of it is
// another wake-up, which the floor has not.
std::vector<double> Control::trips(Side& side, std::uint32_t count, bool until_release) {
  ask(Op::Trips, side.number, count);
  std::vector<double> times;
  Side::Lender& lender = side.lenders.front();
  for (std::uint32_t trip = 0; trip < count; ++trip) {
    const std::uint64_t start = clock_ns();
    lend(lender, 0);
    Loan& loan = lender.loans.front();
    wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
    const std::uint64_t end = until_release ? loan.report().step_ns[GPULOAN_STEP_RELEASE] : clock_ns();
    times.push_back(static_cast<double>(end - start) / 1000);
    loan.reset();
  }
  static_cast<void>(channel_->expect(Op::Trips));
  return times;
}

void Control::roundtrip(std::vector<Comparison>& out, const Run::Progress& progress) {
  const std::vector<Fd> plain = make_plain(1);
  const std::uint32_t blocks = options_.quick ? 5 : 15, count = options_.quick ? 100 : 1000;
  struct Kind {
    std::unique_ptr<Side> side;
    bool thread;
    Comparison row;
  };
  std::vector<Kind> kinds;
  const auto add_kind = [&](const LoanOptions& loans, std::uint32_t worker_sleep) {
    auto side = make_side(1, 1, loans, worker_sleep);
    Comparison row{.name = "roundtrip", .floor = "sendmsg and recvmsg", .what = side->what};
    kinds.push_back({std::move(side), loans.loop == GPULOAN_LOOP_THREAD, std::move(row)});
  };
  for (const auto& [loop, engine] : {std::pair{GPULOAN_LOOP_CALLER, GPULOAN_ENGINE_EPOLL}, {GPULOAN_LOOP_THREAD, GPULOAN_ENGINE_EPOLL}, {GPULOAN_LOOP_THREAD, GPULOAN_ENGINE_IO_URING}}) {
    if (engine == GPULOAN_ENGINE_IO_URING && !has_ring()) continue;
    add_kind({.loop = loop, .engine = engine}, 0);
    add_kind({.loop = loop, .engine = engine}, GPULOAN_CONTEXT_SLEEP);
    add_kind({.loop = loop, .sleep = GPULOAN_CONTEXT_SLEEP, .engine = engine}, GPULOAN_CONTEXT_SLEEP);
  }
  // One side to a CPU: left to the scheduler, some runs have both on one and some have not.
  ask(Op::Pin, 1, 1);
  static_cast<void>(channel_->expect(Op::Pin));
  pin(0);
  for (std::uint32_t block = 0; block <= blocks; ++block) {
    progress("roundtrip: block " + std::to_string(block) + " of " + std::to_string(blocks));
    for (Kind& kind : kinds) {
      auto floor = plain_trips(plain.front(), count);
      auto times = trips(*kind.side, count, kind.thread);
      if (block > 0) kind.row.add_block(std::move(floor), std::move(times));
    }
  }
  pin(std::nullopt);
  ask(Op::Pin, 0, 0);
  static_cast<void>(channel_->expect(Op::Pin));
  for (Kind& kind : kinds) out.push_back(std::move(kind.row));
}

// ---- out ----------------------------------------------------------------------------------------------------------

// Lends, spread over the peers, or takes back until so many are out. Place 0 of each is left free.
void Control::hold_out(Side& side, std::size_t count) {
  std::vector<std::pair<Side::Lender*, std::size_t>> more;
  std::size_t held = 0;
  for (std::size_t at = 0; at < side.lenders.size(); ++at) {
    Side::Lender& lender = side.lenders[at];
    const std::size_t wanted = (count + side.lenders.size() - 1 - at) / side.lenders.size();
    for (std::size_t place = 1; place < lender.loans.size(); ++place) {
      if (lender.loans[place]) ++held;
      else if (place <= wanted) more.emplace_back(&lender, place);
    }
  }
  for (std::size_t at = 0; held < count && at < more.size(); at += kKeepStep) { // in steps: a peer that has too much to read is dropped
    const std::size_t end = std::min(more.size(), at + kKeepStep);
    ask(Op::Keep, side.number, end - at);
    for (std::size_t next = at; next < end; ++next) lend(*more[next].first, more[next].second);
    static_cast<void>(channel_->expect(Op::Keep));
  }
  while (held > count) {
    const std::size_t rest = held > count + kKeepStep ? held - kKeepStep : count;
    ask(Op::GiveBack, side.number, rest);
    while (held > rest) held -= take_end(side) ? 1U : 0U;
    static_cast<void>(channel_->expect(Op::GiveBack));
  }
}

void Control::out_of(std::vector<Comparison>& out, const Run::Progress& progress) {
  const std::uint32_t blocks = options_.quick ? 3 : 9, count = options_.quick ? 200 : 1000;
  for (const std::uint32_t peers : {1U, kOutPeers}) {
    progress("out: " + std::to_string(peers) + " peers join");
    const auto side = make_side(peers, kOutMany / peers + 2, options_.loans, options_.loans.sleep);
    Comparison time{.name = "out", .floor = "10 are out", .what = "10000 out, " + side->what + ": time"};
    Comparison cpu{.name = "out", .floor = "10 are out", .what = "10000 out, " + side->what + ": CPU"};
    const auto measure = [&](std::vector<double>& times) {
      const double start = cpu_us(CLOCK_PROCESS_CPUTIME_ID);
      times = trips(*side, count, false);
      return (cpu_us(CLOCK_PROCESS_CPUTIME_ID) - start) / count;
    };
    for (std::uint32_t block = 0; block <= blocks; ++block) {
      progress("out: block " + std::to_string(block) + " of " + std::to_string(blocks));
      std::vector<double> few, many;
      hold_out(*side, kOutFew);
      const double few_cpu = measure(few);
      hold_out(*side, kOutMany);
      const double many_cpu = measure(many);
      if (block == 0) continue;
      time.add_block(std::move(few), std::move(many));
      cpu.add_block({few_cpu}, {many_cpu});
    }
    hold_out(*side, 0);
    out.push_back(std::move(time));
    out.push_back(std::move(cpu));
  }
}

} // namespace gpuloan::tool::bench
