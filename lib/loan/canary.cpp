// SPDX-License-Identifier: MIT
//
// The canary: one loan through the production path that proves a rung with a peer before its first use.
//
// The exporter fills a region of odd size with a pattern and lends it for write; the importer's library (not its caller)
// maps it, reads it, writes every byte back inverted, and lets go. The exporter compares. A mismatch or a failure demotes
// the rung for this peer, loudly. A peer that does not answer in time (a caller-driven importer that is busy) proves
// nothing: the rung is passed over until the answer comes.
#include <loan/canary.hpp>
#include <loan/exporter.hpp>

#include <base/log.hpp>
#include <base/reaper.hpp>

#include <new>

namespace gpuloan::loan {
namespace {

const char* name_of(gpuloan_rung rung) noexcept {
  return rung == GPULOAN_RUNG_VMM ? "vmm" : rung == GPULOAN_RUNG_POOL ? "pool" : "ipc";
}

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
void Exporter::judge_canary(Lock& lock, ExporterPeer& peer, gpuloan_rung rung) {
  Canary& canary = peer.canary_of(rung);
  const auto loan = std::exchange(canary.loan, nullptr);
  if (!loan || closed_) return; // another thread judges it, or nobody needs to know
  const Canary used{{}, false, false, nullptr, std::exchange(canary.region, nullptr), std::exchange(canary.buffer, nullptr)};
  const auto arena = peer.arena;
  std::string wrong = loan->outcome == GPULOAN_OK ? "" : loan->outcome_text;
  const bool look = !peer.lost && wrong.empty();
  lock.unlock();
  if (look) {
    const cuda::Stream stream = peer.canary_stream.get(); // nothing else is ever in it
    std::vector<std::byte> got(kCanaryBytes);
    driver::Gpu::Scope scope(*gpu_);
    Result<void> read = scope.ok();
    if (read) read = GPULOAN_CU(gpu_->driver(), cuMemcpyDtoHAsync, got.data(), used.pointer(), got.size(), stream);
    if (read) read = run_stream(*gpu_, stream);
    if (!read) wrong = read.error().text;
    else if (got != canary_pattern(true)) wrong = "the bytes that came back are not the importer's";
  }
  if (used.region != nullptr) arena->destroy(used.region);
  lock.lock();
  canary.running = false;
  if (!peer.lost) {
    canary.proof.canary = wrong.empty() ? GPULOAN_CANARY_VERIFIED : GPULOAN_CANARY_DEMOTED;
    if (!wrong.empty()) {
      GPULOAN_LOG(GPULOAN_LOG_WARNING, std::string("the rung ") + name_of(rung) + " is demoted for peer " + std::to_string(peer.pid) +
                                           ": its canary failed: " + wrong);
    }
  }
  changed_.notify_all();
}

// Answers that came when nobody waited for them any more.
void Exporter::judge_late_canaries(const std::shared_ptr<ExporterPeer>& peer) {
  for (const gpuloan_rung rung : {GPULOAN_RUNG_VMM, GPULOAN_RUNG_POOL, GPULOAN_RUNG_IPC}) {
    const Canary& canary = peer->canary_of(rung);
    if (!canary.loan || !canary.loan->ended || (!canary.waited && !peer->lost)) continue;
    post([this, peer, rung] {
      Lock inner(mutex_);
      judge_canary(inner, *peer, rung);
    });
  }
}

// Returns once the rung is verified, demoted, or unanswered; an error only where the canary could not be sent.
Result<void> Exporter::prove(const std::shared_ptr<ExporterPeer>& peer, gpuloan_rung rung, cuda::Pool pool) {
  const Deadline deadline = Deadline::after_ms(options_.canary_timeout_ms);
  Lock lock(mutex_);
  Canary& canary = peer->canary_of(rung);
  bool mine = false;
  if (canary.proof.canary == GPULOAN_CANARY_NOT_ATTEMPTED && !canary.running) mine = canary.running = true;
  if (mine) {
    lock.unlock();
    Result<void> sent;
    try {
      sent = send_canary(peer, rung, pool);
    } catch (const std::bad_alloc&) {
      sent = fail(GPULOAN_ERR_NO_MEMORY, "out of memory");
    }
    lock.lock();
    if (!sent) {
      canary.running = false;
      changed_.notify_all();
      return sent;
    }
  } else if (canary.running && canary.waited) {
    return {}; // one caller has waited its time for this answer already
  }
  const bool over = wait(lock, deadline, false, [&] {
    return !canary.running || peer->lost || (canary.loan && canary.loan->ended);
  });
  if (canary.loan && canary.loan->ended) {
    judge_canary(lock, *peer, rung);
  } else if (over && canary.running && !peer->lost) { // another thread is judging
    static_cast<void>(wait(lock, deadline, false, [&] { return !canary.running || peer->lost; }));
  }
  if (peer->lost) return fail(GPULOAN_ERR_PEER_LOST, "the peer is gone: " + peer->loss.text);
  if (!over && !canary.waited) {
    canary.waited = true;
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "peer " + std::to_string(peer->pid) + " did not answer the canary of the rung " + name_of(rung) +
                                         " within " + std::to_string(options_.canary_timeout_ms) + " ms; other rungs are used until it does");
  }
  return {};
}

Result<void> Exporter::make_canary_memory(ExporterPeer& peer, gpuloan_rung rung, cuda::Pool pool) {
  const std::lock_guard serial(peer.prepare_mutex);
  GPULOAN_TRY(prepare_stream(peer.canary_stream));
  Canary& canary = peer.canary_of(rung);
  if (rung != GPULOAN_RUNG_VMM) {
    auto buffer = rung == GPULOAN_RUNG_POOL ? memory::DeviceBuffer::from_pool(gpu_, kCanaryBytes, pool, peer.canary_stream.get())
                                            : memory::DeviceBuffer::allocate(gpu_, kCanaryBytes);
    if (!buffer) return forward(std::move(buffer.error()));
    canary.buffer = std::shared_ptr<memory::DeviceBuffer>(new memory::DeviceBuffer(std::move(*buffer)), [](memory::DeviceBuffer* last) {
      gpuloan::dispose(std::shared_ptr<memory::DeviceBuffer>(last)); // freeing it waits for the whole context
    });
    return {};
  }
  auto region = peer.arena->create({kCanaryBytes, 0, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_DEVICE, false});
  if (!region) return forward(std::move(region.error()));
  canary.region = *region;
  return {};
}

Result<void> Exporter::send_canary(const std::shared_ptr<ExporterPeer>& peer, gpuloan_rung rung, cuda::Pool pool) {
  GPULOAN_TRY(make_canary_memory(*peer, rung, pool));
  Canary& canary = peer->canary_of(rung); // ours alone until `loan` is set
  const auto pattern = canary_pattern(false);
  driver::Gpu::Scope scope(*gpu_);
  Result<void> done = scope.ok();
  if (done) done = GPULOAN_CU(gpu_->driver(), cuMemcpyHtoDAsync, canary.pointer(), pattern.data(), pattern.size(), peer->canary_stream.get());
  if (done) done = run_stream(*gpu_, peer->canary_stream.get());
  LendOptions options;
  options.access = GPULOAN_ACCESS_WRITE;
  options.rungs = rung;
  options.stream = peer->canary_stream.get();
  options.canary = true;
  if (canary.buffer) options.release = [kept = canary.buffer] {}; // the buffer lives until the peer cannot touch it any more
  auto loan = done ? lend(peer, canary.pointer(), kCanaryBytes, options) : Result<std::shared_ptr<ExportLoan>>(forward(std::move(done.error())));
  const Lock lock(mutex_);
  if (!loan) {
    if (canary.region != nullptr) peer->arena->destroy(std::exchange(canary.region, nullptr));
    canary.buffer.reset();
    return forward(std::move(loan.error()));
  }
  canary.loan = std::move(*loan);
  return {};
}

} // namespace gpuloan::loan
