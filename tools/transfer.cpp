// SPDX-License-Identifier: MIT
#include "transfer.hpp"

#include "output.hpp"

namespace gpuloan::tool {

void MeetOptions::add_to(Parser& parser, bool borrower) {
  parser.value("socket", "PATH", borrower ? "connect to the lender's socket at PATH" : "listen at the socket PATH",
               [this](const std::string& text) {
                 if (text.empty()) throw Failure(ExitUsage, "is empty; name a path");
                 socket = text;
               });
  parser.value("fd", "N", "use this inherited end of a SOCK_SEQPACKET socketpair; no key is needed",
               [this](const std::string& text) { fd = static_cast<int>(parse_number(text, 0, INT32_MAX)); });
  key.add_to(parser, borrower);
}

void MeetOptions::check() const {
  if (socket.empty() == (fd < 0))
    throw Failure(ExitUsage, "give either --socket PATH or --fd N, so that the two sides meet");
  if (fd >= 0 && (!key.file.empty() || key.fd >= 0))
    throw Failure(ExitUsage, "--fd needs no key: leave --key-file and --key-fd out");
  if (!key.file.empty() && key.fd >= 0) throw Failure(ExitUsage, "--key-file and --key-fd exclude each other");
}

void print_transfer(std::FILE* out, bool json, const Session& session, const Transfer& transfer) {
  const std::uint64_t origin = first_export({&transfer.loan, 1});
  if (json) {
    Json object;
    object.begin_object();
    json_outcome(object, transfer.command, ExitOk);
    json_session(object, session);
    object.member("file", transfer.file).member("bytes", transfer.loan.report.bytes).member("sha256", transfer.sha256);
    object.key("loan");
    json_loan(object, transfer.loan, origin);
    object.end();
    std::fputs(object.text().c_str(), out);
    return;
  }
  std::fprintf(out, "%-6s  %s, '%s'\n", transfer.command, size_text_long(transfer.loan.report.bytes).c_str(),
               transfer.file.c_str());
  print_session(out, session);
  std::fprintf(out, "SHA-256 %s\n", transfer.sha256.c_str());
  print_loans(out, {&transfer.loan, 1}, origin);
}

} // namespace gpuloan::tool
