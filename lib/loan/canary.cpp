// SPDX-License-Identifier: MIT
//
// The canary: one loan through the production path that proves the vmm rung with a peer before its first use.
//
// The exporter fills a region of odd size with a pattern and lends it for write; the importer's library (not its caller)
// maps it, reads it, writes every byte back inverted, and lets go. The exporter compares. A mismatch or a failure demotes
// the rung for this peer, loudly. A peer that does not answer in time (a caller-driven importer that is busy) proves
// nothing: the rung is passed over until the answer comes.
#include <loan/canary.hpp>
#include <loan/exporter.hpp>

#include <base/log.hpp>

namespace gpuloan::loan {
namespace {

[[nodiscard]] Result<void> run_stream(driver::Gpu& gpu, cuda::Stream stream) {
  return GPULOAN_CU(gpu.driver(), cuStreamSynchronize, stream);
}

} // namespace

std::vector<std::byte> canary_pattern(bool answered) {
  std::vector<std::byte> pattern(kCanaryBytes);
  std::uint32_t state = 0x9E3779B9;
  for (std::byte& byte : pattern) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24);
    if (answered) byte = ~byte;
  }
  return pattern;
}

// The canary's loan has ended: what does it prove?
void Exporter::judge_canary(Lock& lock, ExporterPeer& peer) {
  const auto loan = std::exchange(peer.canary_loan, nullptr);
  if (!loan || closed_) return; // another thread judges it, or nobody needs to know
  memory::Region* region = std::exchange(peer.canary_region, nullptr);
  const auto arena = peer.arena;
  std::string wrong = loan->outcome == GPULOAN_OK ? "" : loan->outcome_text;
  const bool look = !peer.lost && wrong.empty();
  lock.unlock();
  if (look) {
    const cuda::Stream stream = peer.canary_stream.get(); // nothing else is ever in it
    std::vector<std::byte> got(kCanaryBytes);
    driver::Gpu::Scope scope(*gpu_);
    Result<void> read = scope.ok();
    if (read) read = GPULOAN_CU(gpu_->driver(), cuMemcpyDtoHAsync, got.data(), region->pointer(), got.size(), stream);
    if (read) read = run_stream(*gpu_, stream);
    if (!read) wrong = read.error().text;
    else if (got != canary_pattern(true)) wrong = "the bytes that came back are not the importer's";
  }
  arena->destroy(region);
  lock.lock();
  peer.canary_running = false;
  if (!peer.lost) {
    peer.vmm_canary = wrong.empty() ? GPULOAN_CANARY_VERIFIED : GPULOAN_CANARY_DEMOTED;
    if (!wrong.empty()) GPULOAN_LOG(GPULOAN_LOG_WARNING, "the vmm rung is demoted for peer " + std::to_string(peer.pid) + ": its canary failed: " + wrong);
  }
  changed_.notify_all();
}

// Returns once the rung is verified, demoted, or unanswered; an error only where the canary could not be sent.
Result<void> Exporter::prove_vmm(const std::shared_ptr<ExporterPeer>& peer) {
  const Deadline deadline = Deadline::after_ms(options_.canary_timeout_ms);
  Lock lock(mutex_);
  bool mine = false;
  if (peer->vmm_canary == GPULOAN_CANARY_NOT_ATTEMPTED && !peer->canary_running) mine = peer->canary_running = true;
  if (mine) {
    lock.unlock();
    auto sent = send_canary(peer);
    lock.lock();
    if (!sent) {
      peer->canary_running = false;
      changed_.notify_all();
      return sent;
    }
  } else if (peer->canary_running && peer->canary_waited) {
    return {}; // one caller has waited its time for this answer already
  }
  const bool over = wait(lock, deadline, false, [&] {
    return !peer->canary_running || peer->lost || (peer->canary_loan && peer->canary_loan->ended);
  });
  if (peer->canary_loan && peer->canary_loan->ended) {
    judge_canary(lock, *peer);
  } else if (over && peer->canary_running && !peer->lost) { // another thread is judging
    static_cast<void>(wait(lock, deadline, false, [&] { return !peer->canary_running || peer->lost; }));
  }
  if (!over && !peer->canary_waited) {
    peer->canary_waited = true;
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "peer " + std::to_string(peer->pid) + " did not answer the vmm rung's canary within " +
                                         std::to_string(options_.canary_timeout_ms) + " ms; other rungs are used until it does");
  }
  return {};
}

Result<void> Exporter::send_canary(const std::shared_ptr<ExporterPeer>& peer) {
  {
    const std::lock_guard serial(peer->prepare_mutex);
    GPULOAN_TRY(prepare_stream(peer->canary_stream));
  }
  auto region = peer->arena->create({kCanaryBytes, 0, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_DEVICE, false});
  if (!region) return forward(std::move(region.error()));
  const auto pattern = canary_pattern(false);
  driver::Gpu::Scope scope(*gpu_);
  Result<void> done = scope.ok();
  if (done) done = GPULOAN_CU(gpu_->driver(), cuMemcpyHtoDAsync, (*region)->pointer(), pattern.data(), pattern.size(), peer->canary_stream.get());
  if (done) done = run_stream(*gpu_, peer->canary_stream.get());
  LendOptions options;
  options.access = GPULOAN_ACCESS_WRITE;
  options.rungs = GPULOAN_RUNG_VMM;
  options.stream = peer->canary_stream.get();
  options.canary = true;
  auto loan = done ? lend(peer, (*region)->pointer(), kCanaryBytes, options) : Result<std::shared_ptr<ExportLoan>>(forward(std::move(done.error())));
  const Lock lock(mutex_);
  if (!loan) {
    peer->arena->destroy(*region);
    return forward(std::move(loan.error()));
  }
  peer->canary_loan = std::move(*loan);
  peer->canary_region = *region;
  return {};
}

} // namespace gpuloan::loan
