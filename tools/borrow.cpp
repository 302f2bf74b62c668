// SPDX-License-Identifier: MIT
//
// gpuloan borrow: connects, takes the first loan that is offered, writes its bytes to a file and gives the loan back.
#include "commands.hpp"
#include "connect.hpp"
#include "device_io.hpp"

#include <cstdio>
#include <cstring>
#include <memory>

namespace gpuloan::tool {
namespace {

struct BorrowOptions {
  CommonOptions common;
  LoanOptions loans;
  MeetOptions meet;
  std::string to;
  bool cpu = false;
};

class Borrower {
 public:
  explicit Borrower(const BorrowOptions& options)
      : options_(options),
        deadline_(options.common.timeout_ms),
        output_(options.to, deadline_),
        session_(open_session(options.common, options.loans, GPULOAN_ROLE_IMPORTER, options.cpu)) {
    if (!options.cpu) cuda_ = std::make_unique<Cuda>(session_.driver, options.common.device);
  }

  void run() {
    peer_ = options_.meet.fd >= 0 ? adopt_inherited(session_.context, options_.meet.fd, deadline_)
                                 : connect_to_lender(session_.context, options_.meet, deadline_);
    Loan loan = wait_offer();
    auto view = init<gpuloan_view>();
    std::string expected, hash;
    attempt("the loan failed", [&] {
      wait_in_slices(deadline_, [&](Milliseconds slice) { view = loan.acquire(slice); }, "the turn was not ready");
      expected = expected_hash(view);
      hash = take(view);
      loan.done(view.host != nullptr || !cuda_ ? GPULOAN_STREAM_CPU : static_cast<void*>(cuda_->stream()));
      wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
    });
    if (!expected.empty() && hash != expected) {
      throw Failure(ExitLoanFailed, "the bytes do not match: SHA-256 is " + hash + ", the lender's is " + expected);
    }
    output_.commit();
    print_transfer(options_.to == "-" ? stderr : stdout, options_.common.json, session_,
                   {"borrow", options_.to, hash, {"borrowed", loan.report()}});
  }

 private:
  Loan wait_offer() {
    while (auto event = next_event(session_.context, deadline_)) {
      if (event->type() == GPULOAN_EVENT_LOAN_OFFERED) return event->take_loan();
      if (event->type() == GPULOAN_EVENT_PEER_LOST)
        throw Failure(ExitPeerLost, std::string("the lender was lost: ") + event->text());
    }
    throw Failure(ExitTimeout, "the lender lent nothing within " + deadline_.text());
  }

  std::string expected_hash(const gpuloan_view& view) {
    const std::string_view text(static_cast<const char*>(view.metadata), view.metadata_bytes);
    return text.starts_with(kHashPrefix) ? std::string(text.substr(std::strlen(kHashPrefix))) : "";
  }

  // Reads everything; the copies have ended when it returns. The sink throws where the disk is full, and the loan's
  // last reference then gives the loan back.
  std::string take(const gpuloan_view& view) {
    DeviceIo io(cuda_.get());
    return io.download({view.pointer, view.host, view.bytes},
                       [&](std::uint64_t, std::span<const std::byte> bytes) { output_.write(bytes); });
  }

  const BorrowOptions& options_;
  Deadline deadline_;
  Output output_;
  Session session_;
  std::unique_ptr<Cuda> cuda_;
  Peer peer_;
};

} // namespace

int borrow(Arguments arguments) {
  BorrowOptions options;
  Parser parser("borrow (--socket PATH | --fd N) --to FILE [OPTION]...",
                "Borrows from 'gpuloan lend' and writes the bytes to FILE, which appears complete or not at all.\n"
                "The lender may be started later, within the timeout.");
  options.meet.add_to(parser, true);
  parser.value("to", "FILE", "where the bytes go; - writes standard output, and the report goes to stderr",
               [&](const std::string& text) { options.to = text; });
  parser.flag("cpu", "use no device: the bytes come through host memory", options.cpu);
  options.common.add_to(parser);
  if (!parser.parse(arguments)) return ExitOk;
  options.meet.check();
  if (options.to.empty()) throw Failure(ExitUsage, "give --to FILE: where the bytes go");
  Borrower(options).run();
  return ExitOk;
}

} // namespace gpuloan::tool
