// SPDX-License-Identifier: MIT
//
// What lend and borrow have in common: the options that say how to meet, and the report at the end.
#pragma once

#include "keys.hpp"
#include "report.hpp"
#include "session.hpp"

#include <string>

namespace gpuloan::tool {

struct MeetOptions {
  std::string socket;
  int fd = -1;
  KeyOptions key;
  void add_to(Parser& parser, bool borrower);
  // Throws Failure (usage) unless exactly one way to meet was given.
  void check() const;
};

struct Transfer {
  const char* command;
  std::string file, sha256;
  LoanRow loan;
};

// What lend tells borrow about the bytes, as the loan's metadata.
inline constexpr char kHashPrefix[] = "sha256=";

// To `out` as text or JSON.
void print_transfer(std::FILE* out, bool json, const Session& session, const Transfer& transfer);

} // namespace gpuloan::tool
