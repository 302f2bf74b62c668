// SPDX-License-Identifier: MIT
//
// gpuloan canary --serve: the worker. Takes the inherited end of the socketpair, and of each loan that it is offered does
// what the metadata says: "gpuloan-canary 1 check SEED" compares the bytes, "gpuloan-canary 1 fill SEED" writes them. It
// ends with exit code 0 once the other side has closed the connection.
#include "canary.hpp"

#include "connect.hpp"
#include "cuda.hpp"

#include <cstring>

namespace gpuloan::tool {
namespace {

struct Order {
  bool fill = false;
  std::uint32_t seed = 0;
};

Order parse_order(const gpuloan_view& view) {
  const std::string text(static_cast<const char*>(view.metadata), view.metadata_bytes);
  for (const bool fill : {false, true}) {
    const std::string head = fill ? "gpuloan-canary 1 fill " : "gpuloan-canary 1 check ";
    if (text.starts_with(head)) {
      return {fill, static_cast<std::uint32_t>(parse_number(text.substr(head.size()), 0, UINT32_MAX))};
    }
  }
  throw Failure(ExitPeerRefused, "a loan has the metadata '" + text + "', which is no order of gpuloan canary");
}

class Server {
 public:
  explicit Server(const CanaryOptions& options)
      : deadline_(options.common.timeout_ms),
        session_(open_session(options.common, options.loans, GPULOAN_ROLE_IMPORTER)),
        cuda_(session_.driver, options.common.device),
        peer_(adopt_inherited(session_.context, options.fd, deadline_)) {}

  void run() {
    while (auto event = next_event(session_.context, deadline_)) {
      if (event->type() == GPULOAN_EVENT_PEER_LOST) return;
      if (event->type() == GPULOAN_EVENT_LOAN_OFFERED) serve(event->take_loan());
    }
    throw Failure(ExitTimeout, "the lender did not close the connection within " + deadline_.text());
  }

 private:
  // A loan that fails is the lender's to report.
  void serve(Loan loan) {
    try {
      auto view = init<gpuloan_view>();
      wait_in_slices(deadline_, [&](Milliseconds slice) { view = loan.acquire(slice); }, "the turn was not ready");
      const Order order = parse_order(view);
      if (const std::string wrong = order.fill ? fill(view, order.seed) : look(view, order.seed); !wrong.empty()) {
        return loan.fail(wrong.c_str());
      }
      loan.done(cuda_.stream());
      wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
    } catch (const StatusError& error) {
      std::fprintf(stderr, "gpuloan canary --serve: %s\n", error.what());
    }
  }

  std::string fill(const gpuloan_view& view, std::uint32_t seed) {
    bytes_.resize(view.bytes);
    for (std::uint64_t at = 0; at < view.bytes; ++at) bytes_[at] = canary_byte(seed, at);
    if (view.host != nullptr) std::memcpy(view.host, bytes_.data(), bytes_.size());
    else cuda_.copy_in(view.pointer, bytes_.data(), bytes_.size()), cuda_.synchronize();
    return "";
  }

  std::string look(const gpuloan_view& view, std::uint32_t seed) {
    bytes_.resize(view.bytes);
    if (view.host != nullptr) std::memcpy(bytes_.data(), view.host, bytes_.size());
    else cuda_.copy_out(bytes_.data(), view.pointer, bytes_.size()), cuda_.synchronize();
    for (std::uint64_t at = 0; at < view.bytes; ++at) {
      if (bytes_[at] != canary_byte(seed, at)) return "the worker sees a wrong byte at " + std::to_string(at);
    }
    return "";
  }

  Deadline deadline_;
  Session session_;
  Cuda cuda_;
  Peer peer_;
  std::vector<std::byte> bytes_;
};

} // namespace

int canary_serve(const CanaryOptions& options) {
  Server(options).run();
  return ExitOk;
}

} // namespace gpuloan::tool
