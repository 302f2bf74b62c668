// SPDX-License-Identifier: MIT
#include "canary.hpp"

#include "files.hpp"
#include "floor_rows.hpp"
#include "output.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/socket.h>

namespace gpuloan::tool {

namespace {

constexpr std::uint32_t kGraceMs = 5000; // for the worker's own end

// gpuloan_canary of the ways that a kind takes.
std::uint32_t library_verdict(const CanaryKind& kind, const gpuloan_peer_info& info) {
  switch (kind.rung) {
    case GPULOAN_RUNG_POOL: return info.pool_canary;
    case GPULOAN_RUNG_IPC: return info.ipc_canary;
    case GPULOAN_RUNG_HOST: return info.host_canary;
    default: return kind.arena ? info.vmm_canary : info.foreign_vmm_canary;
  }
}

// Why the library demoted the way of this kind, and no other; where the peer is refused, that.
std::string demoted_text(const CanaryKind& kind, const gpuloan_peer_info& info) {
  static const std::vector<std::string> kWays = {"vmm", "vmm for memory of others", "pool", "ipc", "host (pages, read)", "host (pages, write)",
                                                 "host (segment, read)", "host (segment, write)", "host (ring, read)", "host (ring, write)"};
  const bool refused = info.host_canary == GPULOAN_CANARY_DEMOTED;
  const std::string own = kind.rung == GPULOAN_RUNG_VMM && !kind.arena ? kWays[1] : gpuloan_rung_name(kind.rung);
  for (const std::string& way : kWays) {
    if (refused ? !way.starts_with("host") : way != own) continue;
    if (std::string text = piece_of(info.canary_text, way, kWays); !text.empty()) return text;
  }
  return "its canary failed; GPULOAN_LOG=warning shows how"; // the text has an end
}

} // namespace

const char* verdict_name(const CanaryKind& kind, Verdict verdict) noexcept {
  switch (verdict) {
    case Verdict::Verified: return kind.rung == GPULOAN_RUNG_HOST ? "copy verified" : "zero-copy verified";
    case Verdict::NotAttempted: return "not attempted";
    case Verdict::Demoted: return "demoted";
    case Verdict::Failed: break;
  }
  return "failed";
}

CanaryRun::CanaryRun(const CanaryOptions& options, std::uint32_t rungs, Session& session, Show show)
    : options_(options),
      rungs_(rungs),
      session_(session),
      show_(std::move(show)),
      deadline_(options.common.timeout_ms),
      cuda_(session.driver, options.common.device) {}

int CanaryRun::code() const {
  const auto bad = std::find_if(results_.begin(), results_.end(), [](const auto& result) { return result.code != ExitOk; });
  return bad == results_.end() ? ExitOk : bad->code;
}

void CanaryRun::start() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw Failure(ExitSystem, std::string("socketpair: ") + std::strerror(errno));
  }
  Fd ours(ends[0]);
  const Fd theirs(ends[1]);
  if (options_.worker.empty()) {
    std::vector<std::string> arguments = {"canary", "--serve", "--timeout", std::to_string(options_.common.timeout_ms / 1000 + 1),
                                          "--device", std::to_string(options_.common.device)};
    if (!options_.common.driver.empty()) arguments.insert(arguments.end(), {"--driver", options_.common.driver});
    child_ = Child::start(arguments, theirs.get());
  } else {
    child_ = Child::start_command(options_.worker, theirs.get());
  }
  session_.context.attach(ours.get(), "canary");
  static_cast<void>(ours.release());
}

// A worker that ends before it spoke is a refused connection, too.
std::string CanaryRun::refusal(const Event& event) {
  const bool ended = child_.wait_for(Deadline(kGraceMs));
  return "the worker " + (ended ? child_.status_text() + " before it was connected: " : std::string("gave up its connection: ")) + event.text();
}

void CanaryRun::welcome() {
  while (!deadline_.passed()) {
    check_interrupted();
    if (auto event = session_.context.next_event(deadline_.slice())) {
      if (event->type() == GPULOAN_EVENT_PEER_READY) return void(peer_ = event->take_peer());
      if (event->type() == GPULOAN_EVENT_PEER_REFUSED)
        throw Failure(exit_code(event->status()), refusal(*event));
    } else if (child_.ended()) {
      throw Failure(ExitPeerLost, "the worker " + child_.status_text() + " before it connected");
    }
  }
  throw Failure(ExitTimeout, "the worker did not connect within " + deadline_.text());
}

void CanaryRun::run() {
  attempt("cannot start the worker", [&] { start(); });
  welcome();
  for (const CanaryKind& kind : kKinds) try_kind(kind);
}

std::string CanaryRun::skip_reason(const CanaryKind& kind) const {
  if ((rungs_ & static_cast<std::uint32_t>(kind.rung)) == 0) {
    return kind.rung == GPULOAN_RUNG_POOL && options_.loans.rungs == 0 ? "experimental: --experimental-pool tries it" : "left out by --rung";
  }
  const std::string missing = missing_text(session_.device, kind.floors);
  return missing.empty() ? "" : "this device cannot: " + missing;
}

void CanaryRun::try_kind(const CanaryKind& kind) {
  std::string skipped = skip_reason(kind);
  Region region;
  std::uint64_t pointer = 0;
  std::optional<Failure> unmade;
  if (skipped.empty()) {
    try {
      if (kind.arena) {
        auto wish = init<gpuloan_region_options>();
        wish.bytes = kBlockBytes;
        wish.access = GPULOAN_ACCESS_WRITE;
        region = attempt("cannot make the region", [&] { return peer_.create_region(wish); });
        pointer = region.pointer();
      } else {
        kept_.push_back(std::make_unique<CanaryMemory>(cuda_, session_.driver, options_.common.device, kind.made, kBlockBytes,
                                                       session_.device.granularity));
        pointer = kept_.back()->pointer();
      }
      block_.assign(kBlockBytes, std::byte{0});
    } catch (const Failure& failure) {
      unmade.emplace(failure);
    }
  }
  for (const CanaryShape& shape : kShapes) {
    CanaryResult result;
    result.kind = &kind;
    result.shape = &shape;
    result.reason = skipped;
    if (unmade) {
      result.verdict = Verdict::Failed;
      result.code = unmade->code();
      result.reason = unmade->what();
    } else if (skipped.empty()) {
      try_shape(kind, pointer, result);
    }
    results_.push_back(result);
    show_(results_.back());
  }
  if (region) cuda_.synchronize();
}

void CanaryRun::try_shape(const CanaryKind& kind, std::uint64_t pointer, CanaryResult& result) {
  const auto place = std::span(block_).subspan(result.shape->offset, result.shape->bytes);
  const auto pattern = [&](std::uint32_t seed) {
    for (std::size_t at = 0; at < place.size(); ++at) place[at] = canary_byte(seed, at);
  };
  const auto number = static_cast<std::uint32_t>(results_.size());
  const std::uint32_t asked = 2 * number + 1, answered = 2 * number + 2;
  try {
    check_interrupted();
    pattern(asked);
    cuda_.copy_in(pointer, block_.data(), block_.size()); // all of it: a shape that failed has left what it wanted
    lend(kind, pointer, GPULOAN_ACCESS_READ, asked, result);
    lend(kind, pointer, GPULOAN_ACCESS_WRITE, answered, result);
    pattern(answered);
    std::vector<std::byte> got(kBlockBytes);
    cuda_.copy_out(got.data(), pointer, got.size());
    cuda_.synchronize();
    const auto wrong = std::mismatch(got.begin(), got.end(), block_.begin()).first;
    if (wrong != got.end()) {
      const auto at = static_cast<std::uint64_t>(wrong - got.begin());
      const bool inside = at >= result.shape->offset && at - result.shape->offset < result.shape->bytes;
      throw Failure(ExitLoanFailed, inside ? "byte " + std::to_string(at - result.shape->offset) + " that came back is not the worker's"
                                           : "byte " + std::to_string(at) + " of the block changed, which was not lent");
    }
    result.verdict = Verdict::Verified;
  } catch (const StatusError& error) {
    judge(error, result);
  } catch (const Failure& failure) {
    if (failure.code() > ExitInterrupted) throw;
    result.verdict = Verdict::Failed;
    result.code = failure.code();
    result.reason = failure.what();
  }
}

void CanaryRun::lend(const CanaryKind& kind, std::uint64_t pointer, gpuloan_access access, std::uint32_t seed, CanaryResult& result) {
  const std::string order = std::string("gpuloan-canary 1 ") + (access == GPULOAN_ACCESS_READ ? "check " : "fill ") + std::to_string(seed);
  auto options = init<gpuloan_lend_options>();
  options.access = access;
  options.rungs = kind.rung;
  options.policy = kind.rung == GPULOAN_RUNG_HOST ? GPULOAN_POLICY_BEST : GPULOAN_POLICY_REQUIRE_ZERO_COPY;
  options.stream = cuda_.stream();
  options.metadata = order.data();
  options.metadata_bytes = order.size();
  Loan loan = peer_.lend(pointer + result.shape->offset, result.shape->bytes, options);
  try {
    wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
  } catch (const StatusError& error) {
    if (error.status() == GPULOAN_ERR_TIMEOUT) static_cast<void>(gpuloan_loan_cancel(loan.get(), "the canary's timeout passed"));
    throw;
  }
  const gpuloan_loan_report report = loan.report();
  result.us += static_cast<double>(report.step_ns[GPULOAN_STEP_RELEASE] - report.step_ns[GPULOAN_STEP_EXPORT]) / 1000;
  result.copied_bytes += report.copied_bytes;
  if (report.rung != static_cast<std::uint32_t>(kind.rung) || (kind.rung != GPULOAN_RUNG_HOST && report.copied_bytes != 0)) {
    throw Failure(ExitLoanFailed, std::string("carried by ") + gpuloan_rung_name(report.rung) + ", " + std::to_string(report.copied_bytes) + " bytes copied");
  }
  if (report.canary != GPULOAN_CANARY_VERIFIED) throw Failure(ExitTimeout, "the library's own canary was not answered in time");
}

// What a refusal or a failed loan says of the rung.
void CanaryRun::judge(const StatusError& error, CanaryResult& result) const {
  const gpuloan_peer_info info = peer_.info();
  result.reason = error.what();
  const bool demoted = library_verdict(*result.kind, info) == GPULOAN_CANARY_DEMOTED || info.host_canary == GPULOAN_CANARY_DEMOTED;
  if (error.status() != GPULOAN_ERR_NO_RUNG) {
    result.verdict = Verdict::Failed;
    result.code = exit_code(error.status());
  } else if (demoted) {
    result.verdict = Verdict::Demoted;
    result.code = ExitLoanFailed;
    result.reason = demoted_text(*result.kind, info);
  } else if (result.reason.find("unanswered") != std::string::npos) { // else a floor of the worker's is missing
    result.code = ExitTimeout;
  }
}

// Closes the connection, which is the worker's sign to end.
void CanaryRun::finish() {
  peer_ = {};
  const bool ended = child_.wait_for(Deadline(kGraceMs));
  if (code() != ExitOk || (ended && child_.succeeded())) return;
  throw Failure(ExitLoanFailed, "every shape is good, but the worker " +
                                    (ended ? child_.status_text() : "did not end within " + Deadline(kGraceMs).text() + " of the connection"));
}

} // namespace gpuloan::tool
