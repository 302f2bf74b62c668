// SPDX-License-Identifier: MIT
#include "run.hpp"

#include <cstdio>

namespace loan_test {
namespace {

constexpr unsigned kCaseSeconds = 120;

struct Snapshot {
  std::set<std::string> fds = open_fds();
  std::map<std::string, std::int64_t> live;
  std::uint64_t used = 0;
  explicit Snapshot(const Gpu& gpu) : live(gpu.live()), used(gpu.used_bytes()) {}
};

std::string left_behind(Gpu& gpu, const Snapshot& before) {
  constexpr std::uint64_t kNoise = std::uint64_t{64} << 20; // of a real driver, and what it strands of a shared pool (P8)
  std::string fds;
  const auto closed = [&] {
    gpu.settle_pool();
    return (fds = added(before.fds, open_fds())).empty();
  };
  if (!becomes(closed, kSettleMs)) return "descriptors: " + fds;
  for (const auto& [what, count] : gpu.live()) {
    const std::int64_t at_start = before.live.at(what);
    if (count != at_start) return what + ": " + std::to_string(at_start) + " before, " + std::to_string(count) + " after";
  }
  const std::uint64_t noise = gpu.simulated() ? 0 : kNoise;
  if (becomes([&] { return gpu.used_bytes() <= before.used + noise; }, 5000)) return {};
  return "device memory: " + std::to_string(gpu.used_bytes() - before.used) + " bytes";
}

struct Verdict {
  std::string wrong, skipped; // both empty: passed
};

Verdict run_one(const Bench& bench, const std::function<void()>& body) {
  try {
    const Snapshot before(bench.gpu);
    body();
    const std::string left = left_behind(bench.gpu, before);
    return {left.empty() ? "" : "left behind: " + left, ""};
  } catch (const Failure& failure) {
    bench.gpu.release_all(); // for the cases that follow
    return {failure.text, ""};
  } catch (const Skip& skip) {
    return {"", skip.reason};
  }
}

const char* reason_to_skip(const Bench& bench, const Case& test) {
  if (test.needs_process && bench.habitat == Habitat::Thread) return "a process has to die";
  return test.not_here != nullptr ? test.not_here(bench) : nullptr;
}

} // namespace

void lend_own_memory(const Bench& bench) {
  Region::own_memory = bench.own_memory() ? &bench.gpu : nullptr;
  if (bench.cell.rung == GPULOAN_RUNG_POOL) bench.gpu.alloc_from_pool();
}

std::string run_guarded(const Bench& bench, const char* name, const std::function<void()>& body) {
  lend_own_memory(bench);
  watchdog(kCaseSeconds, name);
  auto [wrong, skipped] = run_one(bench, body);
  watchdog(0, "");
  return wrong + skipped;
}

Totals run_cases(const Bench& bench, std::span<const Case> cases, std::string_view only) {
  lend_own_memory(bench);
  Totals totals;
  int number = 0;
  for (const Case& test : cases) {
    ++number;
    if (std::string_view(test.name).find(only) == std::string_view::npos) continue;
    if (const char* reason = reason_to_skip(bench, test)) {
      std::printf("ok %d - %s # SKIP %s\n", number, test.name, reason);
      ++totals.skipped;
      continue;
    }
    const std::uint64_t start = now_ms();
    watchdog(kCaseSeconds, test.name);
    const auto [wrong, skipped] = run_one(bench, [&] { test.run(bench); });
    watchdog(0, "");
    if (!skipped.empty()) {
      std::printf("ok %d - %s # SKIP %s\n", number, test.name, skipped.c_str());
      ++totals.skipped;
    } else if (wrong.empty()) {
      std::printf("ok %d - %s # %llu ms\n", number, test.name, static_cast<unsigned long long>(now_ms() - start));
      ++totals.passed;
    } else {
      std::printf("not ok %d - %s\n  # %s\n", number, test.name, wrong.c_str());
      ++totals.failed;
    }
    std::fflush(stdout);
  }
  std::printf("1..%d\n# %d passed, %d failed, %d do not apply\n", number, totals.passed, totals.failed, totals.skipped);
  return totals;
}

} // namespace loan_test
