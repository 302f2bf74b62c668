// SPDX-License-Identifier: MIT
//
// gpuloan canary: the options, and what is printed, as TAP or as JSON; canary_run.cpp is the run, canary_serve.cpp the
// other side.
#include "canary.hpp"

#include "commands.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>

namespace gpuloan::tool {
namespace {

constexpr std::uint32_t kWaysAndMore = 8;

const char* canary_name(std::uint32_t canary) {
  return canary == GPULOAN_CANARY_VERIFIED ? "verified" : canary == GPULOAN_CANARY_DEMOTED ? "demoted" : "not attempted";
}

// The library's default, with the rung pool where it is asked for.
std::uint32_t rungs_of(const CanaryOptions& options) {
  if (options.loans.rungs != 0) return options.loans.rungs;
  const char* pool = std::getenv("GPULOAN_POOL");
  const bool tried = options.pool || (pool != nullptr && std::string(pool) == "1");
  return std::uint32_t{GPULOAN_RUNG_VMM} | std::uint32_t{GPULOAN_RUNG_IPC} | std::uint32_t{GPULOAN_RUNG_HOST} |
         (tried ? std::uint32_t{GPULOAN_RUNG_POOL} : 0U);
}

// One line of TAP has no line ends and no '#' but that of a directive.
std::string one_line(std::string text) {
  for (char& letter : text) {
    if (letter == '\n' || letter == '\r') letter = ' ';
    if (letter == '#') letter = '=';
  }
  return text;
}

void print_tap(std::size_t number, const CanaryResult& result) {
  const char* name = verdict_name(*result.kind, result.verdict);
  std::printf("%sok %zu - %s %s: %llu bytes", result.code == ExitOk ? "" : "not ", number, result.kind->name,
              result.shape->name, static_cast<unsigned long long>(result.shape->bytes));
  if (result.verdict == Verdict::Verified) std::printf(", %.1f us, %s\n", result.us, name);
  else if (result.code != ExitOk) std::printf(", %s: %s\n", name, one_line(result.reason).c_str());
  else std::printf(" # SKIP %s: %s\n", name, one_line(result.reason).c_str());
  std::fflush(stdout);
}

void print_summary(const std::vector<CanaryResult>& results) {
  int counts[4] = {};
  for (const CanaryResult& result : results) ++counts[static_cast<int>(result.verdict)];
  std::printf("# %d verified, %d not attempted, %d demoted, %d failed\n", counts[0], counts[1], counts[2], counts[3]);
}

void print_json(const Session& session, const CanaryRun& run, const gpuloan_peer_info& peer, int code, const char* error) {
  Json json;
  json.begin_object();
  json_outcome(json, "canary", code);
  json.member("error", error);
  json_session(json, session);
  json.key("peer").begin_object().member("pid", peer.pid).member("vmm", canary_name(peer.vmm_canary));
  json.member("vmm_foreign", canary_name(peer.foreign_vmm_canary)).member("pool", canary_name(peer.pool_canary));
  json.member("ipc", canary_name(peer.ipc_canary)).member("host", canary_name(peer.host_canary));
  json.member("demoted_text", peer.canary_text).end();
  json.key("tests").begin_array();
  for (const CanaryResult& result : run.results()) {
    json.begin_object().member("rung", gpuloan_rung_name(result.kind->rung)).member("kind", result.kind->name);
    json.member("memory", result.kind->memory).member("shape", result.shape->name).member("offset", result.shape->offset);
    json.member("bytes", result.shape->bytes).member("ok", result.code == ExitOk);
    json.member("verdict", verdict_name(*result.kind, result.verdict)).member("reason", result.reason);
    json.key("us");
    result.verdict == Verdict::Verified ? json.value(result.us) : json.null();
    json.member("copied_bytes", result.copied_bytes).end();
  }
  json.end().end();
  std::fputs(json.text().c_str(), stdout);
}

int run_canary(const CanaryOptions& options) {
  CommonOptions common = options.common;
  LoanOptions loans = options.loans;
  loans.rungs = rungs_of(options);
  loans.canary_timeout_ms = std::max(1U, common.timeout_ms / kWaysAndMore); // each way may use it up
  Session session = open_session(common, loans, GPULOAN_ROLE_EXPORTER);
  const bool tap = !common.json;
  if (tap) {
    print_session(stderr, session);
    std::printf("1..%zu\n", kKinds.size() * kShapes.size());
    std::fflush(stdout);
  }
  std::size_t number = 0;
  CanaryRun run(options, loans.rungs, session, [&](const CanaryResult& result) {
    if (tap) print_tap(++number, result);
    if (result.code != ExitOk) {
      std::fprintf(stderr, "gpuloan canary: %s %s: %s: %s\n", result.kind->name, result.shape->name,
                   verdict_name(*result.kind, result.verdict), result.reason.c_str());
    }
  });
  run.run();
  const gpuloan_peer_info peer = run.peer_info();
  std::optional<Failure> trouble; // the results are printed all the same
  try {
    run.finish();
  } catch (const Failure& failure) {
    trouble.emplace(failure);
  }
  const int code = trouble ? trouble->code() : run.code();
  if (!tap) print_json(session, run, peer, code, trouble ? trouble->what() : "");
  else print_summary(run.results());
  if (trouble && tap) throw Failure(*trouble); // "Bail out!"
  if (trouble) std::fprintf(stderr, "gpuloan canary: %s\n", trouble->what());
  return code;
}

} // namespace

int canary(Arguments arguments) {
  CanaryOptions options;
  Parser parser(
      "canary [OPTION]...",
      "Starts a worker as a separate program and lends it memory of each rung's own kind in four shapes: contiguous, a\n"
      "view, an odd size, more than 2 MiB. The worker compares what it sees and writes other bytes; all that comes back\n"
      "is compared. Prints TAP version 13, or with --json one object; text for people goes to stderr.");
  options.common.add_to(parser);
  options.loans.add_to(parser);
  parser.flag("experimental-pool", "try the rung pool too; default: only where GPULOAN_POOL=1 or --rung pool", options.pool);
  parser.value("worker", "COMMAND", "the other side, for the shell; default: this program. Descriptor 3 is its connection",
               [&](const std::string& text) {
                 if (text.empty()) throw Failure(ExitUsage, "is empty; write a command such as 'gpuloan canary --serve'");
                 options.worker = text;
               });
  parser.flag("serve", "be that other side", options.serve);
  parser.value("fd", "N", "with --serve: the connection's descriptor; default 3",
               [&](const std::string& text) { options.fd = static_cast<int>(parse_number(text, 0, INT32_MAX)); });
  if (!parser.parse(arguments)) return ExitOk;
  if (options.serve && !options.worker.empty()) throw Failure(ExitUsage, "--serve and --worker exclude each other");
  if (!options.serve && parser.given("fd")) throw Failure(ExitUsage, "--fd belongs to --serve");
  if (options.pool && options.loans.rungs != 0 && options.loans.rungs != GPULOAN_RUNG_POOL)
    throw Failure(ExitUsage, "--experimental-pool and --rung exclude each other: --rung names the only one that is tried");
  if (options.serve) return canary_serve(options);
  if (options.common.json) return run_canary(options);
  std::printf("TAP version 13\n");
  try {
    return run_canary(options);
  } catch (const std::exception& error) {
    std::printf("Bail out! %s\n", one_line(error.what()).c_str());
    throw;
  }
}

} // namespace gpuloan::tool
