// SPDX-License-Identifier: MIT
//
// gpuloan bench: the options, and what is printed. run.cpp measures.
#include "../commands.hpp"
#include "../output.hpp"
#include "run.hpp"

#include <cstdio>
#include <unistd.h>

namespace gpuloan::tool {
namespace bench {
namespace {

constexpr Choice kCases[] = {{"turns", 0}, {"loans", 0}, {"offsets", 0}, {"copies", 0}};

void add_options(Parser& parser, BenchOptions& options) {
  options.common.add_to(parser);
  parser.value("case", "NAME", "turns, loans, offsets or copies; may be repeated; default all", [&](const std::string& text) {
    static_cast<void>(parse_choice(text, kCases));
    options.cases.push_back(text);
  });
  parser.value("size", "BYTES", "instead of each case's own sizes; may be repeated; a multiple of 4", [&](const std::string& text) {
    options.sizes.push_back(parse_size(text));
    if (options.sizes.back() == 0 || options.sizes.back() % 4 != 0) throw Failure(ExitUsage, "is not a multiple of 4 above 0: '" + text + "'");
  });
  parser.flag("quick", "fewer repetitions", options.quick);
  parser.value("loop", "WHOSE", "of both contexts: thread (default), or caller",
               [&](const std::string& text) { options.loans.loop = parse_choice(text, BenchOptions::kLoops); });
  options.loans.add_to(parser);
}

std::string fixed(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// Of a copy the ratio is of rates, of the others of times.
bool is_rate(const Comparison& comparison) { return std::string_view(comparison.name) == "copies"; }

Spread ratio_of(const Comparison& comparison) {
  Spread ratio = spread_of(comparison.ratios);
  if (!is_rate(comparison)) return ratio;
  return {1 / ratio.high, 1 / ratio.middle, 1 / ratio.low};
}

void print(const Session& session, const std::vector<Comparison>& all) {
  print_session(stdout, session);
  if (session.driver.simulated != 0) {
    std::printf("\nThe driver is SIMULATED: these are times of the control plane on this machine's CPUs, not of a GPU.\n");
  }
  std::printf("\nMicroseconds, medians of blocks that alternate with their floor; quartiles of the ratios in brackets.\n\n");
  Table table;
  table.row({"case", "bytes", "floor us", "gpuloan us", "ratio", "[", "]", "floor"});
  for (const Comparison& comparison : all) {
    const Spread ratio = ratio_of(comparison);
    table.row({comparison.name, size_text(comparison.bytes), fixed(spread_of(comparison.floor_us).middle, 1),
               fixed(spread_of(comparison.library_us).middle, 1), fixed(ratio.middle, 3), fixed(ratio.low, 3), fixed(ratio.high, 3), comparison.floor});
  }
  table.print(stdout);
  std::printf("\nThe ratio is gpuloan's time over the floor's; for copies it is gpuloan's rate over the floor's.\n");
}

void spread_member(Json& json, const char* name, const Spread& spread) {
  json.key(name).begin_array().value(spread.low).value(spread.middle).value(spread.high).end();
}

void print_json(const Session& session, const std::vector<Comparison>& all) {
  Json json;
  json.begin_object();
  json_outcome(json, "bench", ExitOk);
  json_session(json, session);
  json.key("comparisons").begin_array();
  for (const Comparison& comparison : all) {
    json.begin_object().member("case", comparison.name).member("floor", comparison.floor).member("bytes", comparison.bytes);
    spread_member(json, "floor_us", spread_of(comparison.floor_us)); // lower quartile, median, upper quartile
    spread_member(json, "gpuloan_us", spread_of(comparison.library_us));
    spread_member(json, is_rate(comparison) ? "rate_ratio" : "time_ratio", ratio_of(comparison));
    json.end();
  }
  json.end().end();
  std::fputs(json.text().c_str(), stdout);
}

} // namespace
} // namespace bench

int bench_command(Arguments arguments) {
  bench::BenchOptions options;
  Parser parser("bench [OPTION]...",
                "Measures loans beside bare driver code that does the same work in the same two processes, in turn, and prints\n"
                "the ratios. turns: one loan, many turns. loans: a new loan each time. offsets: a new loan at another place of a\n"
                "warm arena. copies: the host rung. Gives up after --timeout, here 600 seconds by default.");
  options.common.timeout_ms = 600'000;
  bench::add_options(parser, options);
  if (!parser.parse(arguments)) return ExitOk;
  Session session = open_session(options.common, options.loans, GPULOAN_ROLE_EXPORTER);
  const bool terminal = ::isatty(STDERR_FILENO) == 1;
  bench::Run run(options, session);
  const auto all = run.all([&](const std::string& what) {
    if (terminal) std::fprintf(stderr, "\r\033[K%s", what.c_str());
  });
  if (terminal) std::fprintf(stderr, "\r\033[K");
  options.common.json ? bench::print_json(session, all) : bench::print(session, all);
  return ExitOk;
}

} // namespace gpuloan::tool
