// SPDX-License-Identifier: MIT
//
// gpuloan bench: the options, and what is printed. run.cpp measures.
#include "../commands.hpp"
#include "../output.hpp"
#include "control.hpp"
#include "plot.hpp"
#include "run.hpp"
#include "startup.hpp"

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <unistd.h>

namespace gpuloan::tool {
namespace bench {
namespace {

enum Kind : std::uint32_t { kDevice, kWholeDevice, kStartup, kControl }; // what a case works on
constexpr Choice kCases[] = {{"turns", kDevice}, {"loans", kDevice}, {"offsets", kDevice}, {"copies", kDevice}, {"compute", kDevice}, {"pool", kDevice}, {"whole", kWholeDevice}, {"fit", kWholeDevice}, {"startup", kStartup},
                              {"acks", kControl}, {"roundtrip", kControl}, {"out", kControl}};

bool wants_any(const BenchOptions& options, std::uint32_t kind) {
  return std::any_of(std::begin(kCases), std::end(kCases), [&](const Choice& choice) { return choice.value == kind && options.wants(choice.name); });
}

void add_options(Parser& parser, BenchOptions& options) {
  options.common.add_to(parser);
  parser.value("case", "NAME", "measure only this; may be repeated; default all", [&](const std::string& text) {
    static_cast<void>(parse_choice(text, kCases));
    options.cases.push_back(text);
  });
  parser.value("size", "BYTES", "instead of each case's own sizes; may be repeated; a multiple of 4", [&](const std::string& text) {
    options.sizes.push_back(parse_size(text));
    if (options.sizes.back() == 0 || options.sizes.back() % 4 != 0) throw Failure(ExitUsage, "is not a multiple of 4 above 0: '" + text + "'");
  });
  parser.flag("quick", "fewer repetitions; on the simulated driver nothing above 64 MiB", options.quick);
  parser.value("loop", "WHOSE", "of both contexts: thread (default), or caller",
               [&](const std::string& text) { options.loans.loop = parse_choice(text, BenchOptions::kLoops); });
  parser.value("wait", "HOW", "of both sides: spin (default) while that is short, or sleep; roundtrip has both",
               [&](const std::string& text) { options.loans.sleep = parse_choice(text, BenchOptions::kWaits); });
  parser.value("plot", "FILE.svg", "also draw the ratios", [&](const std::string& text) {
    if (text.empty() || text == "-") throw Failure(ExitUsage, "is not the name of a file: '" + text + "'");
    options.plot = text;
  });
  options.loans.add_to(parser);
}

std::string date_text() {
  const std::time_t now = std::time(nullptr);
  std::tm parts = {};
  char text[32] = "";
  ::gmtime_r(&now, &parts);
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &parts);
  return text;
}

void draw(Output& out, const Session& session, const std::vector<Comparison>& all, const std::optional<Startup>& startup) {
  PlotHeading heading{.device = "no device", .driver = "host memory only", .date = date_text()};
  if (session.has_device) {
    heading.device = session.device.name;
    heading.driver = "driver " + version_text(session.driver.version);
    heading.simulated = session.driver.simulated != 0;
  }
  const std::string svg = plot_svg(heading, all, startup);
  out.write(std::as_bytes(std::span(svg)));
  out.commit();
}

std::string fixed(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// What both tables need under them: a reader would divide the medians, and take a rate for a time.
constexpr const char* kRatios =
    "\nA ratio is the median of the ratios of neighbouring blocks, which is not quite that of the two medians. Of 'time' it\n"
    "is gpuloan's time over the floor's, and less is better; of 'rate' gpuloan's rate over the floor's, and more is better.";

const char* kind_of_ratio(const Comparison& comparison) { return comparison.rate ? "rate" : "time"; }

void print_device_cases(const std::vector<Comparison>& all) {
  std::printf("\nMicroseconds, medians of blocks that alternate with their floor; quartiles of the ratios in brackets.\n\n");
  Table table;
  table.row({"case", "bytes", "floor us", "gpuloan us", "ratio", "[", "]", "ratio of", "floor"});
  for (const Comparison& comparison : all) {
    const Spread ratio = ratio_of(comparison);
    table.row({comparison.name, size_text(comparison.bytes), fixed(spread_of(comparison.floor_us).middle, 1),
               fixed(spread_of(comparison.library_us).middle, 1), fixed(ratio.middle, 3), fixed(ratio.low, 3), fixed(ratio.high, 3), kind_of_ratio(comparison),
               comparison.floor});
  }
  table.print(stdout);
  std::printf("%s\n", kRatios);
}

void print_sizes(const std::vector<Comparison>& all) {
  std::printf("\nThe largest that the device takes, found by bisection; filled and read back by the worker each time.\n\n");
  Table table;
  table.row({"case", "step", "bare", "gpuloan", "ratio", "[", "]", "floor"});
  for (const Comparison& comparison : all) {
    const Spread ratio = ratio_of(comparison);
    table.row({comparison.name, size_text(comparison.bytes), size_text(static_cast<std::uint64_t>(spread_of(comparison.floor_us).middle)),
               size_text(static_cast<std::uint64_t>(spread_of(comparison.library_us).middle)), fixed(ratio.middle, 3), fixed(ratio.low, 3),
               fixed(ratio.high, 3), comparison.floor});
  }
  table.print(stdout);
}

void print_control_cases(const std::vector<Comparison>& all, const std::string& uncounted) {
  std::printf("\nThe control plane without a device. Microseconds of each loan: of this process's CPU (acks, and out where it says so), else of time.\n\n");
  Table table;
  table.row({"case", "of", "floor us", "gpuloan us", "ratio", "[", "]", "ratio of", "calls", "floor"});
  for (const Comparison& comparison : all) {
    const Spread ratio = ratio_of(comparison);
    table.row({comparison.name, comparison.what, fixed(spread_of(comparison.floor_us).middle, 2), fixed(spread_of(comparison.library_us).middle, 2),
               fixed(ratio.middle, 3), fixed(ratio.low, 3), fixed(ratio.high, 3), kind_of_ratio(comparison), comparison.calls >= 0 ? fixed(comparison.calls, 3) : "-", comparison.floor});
  }
  table.print(stdout);
  std::printf("%s\nOf acks the rate is loans for each CPU second. calls: system calls of this process for each loan%s\n", kRatios,
              uncounted.empty() ? "." : (", not counted: " + uncounted).c_str());
}

void print_startup(const Startup& startup) {
  std::printf("\nFrom a new worker to the end of its first loan of %s (canary: %s). Microseconds, medians and quartiles of %u workers.\n\n",
              size_text(startup.bytes).c_str(), startup.canary.c_str(), startup.workers);
  Table table;
  table.row({"step", "us", "[", "]"});
  for (const StartStep& step : startup.steps) {
    const Spread us = spread_of(step.us);
    table.row({std::string(step.name) + ": " + step.about, fixed(us.middle, 1), fixed(us.low, 1), fixed(us.high, 1)});
  }
  table.print(stdout);
}

void spread_member(Json& json, const char* name, const Spread& spread) {
  json.key(name).begin_array().value(spread.low).value(spread.middle).value(spread.high).end();
}

void json_startup(Json& json, const Startup& startup) {
  json.key("startup").begin_object().member("bytes", startup.bytes).member("workers", startup.workers).member("canary", startup.canary);
  json.key("steps").begin_array();
  for (const StartStep& step : startup.steps) {
    json.begin_object().member("step", step.name).member("part_of_total", step.part);
    spread_member(json, "us", spread_of(step.us));
    json.end();
  }
  json.end().end();
}

void print_json(const Session& session, const std::vector<Comparison>& all, const std::optional<Startup>& startup) {
  Json json;
  json.begin_object();
  json_outcome(json, "bench", ExitOk);
  json_session(json, session);
  json.key("comparisons").begin_array();
  for (const Comparison& comparison : all) {
    json.begin_object().member("case", comparison.name).member("floor", comparison.floor);
    if (comparison.what.empty()) json.member(comparison.sizes ? "step_bytes" : "bytes", comparison.bytes);
    else json.member("of", comparison.what);
    if (comparison.calls >= 0) json.member("system_calls", comparison.calls);
    // Lower quartile, median, upper quartile.
    spread_member(json, comparison.sizes ? "floor_bytes" : "floor_us", spread_of(comparison.floor_us));
    spread_member(json, comparison.sizes ? "gpuloan_bytes" : "gpuloan_us", spread_of(comparison.library_us));
    spread_member(json, comparison.sizes ? "size_ratio" : comparison.rate ? "rate_ratio" : "time_ratio", ratio_of(comparison));
    json.end();
  }
  json.end();
  if (startup) json_startup(json, *startup);
  json.end();
  std::fputs(json.text().c_str(), stdout);
}

} // namespace
} // namespace bench

int bench_command(Arguments arguments) {
  bench::BenchOptions options;
  Parser parser("bench [OPTION]...",
                "Measures loans beside bare driver code that does the same work in the same two processes, in turn, and prints\n"
                "the ratios. Its cases:\n"
                "  turns      one loan, many turns\n"
                "  loans      a new loan each time\n"
                "  offsets    a new loan at another place of a warm arena\n"
                "  copies     the host rung\n"
                "  compute    turns of one loan while both sides work on the GPU\n"
                "  pool       the experimental pool rung, only where it is named or GPULOAN_POOL=1\n"
                "  whole      one loan of as much as fits, at most 100 GiB\n"
                "  fit        the largest loan, beside the largest bare allocation\n"
                "  startup    from a new worker to the end of its first loan, step by step, without a floor\n"
                "  acks, roundtrip, out\n"
                "             the control plane alone, beside bare socket code; no device is used");
  options.common.timeout_ms = 600'000;
  bench::add_options(parser, options);
  if (!parser.parse(arguments)) return ExitOk;
  const char* pool = std::getenv("GPULOAN_POOL");
  options.pool = pool != nullptr && std::string_view(pool) == "1";
  if (options.wants("pool") && options.loans.rungs == 0) {
    options.loans.rungs = GPULOAN_RUNG_VMM | GPULOAN_RUNG_POOL | GPULOAN_RUNG_IPC | GPULOAN_RUNG_HOST;
  }
  const bool shared = bench::wants_any(options, bench::kDevice), whole = bench::wants_any(options, bench::kWholeDevice);
  const bool starts = bench::wants_any(options, bench::kStartup);
  const bool device = shared || whole || starts, control = bench::wants_any(options, bench::kControl);
  const bool terminal = ::isatty(STDERR_FILENO) == 1;
  const auto progress = [&](const std::string& what) {
    if (terminal) std::fprintf(stderr, "\r\033[K%s", what.c_str());
  };
  const Deadline deadline(options.common.timeout_ms);
  std::optional<Output> plot; // made now, so that a path that cannot be written is known before the run
  if (!options.plot.empty()) plot.emplace(options.plot, deadline);
  Session session = open_session(options.common, options.loans, GPULOAN_ROLE_EXPORTER, !device);
  std::vector<bench::Comparison> device_cases, control_cases;
  std::string uncounted;
  if (shared) device_cases = bench::Run(options, session).all(false, progress);
  if (whole) {
    LoanOptions loans = options.loans;
    loans.idle_bytes = 1; // as little as there is: what one measurement leaves, the next one needs
    Session large = open_session(options.common, loans, GPULOAN_ROLE_EXPORTER);
    std::ranges::move(bench::Run(options, large).all(true, progress), std::back_inserter(device_cases));
  }
  std::optional<bench::Startup> startup;
  if (starts) startup = bench::measure_startup(options, session, progress);
  if (control) {
    bench::Control cases(options);
    control_cases = cases.all(progress);
    uncounted = cases.uncounted();
  }
  if (terminal) std::fprintf(stderr, "\r\033[K");
  std::vector<bench::Comparison> all = device_cases;
  all.insert(all.end(), control_cases.begin(), control_cases.end());
  if (plot) bench::draw(*plot, session, all, startup);
  if (options.common.json) {
    bench::print_json(session, all, startup);
    return ExitOk;
  }
  print_session(stdout, session);
  if (session.driver.simulated != 0) {
    std::printf("\nThe driver is SIMULATED: what the device's cases took are times of the control plane on this machine's CPUs, not of a GPU.\n");
  }
  const auto sizes = std::ranges::stable_partition(device_cases, [](const bench::Comparison& comparison) { return !comparison.sizes; });
  const std::vector<bench::Comparison> fits(sizes.begin(), sizes.end());
  device_cases.erase(sizes.begin(), sizes.end());
  if (!device_cases.empty()) bench::print_device_cases(device_cases);
  if (!fits.empty()) bench::print_sizes(fits);
  if (startup) bench::print_startup(*startup);
  if (control) bench::print_control_cases(control_cases, uncounted);
  return ExitOk;
}

} // namespace gpuloan::tool
