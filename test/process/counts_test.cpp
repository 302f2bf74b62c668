// SPDX-License-Identifier: MIT
//
// What a warm loan costs, counted: system calls, allocations and driver calls of each side. Both sides are turned by one thread, step
// by step, so the counts are the same every time, and a rise fails.
//
// System calls are counted by a parent that traces the thread (ptrace), allocations by operator new of this program, driver calls
// by the simulated driver. The first two are counted without a device: the simulated driver's own would be among them.
#include "../support/check.hpp"
#include "../support/gpu.hpp"
#include "../support/host.hpp"

#include <gpuloan/gpuloan.hpp>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

thread_local std::uint64_t allocations = 0;

} // namespace

void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes != 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace loan_test {
namespace {

using gpuloan::Milliseconds;

constexpr int kSkip = 77;
constexpr std::uint32_t kLoans = 16; // out at once
constexpr std::uint32_t kRounds = 32;
constexpr std::uint64_t kBytes = 4096;
constexpr Milliseconds kPatience{20'000};

std::atomic<std::uint64_t>* system_calls = nullptr; // of this thread; its tracer counts

// Functions of the driver's table.
constexpr const char* kDriverFunctions[] = {
#define GPULOAN_CUDA(need, since, group, name, exported, params) #name,
#include <driver/symbols.inc>
#undef GPULOAN_CUDA
};

struct Count {
  std::uint64_t system_calls = 0, allocations = 0, driver_calls = 0;
};

class Meter {
 public:
  explicit Meter(const Gpu* gpu) : gpu_(gpu) {}
  void start() { start_ = now(); }
  void stop(Count& sum) const {
    const Count end = now();
    sum.system_calls += end.system_calls - start_.system_calls;
    sum.allocations += end.allocations - start_.allocations;
    sum.driver_calls += end.driver_calls - start_.driver_calls;
  }

 private:
  [[nodiscard]] Count now() const {
    Count count{*system_calls, allocations, 0};
    if (gpu_ == nullptr) return count;
    for (const char* name : kDriverFunctions) {
      if (const std::int64_t calls = gpu_->call.sim_calls(name); calls > 0) count.driver_calls += static_cast<std::uint64_t>(calls);
    }
    return count;
  }
  const Gpu* gpu_;
  Count start_;
};

gpuloan::Context make(std::uint32_t role, bool device) {
  auto options = gpuloan::init<gpuloan_context_options>();
  options.role = role;
  options.loop = GPULOAN_LOOP_CALLER;
  options.flags = device ? 0U : std::uint32_t{GPULOAN_CONTEXT_NO_DEVICE};
  options.driver = "sim";
  return gpuloan::Context::create(options);
}

class Pair {
 public:
  explicit Pair(bool device) : device_(device), exporter_(make(GPULOAN_ROLE_EXPORTER, device)), importer_(make(GPULOAN_ROLE_IMPORTER, device)) {
    SocketPair ends = make_socketpair();
    exporter_.attach(ends.left.get(), "counts");
    static_cast<void>(ends.left.release());
    std::thread other([&] { to_exporter_ = importer_.adopt(ends.right.release(), kPatience); });
    while (!peer_) {
      auto event = exporter_.next_event(kPatience);
      expect(event.has_value(), "the importer did not join");
      if (event->type() == GPULOAN_EVENT_PEER_READY) peer_ = event->take_peer();
    }
    other.join();
    auto wish = gpuloan::init<gpuloan_region_options>();
    wish.bytes = kLoans * kBytes;
    wish.access = GPULOAN_ACCESS_WRITE;
    wish.memory = device ? GPULOAN_MEMORY_DEVICE : GPULOAN_MEMORY_HOST;
    region_ = peer_.create_region(wish);
    std::atomic<bool> lent = false; // the first loan waits for its canary
    std::thread answers([&] {
      while (!lent) importer_.dispatch(Milliseconds(1));
    });
    loans_[0] = lend(0);
    lent = true;
    answers.join();
    give_back(1);
    take_ends(1);
  }

  // A round: all are lent, all are given back, all ends are taken.
  void lend_all() {
    for (std::uint32_t at = 0; at < kLoans; ++at) loans_[at] = lend(at);
  }
  void lend_together() {
    std::vector<gpuloan_range> ranges;
    for (std::uint32_t at = 0; at < kLoans; ++at) ranges.push_back({base() + at * kBytes, kBytes});
    std::vector<gpuloan::Loan> lent;
    peer_.lend_many(ranges, options(), lent);
    std::move(lent.begin(), lent.end(), loans_.begin());
  }
  void give_back(std::uint32_t count) {
    for (std::uint32_t at = 0; at < count; ++at) take_offer().done(GPULOAN_STREAM_CPU);
  }
  void give_back_together() {
    std::vector<gpuloan::Loan> taken;
    while (taken.size() < kLoans) taken.push_back(take_offer());
    gpuloan::Loan::done_many(taken, GPULOAN_STREAM_CPU);
  }
  void take_ends(std::uint32_t count) {
    for (std::uint32_t ended = 0; ended < count;) {
      auto event = exporter_.next_event(kPatience);
      expect(event.has_value(), "a loan did not end");
      if (event->type() != GPULOAN_EVENT_LOAN_ENDED) continue;
      expect_equal(event->status(), GPULOAN_OK, "outcome of a loan");
      ++ended;
    }
    for (gpuloan::Loan& loan : loans_) loan.reset();
  }

 private:
  [[nodiscard]] gpuloan_lend_options options() const {
    auto options = gpuloan::init<gpuloan_lend_options>();
    options.access = GPULOAN_ACCESS_WRITE;
    options.memory = device_ ? GPULOAN_MEMORY_DEVICE : GPULOAN_MEMORY_HOST;
    options.stream = GPULOAN_STREAM_CPU;
    return options;
  }
  [[nodiscard]] std::uint64_t base() const { return device_ ? region_.pointer() : reinterpret_cast<std::uint64_t>(region_.host()); }
  gpuloan::Loan lend(std::uint32_t place) { return peer_.lend(base() + place * kBytes, kBytes, options()); }
  gpuloan::Loan take_offer() {
    for (;;) {
      auto event = importer_.next_event(kPatience);
      expect(event.has_value(), "no loan was offered");
      if (event->type() != GPULOAN_EVENT_LOAN_OFFERED) continue;
      gpuloan::Loan loan = event->take_loan();
      static_cast<void>(loan.acquire(kPatience));
      return loan;
    }
  }
  bool device_;
  gpuloan::Context exporter_, importer_;
  gpuloan::Peer peer_, to_exporter_;
  gpuloan::Region region_;
  std::array<gpuloan::Loan, kLoans> loans_;
};

struct Bars {
  Count lending, returning, ending; // for 16 loans
};

bool within(const char* what, const Count& sum, const Count& bar, bool device) {
  bool good = true;
  const auto check = [&](const char* unit, std::uint64_t count, std::uint64_t limit) {
    const double each = static_cast<double>(count) / kRounds;
    const bool ok = count <= limit * kRounds;
    std::printf("%s %s: %.2f %s for %u loans, at most %llu\n", ok ? "ok" : "not ok", what, each, unit, kLoans, static_cast<unsigned long long>(limit));
    good = good && ok;
  };
  if (device) {
    check("driver calls", sum.driver_calls, bar.driver_calls);
  } else {
    check("system calls", sum.system_calls, bar.system_calls);
    check("allocations", sum.allocations, bar.allocations);
  }
  return good;
}

bool measure(bool device, bool together, const Bars& bars) {
  std::printf("# %s, %s\n", device ? "a simulated device" : "no device", together ? "many in each call" : "one in each call");
  std::unique_ptr<Gpu> gpu;
  if (device) gpu = std::make_unique<Gpu>("sim");
  Pair pair(device);
  Meter meter(gpu.get());
  Count lending, returning, ending;
  for (std::uint32_t round = 0; round < kRounds + 4; ++round) {
    if (round == 4) lending = returning = ending = {}; // the first ones warm up: tables and queues grow
    meter.start();
    together ? pair.lend_together() : pair.lend_all();
    meter.stop(lending);
    meter.start();
    together ? pair.give_back_together() : pair.give_back(kLoans);
    meter.stop(returning);
    meter.start();
    pair.take_ends(kLoans);
    meter.stop(ending);
  }
  bool good = within("lending", lending, bars.lending, device);
  good = within("giving back", returning, bars.returning, device) && good;
  return within("taking the ends", ending, bars.ending, device) && good;
}

int body() {
  const TempFolder folder("gpuloan-counts");
  use_private_sim(folder);
  try {
    bool good = measure(false, false, {{16, 96, 0}, {18, 59, 0}, {2, 7, 0}});
    good = measure(false, true, {{1, 105, 0}, {3, 67, 0}, {2, 7, 0}}) && good;
    good = measure(true, false, {{0, 0, 48}, {0, 0, 48}, {0, 0, 0}}) && good;
    good = measure(true, true, {{0, 0, 48}, {0, 0, 48}, {0, 0, 0}}) && good;
    return good ? 0 : 1;
  } catch (const Failure& failure) {
    std::fprintf(stderr, "counts_test: %s\n", failure.text.c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "counts_test: %s\n", error.what());
  }
  return 2;
}

// ---- The tracer ---------------------------------------------------------------------------------------------------

[[noreturn]] void traced() {
  if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) {
    std::printf("SKIP no process may trace another here: ptrace: errno %d\n", errno);
    std::fflush(stdout);
    ::_exit(kSkip);
  }
  ::raise(SIGSTOP);
  const int code = body();
  std::fflush(stdout);
  std::exit(code);
}

// Counts the system calls that the main thread of `child` enters; its other threads are not traced.
int trace(pid_t child) {
  bool inside = false, begun = false;
  for (;;) {
    int status = 0;
    if (::waitpid(child, &status, 0) < 0) return 2;
    if (WIFEXITED(status)) return WEXITSTATUS(status);
    if (WIFSIGNALED(status)) return 128 + WTERMSIG(status);
    int signal = WSTOPSIG(status);
    if (!begun) {
      begun = true;
      ::ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
      signal = 0;
    } else if (signal == (SIGTRAP | 0x80)) {
      inside = !inside;
      if (inside) ++*system_calls;
      signal = 0;
    }
    ::ptrace(PTRACE_SYSCALL, child, nullptr, signal);
  }
}

} // namespace
} // namespace loan_test

int main() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  std::puts("SKIP a sanitizer makes calls and allocations of its own");
  return loan_test::kSkip;
#endif
  void* shared = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 2;
  loan_test::system_calls = new (shared) std::atomic<std::uint64_t>(0);
  const pid_t child = ::fork();
  if (child < 0) return 2;
  if (child == 0) loan_test::traced();
  return loan_test::trace(child);
}
