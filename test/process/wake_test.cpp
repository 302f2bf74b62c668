// SPDX-License-Identifier: MIT
//
// No turn is lost between spinning and sleeping (bar W1). A side that spins watches a word, and the other then owes no
// record; here both sides give up spinning at moments that fall all around the other's store, and whoever gave up waits for
// the event instead, which a record alone brings. A turn that neither showed in the word nor brought a record stops the test.
//
//   wake_test [TURNS [SHARE]]
//
// SHARE percent of the delays (50) lie around the millisecond at which a call gives up; the others are short, so that millions of turns,
// with a SHARE of 2 say, are a matter of minutes.
#include "../support/host.hpp"

#include <gpuloan/gpuloan.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <random>
#include <sys/socket.h>
#include <thread>

namespace {

using gpuloan::Milliseconds;

constexpr Milliseconds kPatience{20'000};
constexpr std::uint64_t kBytes = 4096;

std::uint64_t share = 50;

// Up to a little more than a millisecond, the shortest time that acquire and wait_done can be given.
void idle(std::mt19937_64& random) {
  const bool around = random() % 100 < share;
  const std::uint64_t delay = around ? 900'000 + random() % 200'000 : random() % 2 == 0 ? 0 : random() % 40'000;
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(delay);
  while (std::chrono::steady_clock::now() < until) {
  }
}

gpuloan::Context make(std::uint32_t role) {
  auto options = gpuloan::init<gpuloan_context_options>();
  options.role = role;
  options.driver = std::getenv("GPULOAN_DRIVER") == nullptr ? "sim" : nullptr;
  return gpuloan::Context::create(options);
}

void need_event(gpuloan::Context& context, gpuloan_event_type type, const char* who) {
  while (auto event = context.next_event(kPatience)) {
    if (event->type() == type) return;
  }
  std::fprintf(stderr, "wake_test: %s: the turn neither showed in the word nor brought a record\n", who);
  std::_Exit(1);
}

// True when the call timed out.
template <typename Call>
bool times_out(Call call) {
  try {
    call();
    return false;
  } catch (const gpuloan::StatusError& error) {
    if (error.status() != GPULOAN_ERR_TIMEOUT) throw;
    return true;
  }
}

struct Counts {
  std::uint64_t seen = 0, told = 0; // turns: in the word, by an event
};

Counts import_turns(int fd, std::uint64_t turns) {
  gpuloan::Context context = make(GPULOAN_ROLE_IMPORTER);
  gpuloan::Peer peer = context.adopt(fd, kPatience);
  gpuloan::Loan loan;
  while (!loan) {
    auto event = context.next_event(kPatience);
    if (event && event->type() == GPULOAN_EVENT_LOAN_OFFERED) loan = event->take_loan();
  }
  std::mt19937_64 random(1);
  Counts counts;
  for (std::uint64_t turn = 0; turn < turns; ++turn) {
    if (times_out([&] { static_cast<void>(loan.acquire(Milliseconds(1))); })) {
      do need_event(context, GPULOAN_EVENT_LOAN_READY, "the importer"); // one may be left of a turn before
      while (times_out([&] { static_cast<void>(loan.acquire(Milliseconds(0))); }));
      ++counts.told;
    } else {
      ++counts.seen;
    }
    idle(random);
    loan.done(GPULOAN_STREAM_CPU);
  }
  loan.wait_end(kPatience);
  return counts;
}

Counts export_turns(gpuloan::Context& context, std::uint64_t turns) {
  gpuloan::Peer peer;
  while (!peer) {
    auto event = context.next_event(kPatience);
    if (event && event->type() == GPULOAN_EVENT_PEER_READY) peer = event->take_peer();
  }
  auto wish = gpuloan::init<gpuloan_region_options>();
  wish.bytes = kBytes;
  wish.access = GPULOAN_ACCESS_WRITE;
  gpuloan::Region region = peer.create_region(wish);
  auto options = gpuloan::init<gpuloan_lend_options>();
  options.access = GPULOAN_ACCESS_WRITE;
  options.keep_open = 1;
  options.stream = GPULOAN_STREAM_CPU;
  gpuloan::Loan loan = peer.lend(region.pointer(), kBytes, options);
  std::mt19937_64 random(2);
  Counts counts;
  for (std::uint64_t turn = 0; turn < turns; ++turn) {
    if (turn > 0) loan.ready(GPULOAN_STREAM_CPU);
    if (times_out([&] { loan.wait_done(Milliseconds(1)); })) {
      do need_event(context, GPULOAN_EVENT_LOAN_DONE, "the exporter");
      while (times_out([&] { loan.wait_done(Milliseconds(0)); }));
      ++counts.told;
    } else {
      ++counts.seen;
    }
    idle(random);
  }
  loan.reclaim(kPatience);
  loan.reset();
  region.destroy();
  return counts;
}

} // namespace

int main(int count, char** words) {
  const std::uint64_t turns = count > 1 ? std::strtoull(words[1], nullptr, 10) : 4000;
  if (count > 2) share = std::min<std::uint64_t>(std::strtoull(words[2], nullptr, 10), 100);
  const loan_test::TempFolder folder("gpuloan-wake");
  loan_test::use_private_sim(folder);
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return 2;
  try {
    gpuloan::Context context = make(GPULOAN_ROLE_EXPORTER);
    context.attach(ends[0], "wake");
    Counts importer;
    std::thread other([&] { importer = import_turns(ends[1], turns); });
    const Counts exporter = export_turns(context, turns);
    other.join();
    std::printf("%llu turns: importer saw %llu, was told of %llu; exporter saw %llu, was told of %llu\n", static_cast<unsigned long long>(turns),
                static_cast<unsigned long long>(importer.seen), static_cast<unsigned long long>(importer.told),
                static_cast<unsigned long long>(exporter.seen), static_cast<unsigned long long>(exporter.told));
    return importer.seen != 0 && importer.told != 0 && exporter.seen != 0 && exporter.told != 0 ? 0 : 1; // else it tried nothing
  } catch (const std::exception& error) {
    std::fprintf(stderr, "wake_test: %s\n", error.what());
    std::_Exit(1);
  }
}
