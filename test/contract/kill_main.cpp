// SPDX-License-Identifier: MIT
//
// kill_test: the kill matrix. {exporter, importer, importer with a sleeping forked child} x {nine points around the eight
// steps} x {gates} x {engines} for one rung; the process is ended by SIGKILL.
//
//   kill_test --driver sim|real|PATH --rung vmm|pool|ipc|host [--all] [--only TEXT] [--table]
//       as TAP: a cover of all pairs of two of the four properties, filled up to 40 cells, or all cells. --table adds a
//       table of the times (docs/reliability.md). Exit status 0: passed, 1: failed, 77: this cannot run here.
#include "../support/cell.hpp"
#include "../support/run.hpp"
#include "kill_cell.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <set>

namespace loan_test {
namespace {

constexpr std::size_t kCover = 40;

struct KillCell {
  Victim victim;
  Point point;
  gpuloan_gate gate;
  gpuloan_engine engine;
  [[nodiscard]] std::array<int, 4> properties() const {
    return {static_cast<int>(victim), static_cast<int>(point), static_cast<int>(gate), static_cast<int>(engine)};
  }
  [[nodiscard]] std::string name() const {
    return std::string(kVictimNames[static_cast<int>(victim)]) + "/" + kPointNames[static_cast<int>(point)] + "/" + gpuloan_gate_name(gate) + "/" +
           gpuloan_engine_name(engine);
  }
};

using Pair = std::array<int, 4>; // property, value, property, value

std::set<Pair> pairs_of(const KillCell& cell) {
  std::set<Pair> pairs;
  const auto values = cell.properties();
  for (int one = 0; one < 4; ++one) {
    for (int two = one + 1; two < 4; ++two) pairs.insert({one, values[static_cast<std::size_t>(one)], two, values[static_cast<std::size_t>(two)]});
  }
  return pairs;
}

// Greedy: the cell with the most pairs that are not covered yet, until all are; then the first others.
std::vector<KillCell> cover(std::vector<KillCell> cells, std::size_t at_least) {
  std::set<Pair> open;
  for (const KillCell& cell : cells) open.merge(pairs_of(cell));
  const std::size_t all_pairs = open.size(), all_cells = cells.size();
  std::vector<KillCell> chosen;
  while (!cells.empty() && (!open.empty() || chosen.size() < at_least)) {
    const auto gain = [&](const KillCell& cell) {
      const auto pairs = pairs_of(cell);
      return std::count_if(pairs.begin(), pairs.end(), [&](const Pair& pair) { return open.contains(pair); });
    };
    const auto best = std::max_element(cells.begin(), cells.end(), [&](const KillCell& a, const KillCell& b) { return gain(a) < gain(b); });
    for (const Pair& pair : pairs_of(*best)) open.erase(pair);
    chosen.push_back(*best);
    cells.erase(best);
  }
  std::printf("# %zu of %zu cells, which cover all %zu pairs\n", chosen.size(), all_cells, all_pairs);
  return chosen;
}

struct Arguments {
  Cell cell;
  bool all = false, table = false;
  std::string only;
  Point point = Point::Connected;
  int control = -1, loan_end = -1;
  bool victim = false;
};

Point parse_point(std::string_view text) {
  for (int index = 0; index < static_cast<int>(std::size(kPointNames)); ++index) {
    if (text == kPointNames[index]) return static_cast<Point>(index);
  }
  fail("'" + std::string(text) + "' is no point");
}

Arguments parse_arguments(int count, char** words) {
  Arguments out;
  out.cell.driver = default_driver();
  for (int at = 1; at < count; ++at) {
    const std::string_view word = words[at];
    const int left = count - at - 1;
    if (word == "--all") out.all = true;
    else if (word == "--table") out.table = true;
    else if (word == "--only" && left >= 1) out.only = words[++at];
    else if (word == "--point" && left >= 1) out.point = parse_point(words[++at]);
    else if ((word == "--worker" || word == "--victim") && left >= 2) {
      out.victim = word == "--victim";
      out.control = std::atoi(words[at + 1]);
      out.loan_end = std::atoi(words[at + 2]);
      at += 2;
    } else if (left >= 1 && take_cell_option(word, words[at + 1], out.cell)) ++at;
    else fail("the argument '" + std::string(word) + "' is not understood; the head of kill_main.cpp lists them");
  }
  return out;
}

struct Row {
  Times worst;
  int cells = 0;
};

void print_table(const Cell& cell, const std::map<std::pair<int, int>, Row>& rows) {
  std::printf("| rung | victim | killed | cells | noticed, at most ms | back, at most ms |\n| --- | --- | --- | ---: | ---: | ---: |\n");
  for (const auto& [key, row] : rows) {
    std::printf("| %s | %s | %s | %d | %llu | %llu |\n", gpuloan_rung_name(cell.rung), kVictimNames[key.first], kPointNames[key.second], row.cells,
                static_cast<unsigned long long>(row.worst.noticed_ms), static_cast<unsigned long long>(row.worst.back_ms));
  }
}

int run_matrix(const Arguments& arguments) {
  const TempFolder folder("gpuloan-kill");
  use_private_sim(folder);
  const Cell& wanted = arguments.cell;
  if (const std::string why = missing({wanted.driver, wanted.rung, GPULOAN_GATE_HOST, GPULOAN_ENGINE_EPOLL}); !why.empty()) {
    std::printf("1..0 # SKIP %s\n", why.c_str());
    return kSkipped;
  }
  Gpu gpu(wanted.driver.c_str());
  gpu.warm_up();
  std::printf("# rung %s, %s driver\n", gpuloan_rung_name(wanted.rung), gpu.simulated() ? "SIMULATED" : "real");
  std::vector<KillCell> cells;
  for (const Victim victim : {Victim::Exporter, Victim::Importer, Victim::ImporterWithChild}) {
    for (std::size_t point = 0; point < std::size(kPointNames); ++point) {
      for (const auto& gate : kGates) {
        for (const auto& engine : kEngines) {
          const Cell cell{wanted.driver, wanted.rung, gate.value, engine.value};
          const KillCell kill{victim, static_cast<Point>(point), gate.value, engine.value};
          if (no_such_cell({cell, gpu}, kill.point) == nullptr && missing(cell).empty() && kill.name().find(arguments.only) != std::string::npos) {
            cells.push_back(kill);
          }
        }
      }
    }
  }
  if (!arguments.all) cells = cover(std::move(cells), kCover);
  std::map<std::pair<int, int>, Row> rows;
  Totals totals;
  for (const KillCell& kill : cells) {
    const Bench bench{{wanted.driver, wanted.rung, kill.gate, kill.engine}, gpu};
    const std::string name = kill.name();
    Times times;
    const std::string wrong = run_guarded(bench, name.c_str(), [&] { times = run_cell(bench, kill.victim, kill.point); });
    ++(wrong.empty() ? totals.passed : totals.failed);
    std::printf("%sok %d - %s # noticed %llu ms, back %llu ms\n", wrong.empty() ? "" : "not ", totals.passed + totals.failed, name.c_str(),
                static_cast<unsigned long long>(times.noticed_ms), static_cast<unsigned long long>(times.back_ms));
    if (!wrong.empty()) std::printf("  # %s\n", wrong.c_str());
    Row& row = rows[{static_cast<int>(kill.victim), static_cast<int>(kill.point)}];
    ++row.cells;
    row.worst.noticed_ms = std::max(row.worst.noticed_ms, times.noticed_ms);
    row.worst.back_ms = std::max(row.worst.back_ms, times.back_ms);
  }
  std::printf("1..%zu\n# %d passed, %d failed\n", cells.size(), totals.passed, totals.failed);
  if (arguments.table) print_table(wanted, rows);
  return totals.exit_status();
}

int run(int count, char** words) {
  const Arguments arguments = parse_arguments(count, words);
  if (arguments.control < 0) return run_matrix(arguments);
  die_with_parent();
  for (const int fd : {arguments.control, arguments.loan_end}) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  if (arguments.victim) return run_kill_victim(arguments.control, arguments.loan_end, arguments.cell, arguments.point);
  return serve(arguments.control, arguments.loan_end, Habitat::Process);
}

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
