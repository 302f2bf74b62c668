// SPDX-License-Identifier: MIT
//
// fault_test: a scripted loan of two processes in which one call fails, for every call of it.
//
//   fault_test [--share N] [--jobs N]     a choice of about N cells (default 900), spread over all functions and places
//   fault_test --all                      every cell
//   fault_test --only TEXT                of those, the cells whose name contains TEXT
//   fault_test --allocations | --calls    only the cells in which an allocation fails; only the others
//   fault_test --list                     how many calls each function has
//
// A cell is (rung, gate, side, function, n, result). Its script is read off a run without a fault. Each side is a process
// with a watchdog; what has to hold afterwards is in judge() and side.cpp. Exit status 0: all passed, 1: some did not.
#include "plan.hpp"

#include "interpose.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <execinfo.h>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <unistd.h>

namespace fault {
namespace {

using namespace loan_test;

constexpr unsigned kWatchdogSeconds = 20;

struct Arguments {
  bool all = false, list = false, verbose = false, allocations = true, calls = true;
  std::size_t share = 900;
  unsigned jobs = 2;
  std::string only;
};

// ---- One cell -----------------------------------------------------------------------------------------------------

std::string read_all(int fd) {
  std::string text;
  char part[4096];
  for (ssize_t length = 0; (length = ::read(fd, part, sizeof part)) > 0;) text.append(part, static_cast<std::size_t>(length));
  return text;
}

struct Run {
  int status = 0;
  std::string output;
};

Run play(const Plan& plan) {
  SocketPair pipe = make_socketpair();
  std::vector<std::string> words = {"--exporter"};
  const auto more = plan.words();
  words.insert(words.end(), more.begin(), more.end());
  Process exporter(words, {}, pipe.right.get());
  pipe.right.reset();
  Run run;
  run.output = read_all(pipe.left.get());
  run.status = exporter.wait();
  return run;
}

struct End {
  bool seen = false, first = false, second = false, fired_first = false, fired = false, own = false;
};

// What is wrong with a run; "" for nothing.
std::string judge(const Plan& plan, const Run& run, bool& fired, bool& own) {
  End ends[2];
  std::istringstream lines(run.output);
  std::string wrong, notes;
  for (std::string line; std::getline(lines, line);) {
    int side = 0, values[5] = {};
    if (std::sscanf(line.c_str(), "end %d %d %d %d %d %d", &side, values, values + 1, values + 2, values + 3, values + 4) == 6) {
      ends[side != 0] = {true, values[0] != 0, values[1] != 0, values[2] != 0, values[3] != 0, values[4] != 0};
    }
    if (line.starts_with("WRONG") || line.starts_with("not ok")) wrong += "\n    " + line;
    if (line.starts_with("note ")) notes += "\n    " + line;
  }
  const End& faulty = ends[plan.side == Side::Importer];
  fired = faulty.fired;
  if (run.status != 0) wrong += "\n    the exporter's exit status is " + std::to_string(run.status);
  if (!ends[0].seen || !ends[1].seen) wrong += "\n    a side did not come to its end";
  own = faulty.own;
  if (own && run.status == 0 && ends[0].seen && ends[1].seen) return {}; // it hit a call of the test's own: only crashes and hangs count
  // A single fault that came in the first round leaves a context that works.
  const bool second_has_to = faulty.fired_first || !faulty.fired;
  if (wrong.empty() && second_has_to && !(ends[0].second && ends[1].second)) wrong += "\n    the second round, with a fresh peer, failed" + notes;
  if (wrong.empty() && !faulty.fired && !(ends[0].first && ends[1].first)) wrong += "\n    it failed without a fault";
  return wrong;
}

// ---- The table ----------------------------------------------------------------------------------------------------

struct Group { // one function on one side of one combination
  std::vector<Plan> cells;
};

std::vector<int> codes_of(Kind kind, const std::string& function) {
  if (kind == Kind::Driver) return {2, 999, 801};
  static const std::map<std::string, std::vector<int>> errors = {
      {"memfd_create", {EMFILE, ENOMEM}}, {"mmap", {ENOMEM}},           {"ftruncate", {ENOMEM, EINTR}},        {"fcntl", {EMFILE, EPERM}},
      {"fstat", {ENOMEM}},                {"sendmsg", {EINTR, ENOBUFS, ENOMEM, ETOOMANYREFS, EPERM}},          {"recvmmsg", {EINTR, ENOMEM, ENOBUFS}},
      {"epoll_create1", {EMFILE, ENOMEM}}, {"epoll_ctl", {ENOMEM, ENOSPC}}, {"epoll_pwait2", {EINTR, ENOSYS, ENOMEM}}, {"eventfd", {EMFILE, ENOMEM}},
      {"setsockopt", {ENOMEM}},           {"getsockopt", {ENOBUFS}},    {"getpeername", {ENOBUFS}},            {"pidfd_open", {EMFILE, ENOSYS}},
      {"pthread_create", {EAGAIN}},       {"new", {ENOMEM}}};
  return errors.at(function);
}

// Reads the counts of a run without a fault into groups of cells.
std::vector<Group> groups_of(const Plan& base, const std::string& output) {
  struct Known {
    std::uint64_t made = 0, kept = 0;
  };
  std::map<std::string, Known> seen;
  std::vector<Group> groups;
  std::istringstream lines(output);
  for (std::string word; std::getline(lines, word);) {
    std::istringstream line(word);
    std::string count, when, function;
    int side = 0, kind = 0;
    std::uint64_t from = 0, to = 0;
    if (!(line >> count >> when >> side >> kind >> function >> from >> to) || count != "count") continue;
    Known& known = seen[std::to_string(side) + std::to_string(kind) + function];
    if (when == "made" && known.made == 0) known.made = std::max<std::uint64_t>(to, 1);
    if (when == "kept") known.kept = to;
    if (when != "fresh") continue;
    Group group;
    for (std::uint64_t n = from + 1; n <= to; ++n) {
      for (const int code : codes_of(static_cast<Kind>(kind), function)) {
        Plan cell = base;
        // What a context found missing when it was made stays missing in it; and what fails when it ends has to have one.
        cell.fresh = n <= known.made || n > known.kept || n % 3 == 0;
        cell.side = static_cast<Side>(side);
        cell.kind = static_cast<Kind>(kind);
        cell.function = function;
        cell.n = n;
        cell.code = code;
        group.cells.push_back(cell);
      }
    }
    if (!group.cells.empty()) groups.push_back(std::move(group));
  }
  return groups;
}

// Every group gives its share, at least one cell; which ones changes from group to group.
std::vector<Plan> choose(const std::vector<Group>& groups, std::size_t wanted) {
  std::size_t total = 0, turn = 0;
  for (const Group& group : groups) total += group.cells.size();
  std::vector<Plan> chosen;
  for (const Group& group : groups) {
    const std::size_t size = group.cells.size();
    const std::size_t share = std::clamp<std::size_t>(size * wanted / std::max<std::size_t>(total, 1) / 2, 1, size);
    const std::size_t stride = size / share;
    for (std::size_t i = 0; i < share; ++i) chosen.push_back(group.cells[(i * stride + turn * 7919) % size]);
    ++turn;
  }
  if (chosen.size() <= wanted) return chosen;
  std::vector<Plan> fewer; // still spread: every so many-th
  for (std::size_t i = 0; i < wanted; ++i) fewer.push_back(chosen[i * chosen.size() / wanted]);
  return fewer;
}

class Table {
 public:
  explicit Table(const Arguments& arguments) : arguments_(arguments) {}
  int run();

 private:
  bool read_scripts();
  void work(const TempFolder& folder, unsigned number);
  void list() const;

  const Arguments& arguments_;
  std::vector<Group> groups_;
  std::vector<Plan> cells_;
  std::atomic<std::size_t> next_{0}, failed_{0}, hit_{0}, own_{0};
  std::mutex printing_;
};

bool Table::read_scripts() {
  const TempFolder folder("gpuloan-fault");
  bool good = true;
  for (const auto rung : {GPULOAN_RUNG_VMM, GPULOAN_RUNG_POOL, GPULOAN_RUNG_IPC, GPULOAN_RUNG_HOST}) {
    for (const auto gate : {GPULOAN_GATE_MEMOP, GPULOAN_GATE_EVENT}) {
      Plan plan;
      plan.rung = rung;
      plan.gate = gate;
      plan.fresh = true;
      plan.state = folder.path() + "/sim";
      const Run run = play(plan);
      bool fired = false, own = false;
      if (const std::string wrong = judge(plan, run, fired, own); !wrong.empty()) {
        std::printf("not ok - %s%s\n%s\n", plan.name().c_str(), wrong.c_str(), run.output.c_str());
        good = false;
        continue;
      }
      auto more = groups_of(plan, run.output);
      std::move(more.begin(), more.end(), std::back_inserter(groups_));
    }
  }
  return good;
}

void Table::work(const TempFolder& folder, unsigned number) {
  while (true) {
    const std::size_t at = next_++;
    if (at >= cells_.size()) return;
    Plan plan = cells_[at];
    plan.state = folder.path() + "/sim" + std::to_string(number);
    const std::uint64_t start = now_ms();
    const Run run = play(plan);
    bool fired = false, own = false;
    const std::string wrong = judge(plan, run, fired, own);
    if (fired) ++hit_;
    if (own) ++own_;
    const std::lock_guard lock(printing_);
    if (!wrong.empty()) {
      ++failed_;
      std::printf("not ok - %s (%llu ms)%s\n", plan.name().c_str(), static_cast<unsigned long long>(now_ms() - start), wrong.c_str());
      ::unlink(plan.state.c_str());
    } else if (arguments_.verbose) {
      std::printf("ok - %s (%llu ms)\n", plan.name().c_str(), static_cast<unsigned long long>(now_ms() - start));
    }
    if (arguments_.verbose) std::printf("%s", run.output.c_str());
  }
}

void Table::list() const {
  for (const Group& group : groups_) std::printf("%6zu cells to %s\n", group.cells.size(), group.cells.back().name().c_str());
}

int Table::run() {
  const std::uint64_t start = now_ms();
  if (!read_scripts()) return 1;
  std::erase_if(groups_, [&](const Group& group) {
    return !(group.cells.front().function == "new" ? arguments_.allocations : arguments_.calls);
  });
  std::size_t total = 0;
  std::vector<Plan> all;
  for (const Group& group : groups_) {
    total += group.cells.size();
    all.insert(all.end(), group.cells.begin(), group.cells.end());
  }
  if (arguments_.list) {
    list();
    std::printf("# %zu cells of %zu functions\n", total, groups_.size());
    return 0;
  }
  cells_ = arguments_.all || !arguments_.only.empty() ? all : choose(groups_, arguments_.share);
  if (!arguments_.only.empty()) {
    std::erase_if(cells_, [&](const Plan& plan) { return plan.name().find(arguments_.only) == std::string::npos; });
    if (!arguments_.all && cells_.size() > arguments_.share) cells_ = choose({Group{cells_}}, arguments_.share * 2);
  }
  const TempFolder folder("gpuloan-fault");
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < arguments_.jobs; ++i) threads.emplace_back([&, i] { work(folder, i); });
  for (std::thread& thread : threads) thread.join();
  std::printf("# %zu of %zu cells ran, in %llu s; the fault came in %zu of them (in %zu at a call of the test's own); %zu failed\n", cells_.size(), total,
              static_cast<unsigned long long>((now_ms() - start) / 1000), hit_.load(), own_.load(), failed_.load());
  return failed_ == 0 && !cells_.empty() ? 0 : 1;
}

// ---- The program --------------------------------------------------------------------------------------------------

[[noreturn]] void say_where() {
  void* frames[32];
  ::backtrace_symbols_fd(frames, ::backtrace(frames, 32), STDERR_FILENO);
  std::abort();
}

int run(int count, char** words) {
  Arguments arguments;
  for (int at = 1; at < count; ++at) {
    const std::string_view word = words[at];
    const int left = count - at - 1;
    if (word == "--exporter" && left >= Plan::kWords) {
      die_with_parent();
      std::set_terminate(say_where);
      watchdog(kWatchdogSeconds, "the exporter's side");
      return run_exporter(Plan::parse(words + at + 1));
    }
    if (word == "--importer" && left >= Plan::kWords + 2) {
      die_with_parent();
      std::set_terminate(say_where);
      watchdog(kWatchdogSeconds, "the importer's side");
      const int ends[2] = {std::atoi(words[at + 1]), std::atoi(words[at + 2])};
      return run_importer(Plan::parse(words + at + 3), ends);
    }
    if (word == "--all") arguments.all = true;
    else if (word == "--allocations") arguments.calls = false;
    else if (word == "--calls") arguments.allocations = false;
    else if (word == "--list") arguments.list = true;
    else if (word == "--verbose") arguments.verbose = true;
    else if (word == "--only" && left >= 1) arguments.only = words[++at];
    else if (word == "--share" && left >= 1) arguments.share = std::strtoull(words[++at], nullptr, 10);
    else if (word == "--jobs" && left >= 1) arguments.jobs = static_cast<unsigned>(std::atoi(words[++at]));
    else fail("the argument '" + std::string(word) + "' is not understood; the head of main.cpp lists them");
  }
  return Table(arguments).run();
}

} // namespace
} // namespace fault

int main(int count, char** words) { return loan_test::run_program(fault::run, count, words); }
