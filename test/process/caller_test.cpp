// SPDX-License-Identifier: MIT
//
// A loop that the callers turn: a thread that waits in it hears of what another thread brings about. Nothing else comes while it waits, so
// that it would sleep to its timeout. And a loop that nobody turns for a while: the exporter stands still, as when it is stopped.
#include "../support/host.hpp"
#include "no_device.hpp"

#include <gpuloan/gpuloan.hpp>

#include <atomic>
#include <thread>

namespace loan_test {
namespace {

using gpuloan::Milliseconds;

// One thread gives a loan back, another waits for the event of its end.
void end_of_another_thread() {
  gpuloan::Context exporter = make_without_device(GPULOAN_ROLE_EXPORTER);
  gpuloan::Context importer = make_without_device(GPULOAN_ROLE_IMPORTER, GPULOAN_LOOP_CALLER);
  SocketPair ends = make_socketpair();
  exporter.attach(ends.left.get(), "caller");
  static_cast<void>(ends.left.release());
  const gpuloan::Peer to_exporter = importer.adopt(ends.right.release(), kPatience);
  gpuloan::Peer peer = next(exporter, GPULOAN_EVENT_PEER_READY).take_peer();
  auto wish = gpuloan::init<gpuloan_region_options>();
  wish.bytes = 4096;
  wish.access = GPULOAN_ACCESS_READ;
  wish.memory = GPULOAN_MEMORY_HOST;
  gpuloan::Region region = peer.create_region(wish);
  auto options = gpuloan::init<gpuloan_lend_options>();
  options.access = GPULOAN_ACCESS_READ;
  options.memory = GPULOAN_MEMORY_HOST;
  options.stream = GPULOAN_STREAM_CPU;
  for (int round = 0; round < 5; ++round) {
    gpuloan::Loan lent;
    std::thread lender([&] { lent = peer.lend(reinterpret_cast<std::uint64_t>(region.host()), 4096, options); }); // its canary wants an answer
    gpuloan::Loan loan = next(importer, GPULOAN_EVENT_LOAN_OFFERED).take_loan();
    lender.join();
    static_cast<void>(next(importer, GPULOAN_EVENT_LOAN_READY));
    std::atomic<bool> waits{false};
    std::uint64_t took = 0;
    std::thread waiter([&] {
      waits = true;
      const std::uint64_t start = now_ms();
      static_cast<void>(next(importer, GPULOAN_EVENT_LOAN_ENDED));
      took = now_ms() - start;
    });
    while (!waits) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20)); // so that it is asleep, most likely; right it is either way
    loan.give_back();
    waiter.join();
    expect(took < 10'000, "the end was heard after " + std::to_string(took) + " ms");
    static_cast<void>(next(exporter, GPULOAN_EVENT_LOAN_ENDED));
  }
  region.destroy();
}

// A handshake has 10 s. An exporter that stood still for longer has not read what came meanwhile, and refuses nobody for it; one that
// looked refuses whoever said nothing.
void handshake_of_an_exporter_that_stood_still() {
  gpuloan::Context looks = make_without_device(GPULOAN_ROLE_EXPORTER);
  SocketPair silent = make_socketpair();
  looks.attach(silent.left.release(), "silent");
  gpuloan::Context stands = make_without_device(GPULOAN_ROLE_EXPORTER, GPULOAN_LOOP_CALLER);
  gpuloan::Context importer = make_without_device(GPULOAN_ROLE_IMPORTER);
  SocketPair ends = make_socketpair();
  stands.attach(ends.left.release(), "caller");
  gpuloan::Peer kept;
  std::string wrong;
  std::thread adopter([&] {
    try {
      kept = importer.adopt(ends.right.release(), gpuloan::Milliseconds(60'000));
    } catch (const std::exception& error) {
      wrong = error.what();
    }
  });
  const std::uint64_t start = now_ms();
  const auto refused = looks.next_event(kPatience);
  const std::uint64_t took = now_ms() - start;
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const auto came = stands.next_event(kPatience);
  adopter.join();
  expect(came && came->type() == GPULOAN_EVENT_PEER_READY && wrong.empty(), "an exporter that stood still refuses who came meanwhile: " + wrong);
  expect(refused && refused->type() == GPULOAN_EVENT_PEER_REFUSED && refused->status() == GPULOAN_ERR_TIMEOUT, "a silent peer is not refused");
  expect(took >= 9'000, "a silent peer was refused after " + std::to_string(took) + " ms");
}

int run(int, char**) {
  end_of_another_thread();
  handshake_of_an_exporter_that_stood_still();
  return 0;
}

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
