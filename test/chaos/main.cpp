// SPDX-License-Identifier: MIT
//
// chaos_test: random loans between several exporters and importers on the simulated driver, which are killed, stopped, forked,
// cut off and lied to at random points, under the eyes of the witness (lib/sim/witness.hpp).
//
//   chaos_test [--seed N] [--loans N] [--kills N] [--seconds N] [--round N] [--verbose]
//       until so many loans have ended (4000), with about so many kills (40) and as many other blows, in rounds of 2000 loans; or
//       until the time is over. Each round starts new processes and ends with a search for what was left behind. A round
//       depends on the seed and its number alone: --round runs that one.
//   chaos_test --threads ...
//       the sides are threads of one process, for tools that see one only: no kills, stops and forks, no ipc and no pool
//
// Exit status 0: the last line says what ran. 1: it says what was wrong, and how to run that round again. 77: cannot run here.
#include "judge.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace chaos {
namespace {

constexpr std::uint64_t kRoundLoans = 2000;

Board& map_board(int fd) {
  void* address = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  expect(address != MAP_FAILED, "mmap of the board");
  return *static_cast<Board*>(address); // zero pages are a valid board
}

void be_quiet(void*, gpuloan_log_level, const char*) {}

struct Witness {
  std::int64_t (*reports)();
  int (*report)(std::uint64_t index, char* text, std::uint64_t room);
  void (*unclaim_all)(std::uint32_t process);
  explicit Witness(const char* path) {
    void* library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    expect(library != nullptr, "the simulated driver cannot be opened");
    reports = reinterpret_cast<decltype(reports)>(::dlsym(library, "gpuloan_sim_witness_reports"));
    report = reinterpret_cast<decltype(report)>(::dlsym(library, "gpuloan_sim_witness_report"));
    unclaim_all = reinterpret_cast<decltype(unclaim_all)>(::dlsym(library, "gpuloan_sim_unclaim_all"));
    expect(reports != nullptr && report != nullptr && unclaim_all != nullptr, "a driver without a witness");
  }
  void check() const {
    if (reports() == 0) return;
    char text[256] = "";
    report(0, text, sizeof text);
    fail("the witness made " + std::to_string(reports()) + " reports: " + text);
  }
};

unsigned long long number(std::uint64_t value) { return value; }

} // namespace

int run_judge(const Wish& wish) {
  const TempFolder folder("gpuloan-chaos");
  use_private_sim(folder);
  ::setenv("GPULOAN_SIM_LAG_US", "20", 0);
  const Fd board_fd(::memfd_create("board", MFD_CLOEXEC));
  expect(board_fd.get() >= 0 && ::ftruncate(board_fd.get(), sizeof(Board)) == 0, "memfd_create");
  Board& board = map_board(board_fd.get());
  Gpu gpu("sim");
  gpu.warm_up();
  const Witness witness(gpu.info().path);
  const std::uint64_t used = gpu.used_bytes();
  const auto fds = open_fds();
  const auto live = gpu.live();
  const std::uint64_t rate = wish.kills == 0 && !wish.threads ? 0 : wish.loans / (2 * std::max<std::uint64_t>(wish.kills, 1));
  std::printf("# seed %llu, %s driver\n", number(wish.seed), gpu.simulated() ? "SIMULATED" : "real");
  Blows blows;
  std::uint64_t done = 0, round = wish.round.value_or(0);
  const std::uint64_t end = wish.seconds != 0 ? now_ms() + wish.seconds * 1000 : UINT64_MAX;
  try {
    do {
      {
        Round one(wish, round, board, board_fd.get(), std::max<std::uint64_t>(rate, rate == 0 ? 0 : 1), blows);
        one.on_death = [&](std::uint32_t pid) { witness.unclaim_all(pid); };
        one.run(std::min(kRoundLoans, std::max<std::uint64_t>(wish.loans - std::min(done, wish.loans), 1)));
        done += one.loans();
      }
      witness.check();
      if (!becomes([&] { return gpu.used_bytes() <= used; }, kHangMs)) fail("leak: " + std::to_string(gpu.used_bytes() - used) + " bytes of device memory");
      std::string what;
      const auto clean = [&] {
        what = added(fds, open_fds());
        for (const auto& [name, count] : gpu.live()) {
          if (count > live.at(name)) what += " " + name + ": " + std::to_string(count - live.at(name));
        }
        return what.empty();
      };
      if (!becomes(clean, 5000)) fail("leak: " + what);
      ++round;
      if (wish.verbose || round % 25 == 0) {
        std::printf("# round %llu: %llu loans, %llu kills so far, noticed after %llu ms at most\n", number(round - 1), number(done), number(blows.kills), number(blows.noticed_ms));
      }
    } while (done < wish.loans && now_ms() < end && !wish.round);
  } catch (const Failure& failure) {
    std::string reports;
    char text[256] = "";
    if (witness.reports() > 0 && witness.report(0, text, sizeof text) != 0) reports = std::string("; the witness: ") + text;
    std::printf("not ok - %s%s\n# again: chaos_test --seed %llu --loans %llu --kills %llu%s --round %llu\n", failure.text.c_str(), reports.c_str(),
                number(wish.seed), number(wish.loans), number(wish.kills), wish.threads ? " --threads" : "", number(round));
    return 1;
  }
  constexpr const char* kRungNames[] = {"vmm", "pool", "ipc", "host"};
  std::printf("# %llu rounds, %llu turns; loans over", number(round), number(board.turns.load()));
  for (std::size_t at = 0; at < std::size(kRungNames); ++at) std::printf(" %s %llu", kRungNames[at], number(board.rungs[at].load()));
  std::printf("; ended");
  for (std::size_t at = 0; at < std::size(board.outcomes); ++at) {
    const std::uint64_t count = board.outcomes[at].load();
    if (count != 0) std::printf(" %s %llu", gpuloan_status_name(static_cast<gpuloan_status>(-static_cast<int>(at))), number(count));
  }
  std::uint64_t orphans = 0, writers = 0;
  for (const Slot& slot : board.slots) {
    orphans += slot.orphans.load();
    writers += slot.writers.load();
  }
  std::printf("\n# %llu children outlived their importers, %llu of them went on writing; losses were noticed within %llu ms\n", number(orphans), number(writers),
              number(blows.noticed_ms));
  std::printf("%llu loans, %llu kills, %llu stops, %llu closes, %llu hostile, 0 witness reports, 0 leaks, 0 hangs, seed %llu\n", number(done),
              number(blows.kills), number(blows.stops), number(blows.closes), number(blows.hostile), number(wish.seed));
  return 0;
}

namespace {

int run_side(char** words) {
  die_with_parent();
  Life life;
  life.exporter = std::string_view(words[0]) == "exporter";
  life.seed = std::strtoull(words[1], nullptr, 10);
  life.round = std::strtoull(words[2], nullptr, 10);
  life.number = static_cast<std::uint32_t>(std::atoi(words[3]));
  life.start = std::strtoull(words[4], nullptr, 10);
  const int board_fd = std::atoi(words[5]), control = std::atoi(words[6]);
  life.verbose = std::atoi(words[7]) != 0;
  for (const int fd : {board_fd, control}) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  Board& board = map_board(board_fd);
  try {
    life.exporter ? run_exporter(life, board, control) : run_importer(life, board, control);
    return 0;
  } catch (const Failure& failure) {
    std::strncpy(board.slots[life.number].failure, failure.text.c_str(), sizeof board.slots[0].failure - 1);
    board.slots[life.number].failed.store(1);
    ::_exit(1); // the judge ends the others
  }
}

Wish parse(int count, char** words) {
  Wish wish;
  for (int at = 1; at < count; ++at) {
    const std::string_view word = words[at];
    if (word == "--threads") wish.threads = true;
    else if (word == "--verbose") wish.verbose = true;
    else {
      char* rest = nullptr;
      const std::uint64_t value = at + 1 < count ? std::strtoull(words[at + 1], &rest, 10) : 0;
      const bool good = rest != nullptr && rest != words[at + 1] && *rest == '\0';
      if (good && word == "--seed") wish.seed = value;
      else if (good && word == "--loans") wish.loans = value;
      else if (good && word == "--kills") wish.kills = value;
      else if (good && word == "--seconds") wish.seconds = value;
      else if (good && word == "--round") wish.round = value;
      else fail("the argument '" + std::string(word) + "' is not understood; the head of main.cpp lists them");
      ++at;
    }
  }
  return wish;
}

} // namespace
} // namespace chaos

int main(int count, char** words) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    const bool side = count == 10 && std::strcmp(words[1], "--side") == 0;
    if (!side || std::strcmp(words[9], "1") != 0) gpuloan_log_set(chaos::be_quiet, nullptr, GPULOAN_LOG_OFF);
    return side ? chaos::run_side(words + 2) : chaos::run_judge(chaos::parse(count, words));
  } catch (const loan_test::Failure& failure) {
    std::fprintf(stderr, "chaos_test: %s\n", failure.text.c_str());
    return 2;
  }
}
