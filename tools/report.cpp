// SPDX-License-Identifier: MIT
#include "report.hpp"

#include "output.hpp"

#include <algorithm>

namespace gpuloan::tool {
namespace {

std::int64_t since(std::uint64_t time, std::uint64_t origin) { return static_cast<std::int64_t>(time - origin); }

const char* access_name(std::uint32_t access) { return access == GPULOAN_ACCESS_WRITE ? "write" : "read"; }
const char* memory_name(std::uint32_t memory) { return memory == GPULOAN_MEMORY_HOST ? "host" : "device"; }

const char* canary_name(std::uint32_t canary) {
  switch (canary) {
    case GPULOAN_CANARY_VERIFIED: return "verified";
    case GPULOAN_CANARY_DEMOTED: return "demoted";
    default: return "not attempted";
  }
}

std::string outcome_name(const gpuloan_loan_report& report) {
  if (report.ended == 0) return "open";
  return report.outcome == GPULOAN_OK ? "ok" : gpuloan_status_name(report.outcome);
}

void print_reason(std::FILE* out, const LoanRow& loan, const char* what, const char* reason) {
  if (reason[0] != '\0') std::fprintf(out, "  %s of the %s loan: %s\n", what, loan.title.c_str(), reason);
}

} // namespace

std::string check_loan(const LoanRow& loan, gpuloan_step last) {
  const gpuloan_loan_report& report = loan.report;
  if (report.ended == 0) return "the " + loan.title + " loan has not ended";
  if (report.outcome != GPULOAN_OK) {
    return "the " + loan.title + " loan failed with " + gpuloan_status_name(report.outcome) + ": " +
           report.outcome_text;
  }
  std::uint64_t before = 0;
  for (int step = 0; step <= last; ++step) {
    const char* name = gpuloan_step_name(static_cast<gpuloan_step>(step));
    if (report.step_ns[step] == 0) return "the " + loan.title + " loan has no step " + name;
    if (report.step_ns[step] < before) return "the " + loan.title + " loan's step " + name + " is out of order";
    before = report.step_ns[step];
  }
  return "";
}

std::uint64_t first_export(std::span<const LoanRow> loans) {
  std::uint64_t origin = UINT64_MAX;
  for (const LoanRow& loan : loans) {
    // An importer may not know when EXPORT was; its own first step then stands in.
    for (const std::uint64_t time : loan.report.step_ns) {
      if (time != 0) origin = std::min(origin, time);
    }
  }
  return origin == UINT64_MAX ? 0 : origin;
}

void print_loans(std::FILE* out, std::span<const LoanRow> loans, std::uint64_t origin) {
  Table table;
  const auto row = [&](const char* title, auto&& cell) {
    std::vector<std::string> cells = {title};
    for (const LoanRow& loan : loans) cells.push_back(cell(loan.report));
    table.row(std::move(cells));
  };
  std::vector<std::string> titles = {"loan"};
  for (const LoanRow& loan : loans) titles.push_back(loan.title + " (" + access_name(loan.report.access) + ")");
  table.row(std::move(titles));
  for (int step = 0; step < GPULOAN_STEP_COUNT; ++step) {
    row((std::string(gpuloan_step_name(static_cast<gpuloan_step>(step))) + " us").c_str(), [&](const auto& report) {
      return report.step_ns[step] == 0 ? std::string("-") : microseconds(since(report.step_ns[step], origin));
    });
  }
  row("bytes", [](const auto& report) { return std::to_string(report.bytes); });
  row("rung", [](const auto& report) { return std::string(gpuloan_rung_name(report.rung)); });
  row("gate", [](const auto& report) { return std::string(gpuloan_gate_name(report.gate)); });
  row("copied", [](const auto& report) { return size_text(report.copied_bytes); });
  row("exposed", [](const auto& report) { return size_text(report.exposed_bytes); });
  row("outcome", [](const auto& report) { return outcome_name(report); });
  table.print(out);
  for (const LoanRow& loan : loans) {
    print_reason(out, loan, "rung", loan.report.rung_reason);
    print_reason(out, loan, "gate", loan.report.gate_reason);
    print_reason(out, loan, "outcome", loan.report.outcome_text);
  }
}

void json_loan(Json& json, const LoanRow& loan, std::uint64_t origin) {
  const gpuloan_loan_report& report = loan.report;
  json.begin_object().member("title", loan.title).member("id", report.id).member("bytes", report.bytes);
  json.member("access", access_name(report.access)).member("memory", memory_name(report.memory));
  json.member("rung", gpuloan_rung_name(report.rung)).member("rung_reason", report.rung_reason);
  json.member("gate", gpuloan_gate_name(report.gate)).member("gate_reason", report.gate_reason);
  json.member("canary", canary_name(report.canary));
  json.member("turns", report.turns).member("turns_done", report.turns_done);
  json.member("ended", report.ended != 0).member("outcome", gpuloan_status_name(report.outcome));
  json.member("outcome_text", report.outcome_text);
  json.member("memory_state", gpuloan_memory_state_name(report.memory_state));
  json.member("copied_bytes", report.copied_bytes).member("exposed_bytes", report.exposed_bytes);
  json.key("steps").begin_array();
  for (int step = 0; step < GPULOAN_STEP_COUNT; ++step) {
    const std::uint64_t time = report.step_ns[step];
    json.begin_object().member("step", gpuloan_step_name(static_cast<gpuloan_step>(step)));
    json.key("monotonic_ns");
    if (time == 0) {
      json.null().key("us").null();
    } else {
      json.value(time).member("us", static_cast<double>(since(time, origin)) / 1000);
    }
    json.end();
  }
  json.end().end();
}

} // namespace gpuloan::tool
