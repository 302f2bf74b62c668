// SPDX-License-Identifier: MIT
//
// Loan reports: the eight steps as a table, as JSON, and the check that all of them happened in order.
#pragma once

#include "json.hpp"

#include <gpuloan/gpuloan.h>

#include <cstdio>
#include <span>
#include <string>

namespace gpuloan::tool {

struct LoanRow {
  std::string title; // "input", "result"
  gpuloan_loan_report report;
};

// "" when the loan ended well and the steps up to and including `last` are present and in order; else what is wrong.
[[nodiscard]] std::string check_loan(const LoanRow& loan, gpuloan_step last);
// EXPORT of the loan that was exported first: the zero of all times that are printed.
[[nodiscard]] std::uint64_t first_export(std::span<const LoanRow> loans);
// One column a loan: steps in microseconds since `origin`, then rung, gate and bytes; reasons and failures below.
void print_loans(std::FILE* out, std::span<const LoanRow> loans, std::uint64_t origin);
// One object.
void json_loan(Json& json, const LoanRow& loan, std::uint64_t origin);

} // namespace gpuloan::tool
