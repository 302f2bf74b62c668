// SPDX-License-Identifier: MIT
//
// What a test case works with: the cell of the matrix it runs in, the driver, and the two sides. The exporter is in the
// test itself; the importer is a worker, in another process or in another thread.
//
//   Bench bench{...};
//   Exporter exporter(bench);
//   Worker worker(bench);
//   gpuloan_peer* peer = exporter.attach(worker);
//   Region region(peer, bytes);
//   Lent lent = lend(peer, region, {...});
//   Borrowed loan = worker.offered(lent);
//
// All of these end by themselves, in whatever order a failed check leaves them.
#pragma once

#include "check.hpp"
#include "gpu.hpp"
#include "host.hpp"
#include "serve.hpp"
#include "wire.hpp"

#include <functional>
#include <span>
#include <thread>
#include <utility>

namespace loan_test {

struct Cell {
  std::string driver = "sim";
  gpuloan_rung rung = GPULOAN_RUNG_VMM;
  gpuloan_gate gate = GPULOAN_GATE_MEMOP;
  gpuloan_engine engine = GPULOAN_ENGINE_EPOLL;
};
[[nodiscard]] std::string cell_name(const Cell& cell);

struct Bench {
  Cell cell;
  Gpu& gpu; // of the test's own thread
  Habitat habitat = Habitat::Process;
  [[nodiscard]] bool zero_copy() const noexcept { return cell.rung != GPULOAN_RUNG_HOST; }
  // What is lent is memory of the test's own, not of the library's arena.
  [[nodiscard]] bool own_memory() const noexcept { return cell.rung == GPULOAN_RUNG_IPC || cell.rung == GPULOAN_RUNG_POOL; }
  // What becomes of memory that a lost peer had.
  [[nodiscard]] gpuloan_memory_state lost_state() const noexcept {
    return own_memory() ? GPULOAN_MEMORY_QUARANTINED : zero_copy() ? GPULOAN_MEMORY_RETIRED : GPULOAN_MEMORY_RELEASED;
  }
  // lend() and done() themselves wait for the stream: a held one would hold them.
  [[nodiscard]] bool host_gate() const noexcept { return cell.gate == GPULOAN_GATE_HOST; }
};

// ---- The worker ---------------------------------------------------------------------------------------------------

class Borrowed;

class Worker {
 public:
  struct Options {
    std::uint32_t flags = 0; // OpenFlags
    std::uint32_t wait_limit = 0;
    bool keep_end = false; // this process keeps a copy of the worker's end of the connection
    int device = 0;        // by its number in the worker
  };
  explicit Worker(const Bench& bench) : Worker(bench, Options()) {}
  Worker(const Bench& bench, const Options& options);
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker();

  // A command and its answer. What the worker itself found wrong is a failure here; its status is the caller's to judge.
  Reply call(const Command& command, Where where = Where::current());
  void post(const Command& command, Where where = Where::current());
  [[nodiscard]] Reply reply(Where where = Where::current());
  [[nodiscard]] int control() const noexcept { return control_.get(); }

  [[nodiscard]] Command open_command() const;
  [[nodiscard]] int take_loan_end() noexcept { return loan_end_.release(); } // the exporter's
  [[nodiscard]] Borrowed offered(gpuloan_loan* lent, Where where = Where::current());
  [[nodiscard]] Borrowed offered(std::uint64_t id, Where where = Where::current()); // the exporter's number
  [[nodiscard]] Borrowed request(std::uint64_t bytes, std::uint32_t metadata_bytes = 0, std::uint64_t seed = 0,
                                 gpuloan_memory memory = GPULOAN_MEMORY_DEVICE, Where where = Where::current());
  [[nodiscard]] gpuloan_stats stats(Where where = Where::current());
  [[nodiscard]] std::int64_t calls(std::string_view function);
  [[nodiscard]] std::int64_t live(std::string_view what); // of the simulated driver
  [[nodiscard]] bool idle(unsigned stream);
  void hold(unsigned stream);
  void release(unsigned stream);
  void delay(unsigned stream);
  [[nodiscard]] pid_t fork_sleeper(); // a child of the worker's, which outlives it: the caller's to kill
  // Waits for an event; its text. `wanted` is the event's own status.
  std::string event(gpuloan_event_type type, gpuloan_status wanted = GPULOAN_OK, Where where = Where::current());

  void fail_context();                            // of the simulated driver
  void kill() noexcept;                           // SIGKILL; only a process
  void close(Where where = Where::current());     // destroys its context, looks for what stayed behind, ends it
  [[nodiscard]] pid_t pid() const noexcept { return process_.pid(); }

 private:
  void start(Fd control, Fd loan_end);
  const Bench& bench_;
  const Options options_;
  Fd control_;
  Fd loan_end_;
  Fd kept_end_;
  Process process_;
  std::thread thread_;
  std::uint64_t next_loan_ = 1;
};

// A loan as the worker has it.
class Borrowed {
 public:
  Borrowed(Worker& worker, std::uint64_t number) : worker_(&worker), number_(number) {}
  Reply acquire(Where where = Where::current()); // has to succeed
  Reply try_acquire(std::uint32_t timeout_ms, Where where = Where::current());
  Reply try_acquire_on(unsigned stream, std::uint32_t timeout_ms, Where where = Where::current());
  [[nodiscard]] Reply device_of(Where where = Where::current()); // value: the number in the worker; text: the UUID
  void check(std::uint64_t seed, unsigned stream = 0, Where where = Where::current());
  void fill(std::uint64_t seed, unsigned stream = 0, Where where = Where::current());
  void metadata(std::uint32_t bytes, std::uint64_t seed, Where where = Where::current());
  void used_on(unsigned stream, Where where = Where::current());
  void done(std::uint32_t stream = 0, Where where = Where::current()); // has to succeed
  Reply try_done(std::uint32_t stream = 0, Where where = Where::current());
  void give_back(Where where = Where::current());
  void fail_with(std::string_view reason, Where where = Where::current());
  Reply wait_done(Where where = Where::current());
  Reply wait_end(Where where = Where::current());
  [[nodiscard]] gpuloan_loan_report report(Where where = Where::current());
  [[nodiscard]] Command command(Op op) const;
  [[nodiscard]] Worker& worker() const noexcept { return *worker_; }

 private:
  Worker* worker_;
  std::uint64_t number_;
};

// ---- The exporter -------------------------------------------------------------------------------------------------

using ContextTweak = std::function<void(gpuloan_context_options&)>;

class Exporter {
 public:
  explicit Exporter(const Bench& bench, const ContextTweak& tweak = {});
  Exporter(const Exporter&) = delete;
  Exporter& operator=(const Exporter&) = delete;
  ~Exporter();

  [[nodiscard]] gpuloan_context* get() const noexcept { return context_; }
  gpuloan_peer* attach(Worker& worker, const char* account = nullptr, Where where = Where::current());
  // The oldest event of that type, also one that came before others which are still asked for.
  gpuloan_event event(gpuloan_event_type type, std::uint32_t timeout_ms = kWaitMs, Where where = Where::current());
  [[nodiscard]] gpuloan_stats stats() const;
  void destroy() noexcept;

 private:
  gpuloan_context* context_ = nullptr;
  std::vector<gpuloan_event> events_;
};

// Memory to lend: of the arena, or in cells that lend their own memory a plain allocation.
class Region {
 public:
  static Gpu* own_memory; // set for such a cell
  Region(gpuloan_peer* peer, std::uint64_t bytes, gpuloan_access access = GPULOAN_ACCESS_WRITE,
         gpuloan_memory memory = GPULOAN_MEMORY_DEVICE, Where where = Where::current());
  explicit Region(gpuloan_region* made) noexcept : region_(made) {}
  Region(std::uint64_t allocated, std::uint64_t bytes) noexcept : allocated_(allocated), bytes_(bytes) {}
  Region(Region&& other) noexcept
      : region_(std::exchange(other.region_, nullptr)), allocated_(std::exchange(other.allocated_, 0)), bytes_(other.bytes_) {}
  Region& operator=(Region&&) = delete;
  ~Region();
  [[nodiscard]] gpuloan_region* get() const noexcept { return region_; }
  [[nodiscard]] std::uint64_t pointer() const { return region_ != nullptr ? gpuloan_region_pointer(region_) : allocated_; }
  [[nodiscard]] std::uint64_t bytes() const { return region_ != nullptr ? gpuloan_region_bytes(region_) : bytes_; }
  void destroy(Where where = Where::current()); // has to succeed
  void forget() noexcept { region_ = nullptr; } // it ends with its context

 private:
  gpuloan_region* region_ = nullptr;
  std::uint64_t allocated_ = 0, bytes_ = 0;
};

struct LendArgs {
  gpuloan_access access = GPULOAN_ACCESS_READ;
  unsigned stream = 0; // of the test's Gpu
  bool keep_open = false;
  gpuloan_memory memory = GPULOAN_MEMORY_DEVICE;
  gpuloan_policy policy = GPULOAN_POLICY_BEST;
  bool exclusive = false;
  std::span<const unsigned char> metadata = {};
  std::uint32_t rungs = 0; // 0: those of the cell
  gpuloan_release_function release = nullptr;
  void* release_user = nullptr;
};

// A loan as the exporter has it.
class Lent {
 public:
  explicit Lent(gpuloan_loan* loan) noexcept : loan_(loan) {}
  Lent(Lent&& other) noexcept : loan_(std::exchange(other.loan_, nullptr)) {}
  Lent& operator=(Lent&& other) noexcept;
  ~Lent() { gpuloan_loan_unref(loan_); }
  [[nodiscard]] gpuloan_loan* get() const noexcept { return loan_; }
  operator gpuloan_loan*() const noexcept { return loan_; }
  [[nodiscard]] gpuloan_loan_report report(Where where = Where::current()) const;
  void done(Where where = Where::current()) const;                      // waits, has to succeed
  void ended(gpuloan_status outcome = GPULOAN_OK, Where where = Where::current()) const; // waits
  void forget() noexcept { loan_ = nullptr; }

 private:
  gpuloan_loan* loan_ = nullptr;
};

[[nodiscard]] gpuloan_status try_lend(const Bench& bench, gpuloan_peer* peer, std::uint64_t pointer, std::uint64_t bytes,
                                      const LendArgs& args, gpuloan_loan** out_loan);
[[nodiscard]] Lent lend(const Bench& bench, gpuloan_peer* peer, std::uint64_t pointer, std::uint64_t bytes, const LendArgs& args,
                        Where where = Where::current());
[[nodiscard]] inline Lent lend(const Bench& bench, gpuloan_peer* peer, const Region& region, const LendArgs& args,
                               Where where = Where::current()) {
  return lend(bench, peer, region.pointer(), region.bytes(), args, where);
}

struct Granted {
  Region region;
  Lent loan;
};
[[nodiscard]] Granted grant(const Bench& bench, gpuloan_request* request, const LendArgs& args, Where where = Where::current());

// Everything that has to be warm before a stream of the test is held: the canary, the ring of each direction, the words.
void warm_up(const Bench& bench, gpuloan_peer* peer, Worker& worker);

// Compares the eight steps of an ended loan's report.
void expect_steps(const gpuloan_loan_report& report, Where where = Where::current());
void expect_carried(const Bench& bench, const gpuloan_loan_report& report, Where where = Where::current());
void expect_pattern(const Bench& bench, std::uint64_t pointer, std::uint64_t bytes, std::uint64_t seed, unsigned stream = 0,
                    Where where = Where::current());

} // namespace loan_test
