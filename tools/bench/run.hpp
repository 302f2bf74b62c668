// SPDX-License-Identifier: MIT
//
// The inside of `gpuloan bench`: the parent's side of each comparison. The worker's is worker.cpp.
#pragma once

#include "../cuda.hpp"
#include "../session.hpp"
#include "bare.hpp"
#include "pair.hpp"
#include "samples.hpp"

#include <functional>
#include <memory>

namespace gpuloan::tool::bench {

struct BenchOptions {
  CommonOptions common;
  LoanOptions loans;
  std::vector<std::string> cases;   // empty: all
  std::vector<std::uint64_t> sizes; // empty: each case's own
  bool quick = false;
  std::string plot; // a path; empty: none
  bool pool = false; // the pool rung is on: "all cases" are with it
  static constexpr Choice kLoops[] = {{"thread", GPULOAN_LOOP_THREAD}, {"caller", GPULOAN_LOOP_CALLER}};
  static constexpr Choice kWaits[] = {{"spin", 0}, {"sleep", GPULOAN_CONTEXT_SLEEP}};
  [[nodiscard]] bool wants(const char* name) const {
    return cases.empty() ? pool || std::string_view(name) != "pool" : std::find(cases.begin(), cases.end(), name) != cases.end();
  }
};

inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20U, kGiB = std::uint64_t{1} << 30U;

[[nodiscard]] inline double since_us(std::uint64_t start) { return static_cast<double>(clock_ns() - start) / 1000; }

class Run {
 public:
  Run(const BenchOptions& options, Session& session);
  // Each is called with "case size" before a comparison starts.
  using Progress = std::function<void(const std::string& what)>;
  // Those that are wanted: of the cases that share the device, or of those that take all of it. The latter need a context that
  // keeps no idle memory.
  [[nodiscard]] std::vector<Comparison> all(bool whole_device, const Progress& progress);

 private:
  struct Counts {
    std::uint32_t blocks, turns;
  };
  [[nodiscard]] Counts counts(std::uint64_t bytes) const;
  void start_worker();
  Loan lend(std::uint64_t pointer, std::uint64_t bytes, gpuloan_access access, bool keep_open, std::uint32_t rungs);
  [[nodiscard]] Region region(std::uint64_t bytes);
  void drained(); // waits until the arena has given everything back
  void check_filled(std::uint64_t pointer, std::uint64_t bytes, std::uint64_t value, const char* who);

  [[nodiscard]] Comparison turns(std::uint64_t bytes);
  [[nodiscard]] Comparison loans(std::uint64_t bytes);
  [[nodiscard]] Comparison offsets(std::uint64_t bytes);
  [[nodiscard]] Comparison copies(std::uint64_t bytes);
  [[nodiscard]] Comparison whole(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t whole_bytes() const;
  [[nodiscard]] Comparison fit(std::uint64_t step);
  [[nodiscard]] bool fits_bare(std::uint64_t bytes);
  [[nodiscard]] bool fits_lent(std::uint64_t bytes);
  [[nodiscard]] Comparison pool(std::uint64_t bytes);
  [[nodiscard]] Comparison compute(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t compute_bytes() const;
  // A turn is from before `post`, which makes READY that value, to DONE seen.
  [[nodiscard]] std::vector<double> bare_spin(std::uint32_t count, const BareChunk& chunk, std::uint64_t bytes, const std::function<void(std::uint64_t)>& post);
  // The same over one loan of the region, whose first turn is not timed; `ready` posts READY.
  [[nodiscard]] std::vector<double> loan_turns(std::uint32_t count, const Region& region, const std::function<void(Loan&)>& ready);
  // `op`: BareSocket or BarePool, the worker fills what is at `pointer` here.
  [[nodiscard]] std::vector<double> bare_records(Op op, std::uint32_t count, std::uint64_t pointer, std::uint64_t bytes);
  // Loans of `bytes`, each `step` behind the last one, from the beginning again where `range` ends.
  [[nodiscard]] std::vector<double> fresh_loans(std::uint32_t count, gpuloan_range range, std::uint64_t bytes, std::uint64_t step, std::uint32_t rungs = 0);
  void share_chunk(const BareChunk& chunk);
  void drop_chunk();

  const BenchOptions& options_;
  Session& session_;
  Deadline deadline_;
  Cuda cuda_;
  BareCalls calls_;
  std::unique_ptr<BarePages> words_;
  std::unique_ptr<Channel> channel_;
  Child child_;
  Peer peer_;
  std::uint64_t ready_ = 0; // the last value of the bare READY word
};

} // namespace gpuloan::tool::bench
