// SPDX-License-Identifier: MIT
//
// The inside of `gpuloan demo`: options, and the parent's run with its workers.
//
// For each worker the parent attaches one end of a socketpair, lends the input for read, grants the result that the
// worker asks for, checks the result behind its DONE, and collects both reports once both loans have been released.
// Everything happens on one thread, driven by the context's events. A worker that fails does not stop the others.
#pragma once

#include "child.hpp"
#include "device_io.hpp"
#include "report.hpp"
#include "session.hpp"

#include <array>

namespace gpuloan::tool {

struct DemoOptions {
  CommonOptions common;
  LoanOptions loans;
  std::string file;
  std::uint64_t size = std::uint64_t{1} << 20U;
  std::uint64_t seed = 1;
  std::uint32_t workers = 1;
  std::int32_t worker_device = -1; // -1: as the parent's
  bool fill = false;       // no input; the worker fills the result
  bool cpu_worker = false; // the worker has no device
  bool verbose = false;
  std::string fault; // what worker 1 does wrong, for tests: "crash", "hang", "fail", "corrupt"
};

struct DemoWorker {
  std::uint32_t number = 0;
  Child child;
  std::optional<Deadline> child_grace; // set when the process ended before its loans did
  Peer peer;
  Region input, result;
  Loan input_loan, result_loan;
  std::string request_metadata;
  std::string result_sha256; // of all that was checked
  std::string check;         // how the result was checked
  bool input_ended = false, result_ended = false, checked = false, failed = false;
  int code = ExitOk;
  std::string failure;
  std::vector<LoanRow> reports;

  [[nodiscard]] bool finished() const { return failed || (input_ended && result_ended && checked); }
};

class DemoRun {
 public:
  DemoRun(const DemoOptions& options, Session& session);
  // Starts the workers and serves them until each has finished or failed, or the deadline has passed.
  void run();

  [[nodiscard]] std::vector<DemoWorker>& workers() { return workers_; }
  [[nodiscard]] const Source& source() const { return *source_; }
  [[nodiscard]] const std::string& source_sha256() const { return source_sha256_; }
  [[nodiscard]] std::uint64_t bytes() const { return source_->size(); }

 private:
  void start(DemoWorker& worker);
  void handle(Event& event);
  void welcome(Peer peer);
  template <typename Step>
  void serve(DemoWorker& worker, const char* what, Step&& step);
  void on_ready(DemoWorker& worker);
  void on_request(DemoWorker& worker, Request request);
  void on_ended(DemoWorker& worker, Event& event);
  void fill_input(DemoWorker& worker);
  void check_result(DemoWorker& worker);
  void check_pattern(DemoWorker& worker, const Memory& memory);
  void watch_children();
  void give_up();
  void collect(DemoWorker& worker);
  void fail(DemoWorker& worker, int code, const std::string& text);
  [[nodiscard]] bool all_finished() const;
  [[nodiscard]] DemoWorker* by_peer(const gpuloan_peer* peer);
  [[nodiscard]] DemoWorker* by_loan(const gpuloan_loan* loan);

  const DemoOptions& options_;
  Session& session_;
  Deadline deadline_;
  Cuda cuda_;
  DeviceIo io_;
  std::unique_ptr<Source> source_;
  std::string source_sha256_;
  DemoWorker* uploaded_ = nullptr; // whose input holds the bytes already
  std::optional<Failure> refusal_; // of a worker that is not known
  std::vector<DemoWorker> workers_;
};

} // namespace gpuloan::tool
