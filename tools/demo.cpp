// SPDX-License-Identifier: MIT
//
// gpuloan demo: the options and what is printed; demo_run.cpp is the run, demo_worker.cpp the other side.
#include "commands.hpp"
#include "demo.hpp"
#include "output.hpp"

#include <cstdio>

namespace gpuloan::tool {
namespace {

constexpr std::uint32_t kMaxWorkers = 256;

void add_options(Parser& parser, DemoOptions& options) {
  options.common.add_to(parser);
  parser.value("workers", "N", "start N workers at once; default 1", [&](const std::string& text) {
    options.workers = static_cast<std::uint32_t>(parse_number(text, 1, kMaxWorkers));
  });
  parser.value("size", "BYTES", "without FILE: this many pseudo-random bytes, units such as 64KiB; default 1MiB",
               [&](const std::string& text) { options.size = parse_size(text); });
  parser.value("seed", "N", "of the pseudo-random bytes and of --fill; default 1",
               [&](const std::string& text) { options.seed = parse_number(text, 0, UINT64_MAX); });
  parser.flag("fill", "no input: each worker fills a result of --size bytes on the device", options.fill);
  parser.value("worker-device", "N", "the workers work on this device; default: that of --device", [&](const std::string& text) {
    options.worker_device = static_cast<std::int32_t>(parse_number(text, 0, INT32_MAX));
  });
  parser.flag("cpu-worker", "workers use no device: they get host memory", options.cpu_worker);
  parser.flag("verbose", "with several workers: the full table of each", options.verbose);
  options.loans.add_to(parser);
  parser.value("fault", "KIND", "worker 1 misbehaves", [&](const std::string& text) {
    static constexpr Choice kFaults[] = {{"crash", 0}, {"hang", 0}, {"fail", 0}, {"corrupt", 0}};
    static_cast<void>(parse_choice(text, kFaults));
    options.fault = text;
  });
  parser.hide_last();
  parser.positional("FILE", [&](const std::string& text) {
    if (!options.file.empty()) throw Failure(ExitUsage, "only one FILE can be handed over");
    if (text.empty()) throw Failure(ExitUsage, "FILE is empty: name a file, or leave it out for pseudo-random bytes");
    options.file = text;
  });
}

// --driver auto: the real driver where it has a device, else the simulated one. Never silent: the note is printed.
std::string pick_driver(DemoOptions& options) {
  auto info = init<gpuloan_driver_info>();
  if (gpuloan_driver_probe("real", &info) == GPULOAN_OK && info.devices > 0) {
    options.common.driver = "real";
    return "A GPU was found: this runs on the real driver.";
  }
  options.common.driver = "sim";
  return "No usable GPU: this runs on the SIMULATED driver, with real processes and real bytes but no GPU. (" +
         std::string(gpuloan_error_text()) + ")";
}

void check_options(const DemoOptions& options, const Parser& parser) {
  if (!options.file.empty() && options.fill)
    throw Failure(ExitUsage, "FILE and --fill exclude each other: with --fill there is no input");
  if (!options.file.empty() && parser.given("size"))
    throw Failure(ExitUsage, "FILE and --size exclude each other: the file has its own size");
}

std::string subject(const DemoOptions& options, const DemoRun& run) {
  if (options.fill) return size_text_long(options.size) + " filled by each worker";
  return size_text_long(run.bytes()) + " of " +
         (options.file.empty() ? "pseudo-random bytes" : "'" + options.file + "'");
}

std::string verdict(const DemoWorker& worker) { return worker.failed ? "FAILED" : "OK"; }

// "1.2 ms from the first EXPORT to the last RELEASE"
std::int64_t span_ns(const DemoWorker& worker) {
  std::uint64_t last = 0;
  for (const LoanRow& loan : worker.reports) last = std::max(last, loan.report.step_ns[GPULOAN_STEP_RELEASE]);
  const std::uint64_t first = first_export(worker.reports);
  return last < first ? 0 : static_cast<std::int64_t>(last - first);
}

std::int64_t write_ns(const DemoWorker& worker) {
  if (worker.reports.empty()) return 0;
  const auto& steps = worker.reports.back().report.step_ns;
  return steps[GPULOAN_STEP_DONE] < steps[GPULOAN_STEP_WRITE]
             ? 0
             : static_cast<std::int64_t>(steps[GPULOAN_STEP_DONE] - steps[GPULOAN_STEP_WRITE]);
}

void print_worker(const DemoWorker& worker, std::uint64_t origin) {
  std::printf("\nworker %u, process %d%s%s\n", worker.number, static_cast<int>(worker.child.pid()),
              worker.request_metadata.empty() ? "" : ", asked for ", worker.request_metadata.c_str());
  print_loans(stdout, worker.reports, origin);
  if (!worker.failed) std::printf("  result: %s: OK\n", worker.check.c_str());
  if (!worker.failed && !worker.result_sha256.empty()) std::printf("  SHA-256: %s\n", worker.result_sha256.c_str());
}

void print_summary(std::vector<DemoWorker>& workers) {
  Table table;
  table.row({"worker", "process", "rung", "gate", "bytes", "copied", "write us", "all steps us", "result"});
  for (const DemoWorker& worker : workers) {
    if (worker.reports.empty()) {
      table.row({std::to_string(worker.number), std::to_string(worker.child.pid()), "-", "-", "-", "-", "-", "-",
                 verdict(worker)});
      continue;
    }
    const gpuloan_loan_report& report = worker.reports.back().report;
    std::uint64_t copied = 0;
    for (const LoanRow& loan : worker.reports) copied += loan.report.copied_bytes;
    table.row({std::to_string(worker.number), std::to_string(worker.child.pid()), gpuloan_rung_name(report.rung),
               gpuloan_gate_name(report.gate), std::to_string(report.bytes), size_text(copied),
               microseconds(write_ns(worker)), microseconds(span_ns(worker)), verdict(worker)});
  }
  std::printf("\n");
  table.print(stdout, "");
}

void print_text(const DemoOptions& options, const Session& session, DemoRun& run) {
  std::printf("demo    %u worker%s, %s\n", options.workers, options.workers == 1 ? "" : "s",
              subject(options, run).c_str());
  print_session(stdout, session);
  const auto lent = [](const DemoWorker& worker) { return !worker.reports.empty(); };
  if ((options.workers == 1 || options.verbose) && std::any_of(run.workers().begin(), run.workers().end(), lent)) {
    for (const DemoWorker& worker : run.workers()) {
      if (lent(worker)) print_worker(worker, first_export(worker.reports)); // of the others the error says all
    }
    std::printf("\nTimes are microseconds of CLOCK_MONOTONIC since the first EXPORT of that worker.\n");
  }
  if (options.workers > 1) print_summary(run.workers());
}

void print_json(const DemoOptions& options, const Session& session, DemoRun& run, int code) {
  Json json;
  json.begin_object();
  json_outcome(json, "demo", code);
  json_session(json, session);
  json.key("source").begin_object().member("fill", options.fill);
  json.member("name", options.fill ? "filled by the workers" : run.source().name());
  json.member("bytes", options.fill ? options.size : run.bytes()).member("sha256", run.source_sha256()).end();
  json.key("workers").begin_array();
  for (const DemoWorker& worker : run.workers()) {
    json.begin_object().member("number", worker.number).member("pid", static_cast<int>(worker.child.pid()));
    json.member("ok", !worker.failed)
        .member("error", worker.failure)
        .member("request_metadata", worker.request_metadata);
    json.member("result_sha256", worker.result_sha256).member("check", worker.check);
    json.key("loans").begin_array();
    for (const LoanRow& loan : worker.reports) json_loan(json, loan, first_export(worker.reports));
    json.end().end();
  }
  json.end().end();
  std::fputs(json.text().c_str(), stdout);
}

} // namespace

int demo(Arguments arguments) {
  DemoOptions options;
  Parser parser(
      "demo [FILE] [OPTION]...",
      "Starts workers as separate programs, lends each the bytes of FILE for read and a result for write, lets it\n"
      "copy device-to-device behind the gates, checks what came back and prints the eight steps of every loan.\n"
      "--driver auto takes the real driver where there is a GPU, else the simulated one, and says which.");
  add_options(parser, options);
  if (!parser.parse(arguments)) return ExitOk;
  check_options(options, parser);
  options.loans.check_arena();
  if (options.common.driver == "auto") {
    const std::string note = pick_driver(options);
    std::fprintf(options.common.json ? stderr : stdout, "%s\n", note.c_str());
  }
  Session session = open_session(options.common, options.loans, GPULOAN_ROLE_EXPORTER);
  DemoRun run(options, session);
  run.run();
  int code = ExitOk;
  for (const DemoWorker& worker : run.workers()) {
    if (worker.failed && code == ExitOk) code = worker.code;
  }
  options.common.json ? print_json(options, session, run, code) : print_text(options, session, run);
  std::fflush(stdout);
  for (const DemoWorker& worker : run.workers()) {
    if (worker.failed) std::fprintf(stderr, "gpuloan demo: %s\n", worker.failure.c_str());
  }
  return code;
}

} // namespace gpuloan::tool
