// SPDX-License-Identifier: MIT
//
// The control plane alone: records, sockets, wake-ups, locks and book-keeping. No device takes part: what is lent is 4 KiB of a
// host region, which both sides mapped before, so a loan moves no byte and still passes the ledger and the arena.
//
//   acks       many peers with many loans out: CPU time of this process for each loan that came back
//   roundtrip  one loan at a time: from lend() to the acknowledged end
//   out        one loan at a time while others are out
//
// The worker is one process with all peers, on the library's importer. The floors are what a program would do by hand: a
// record of 128 bytes for each loan and each answer.
#pragma once

#include "../child.hpp"
#include "../session.hpp"
#include "pair.hpp"
#include "run.hpp"
#include "syscalls.hpp"

namespace gpuloan::tool::bench {

inline constexpr std::uint64_t kLoanBytes = 4096;
inline constexpr std::uint32_t kInFlight = 16; // of each peer, acks

class Control {
 public:
  explicit Control(const BenchOptions& options);
  [[nodiscard]] std::vector<Comparison> all(const Run::Progress& progress);
  [[nodiscard]] const std::string& uncounted() const noexcept { return syscalls_->refusal(); }

 private:
  // A context with its peers; the worker has the other ends under the same number.
  struct Side {
    struct Lender {
      Peer peer;
      Region region;
      std::vector<Loan> loans;       // by place in the region; empty: free
      std::vector<std::size_t> back; // places of loans that came back in this round
    };
    std::uint64_t number = 0;
    std::string what; // "64 peers, epoll"
    Context context;
    std::vector<Lender> lenders;
    std::vector<std::pair<gpuloan_peer*, std::size_t>> by_handle; // sorted
    [[nodiscard]] Lender& lender_of(gpuloan_peer* handle);
  };
  struct Block { // medians are taken of these
    double us = 0;    // CPU time for each loan
    double calls = 0; // system calls for each
  };
  // `sleep` and `worker_sleep`: 0 or GPULOAN_CONTEXT_SLEEP.
  [[nodiscard]] std::unique_ptr<Side> make_side(std::uint32_t peers, std::uint32_t places, const LoanOptions& loans, std::uint32_t worker_sleep);
  void join(Side& side, std::uint32_t places, std::uint32_t worker_sleep);
  [[nodiscard]] std::vector<Fd> make_plain(std::uint32_t peers);
  void ask(Op op, std::uint64_t side, std::uint64_t count);
  void lend(Side::Lender& lender, std::size_t place);
  void lend_many(Side::Lender& lender, std::span<const std::size_t> places);
  // Takes one event; the loan that ended with it is forgotten, and its place returned.
  std::optional<std::pair<Side::Lender*, std::size_t>> take_end(Side& side);
  std::optional<std::pair<Side::Lender*, std::size_t>> ended(Side& side, const Event& event);

  [[nodiscard]] Block ack_block(Side& side, std::uint64_t loans);
  [[nodiscard]] Block plain_block(const std::vector<Fd>& ends, std::uint64_t loans);
  void acks(std::vector<Comparison>& out, const Run::Progress& progress);

  [[nodiscard]] std::vector<double> trips(Side& side, std::uint32_t count, bool until_release);
  [[nodiscard]] std::vector<double> plain_trips(const Fd& end, std::uint32_t count);
  void roundtrip(std::vector<Comparison>& out, const Run::Progress& progress);

  void hold_out(Side& side, std::size_t count);
  void out_of(std::vector<Comparison>& out, const Run::Progress& progress);

  const BenchOptions& options_;
  Deadline deadline_;
  Child child_;
  std::unique_ptr<Channel> channel_;
  std::unique_ptr<SyscallCount> syscalls_; // made after the worker, which it would count, too
  std::uint64_t sides_ = 0;
};

} // namespace gpuloan::tool::bench
