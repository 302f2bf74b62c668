// SPDX-License-Identifier: MIT
//
// gpuloan lend: uploads a file, lends it for read to the first peer that comes with the right key, and ends when the
// loan has been released. A connection that is refused does not end the wait: anyone may knock.
#include "commands.hpp"
#include "device_io.hpp"
#include "transfer.hpp"

#include <cstdio>
#include <memory>
#include <thread>

namespace gpuloan::tool {
namespace {

struct LendOptions {
  CommonOptions common;
  LoanOptions loans;
  MeetOptions meet;
  std::string from;
  bool zero_copy = false;
};

class Lender {
 public:
  explicit Lender(const LendOptions& options)
      : options_(options),
        deadline_(options.common.timeout_ms),
        source_(open_file(options.from, deadline_)),
        session_(open_session(options.common, options.loans, GPULOAN_ROLE_EXPORTER)),
        cuda_(session_.driver, options.common.device),
        io_(&cuda_) {}

  void run() {
    options_.meet.fd >= 0 ? attach() : listen();
    Peer peer = wait_peer();
    key_file_.reset();
    auto wish = init<gpuloan_region_options>();
    wish.bytes = source_->size();
    wish.access = GPULOAN_ACCESS_READ;
    Region region = attempt("cannot make a region", [&] { return peer.create_region(wish); });
    const std::string hash = io_.upload(*source_, {region.pointer(), nullptr, region.bytes()});
    Loan loan = lend(peer, region, hash);
    wait_end(loan);
    const Transfer transfer = {"lend", source_->name(), hash, {"lent", loan.report()}};
    if (const std::string problem = check_loan(transfer.loan, GPULOAN_STEP_RELEASE); !problem.empty()) {
      throw Failure(ExitLoanFailed, problem);
    }
    print_transfer(stdout, options_.common.json, session_, transfer);
    cuda_.synchronize();
  }

 private:
  void attach() {
    const std::string what = "cannot use the inherited FD " + std::to_string(options_.meet.fd);
    try {
      session_.context.attach(options_.meet.fd, "borrower");
    } catch (const StatusError& error) {
      throw Failure(ExitPathUnusable, what + ": " + error.what());
    }
  }

  // A process that was killed keeps its listening socket for some milliseconds where an io_uring of its own holds it
  // (seen with Linux 6.18), so "busy" is believed only when it lasts.
  void listen_at(const std::string& path) {
    const Deadline busy(250);
    for (;;) {
      try {
        return session_.context.listen(path.c_str());
      } catch (const StatusError& error) {
        const bool in_use = error.status() == GPULOAN_ERR_ADDRESS_IN_USE;
        if (!in_use || busy.passed()) {
          throw Failure(in_use ? ExitPathBusy : ExitPathUnusable, "cannot listen at '" + path + "': " + error.what());
        }
      }
      std::this_thread::sleep_for(Milliseconds(10));
    }
  }

  // The key is published after the socket: a lender that finds the path busy must not touch the key of the one that is
  // there.
  void listen() {
    const std::string& path = options_.meet.socket;
    listen_at(path);
    const gpuloan_key key = attempt("cannot make a key", [&] { return session_.context.invite("borrower"); });
    if (options_.meet.key.fd >= 0) {
      write_key(options_.meet.key.fd, key, deadline_);
    } else {
      key_file_ = std::make_unique<KeyFile>(options_.meet.key.file_for(path), key, deadline_);
    }
  }

  Peer wait_peer() {
    int code = ExitTimeout;
    std::string refused;
    while (auto event = next_event(session_.context, deadline_)) {
      if (event->type() == GPULOAN_EVENT_PEER_READY) return event->take_peer();
      if (event->type() == GPULOAN_EVENT_PEER_LOST)
        throw Failure(ExitPeerLost, std::string("the borrower was lost: ") + event->text());
      if (event->type() != GPULOAN_EVENT_PEER_REFUSED) continue;
      code = exit_code(event->status());
      refused = event->text();
      if (options_.meet.fd >= 0) throw Failure(code, "the borrower was refused: " + refused);
      std::fprintf(stderr, "gpuloan lend: refused a connection: %s; still waiting\n", refused.c_str());
    }
    if (!refused.empty())
      throw Failure(code,
                    "no borrower was accepted within " + deadline_.text() + "; the last one was refused: " + refused);
    throw Failure(ExitTimeout, "no borrower came within " + deadline_.text() +
                                   "; start 'gpuloan borrow' on the other side or raise --timeout");
  }

  Loan lend(Peer& peer, const Region& region, const std::string& hash) {
    const std::string metadata = kHashPrefix + hash;
    auto wish = init<gpuloan_lend_options>();
    wish.access = GPULOAN_ACCESS_READ;
    wish.policy = options_.zero_copy ? GPULOAN_POLICY_REQUIRE_ZERO_COPY : GPULOAN_POLICY_BEST;
    wish.memory = GPULOAN_MEMORY_DEVICE; // where the borrower has one
    wish.stream = cuda_.stream();
    wish.metadata = metadata.data();
    wish.metadata_bytes = metadata.size();
    return attempt("cannot lend", [&] { return peer.lend(region.pointer(), region.bytes(), wish); });
  }

  void wait_end(Loan& loan) {
    try {
      wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
    } catch (const StatusError& error) {
      if (error.status() != GPULOAN_ERR_TIMEOUT)
        throw Failure(exit_code(error.status()), std::string("the loan failed: ") + error.what());
      static_cast<void>(gpuloan_loan_cancel(loan.get(), "the lender's timeout passed"));
      throw Failure(ExitTimeout, "the borrower did not give the loan back within " + deadline_.text());
    }
  }

  const LendOptions& options_;
  Deadline deadline_;
  std::unique_ptr<Source> source_;
  Session session_;
  Cuda cuda_;
  DeviceIo io_;
  std::unique_ptr<KeyFile> key_file_;
};

} // namespace

int lend(Arguments arguments) {
  LendOptions options;
  Parser parser("lend (--socket PATH | --fd N) --from FILE [OPTION]...",
                "Uploads FILE to the device, lends its bytes for read to one borrower and ends when the loan is back.\n"
                "The key for the borrower is minted here and written to a file or an FD.");
  options.meet.add_to(parser, false);
  parser.value("from", "FILE", "the bytes to lend; - reads standard input",
               [&](const std::string& text) { options.from = text; });
  parser.flag("require-zero-copy", "fail rather than copy the bytes", options.zero_copy);
  options.loans.add_to(parser);
  options.common.add_to(parser);
  if (!parser.parse(arguments)) return ExitOk;
  options.meet.check();
  options.loans.check_arena();
  if (options.from.empty()) throw Failure(ExitUsage, "give --from FILE: the bytes to lend");
  Lender(options).run();
  return ExitOk;
}

} // namespace gpuloan::tool
