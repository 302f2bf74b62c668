// SPDX-License-Identifier: MIT
//
// The canary: a battery of loans through the production path that proves one way to a peer before its first use.
//
// The exporter fills one block with patterns and lends four pieces of it at once (trial.hpp); the importer's library (not
// its caller) maps each, compares it, writes every byte back inverted, and lets go. The exporter compares the whole
// block, with the bytes between the pieces. Any failure demotes the way for this peer, loudly. A battery that is not
// answered within the budget (`canary_timeout_ms`; a caller-driven importer that is busy) proves nothing: rungs without
// a copy are passed over until the answer comes. The host rung is kept meanwhile, for nothing else is left and it never
// exposes the lent memory. When its canary fails the peer is refused.
#include <loan/exporter.hpp>

#include <base/log.hpp>
#include <base/pid_namespace.hpp>
#include <base/reaper.hpp>

#include <algorithm>
#include <cstring>
#include <new>

namespace gpuloan::loan {
namespace {

[[nodiscard]] Result<void> run_stream(driver::Gpu& gpu, cuda::Stream stream) {
  return GPULOAN_CU(gpu.driver(), cuStreamSynchronize, stream);
}

bool in_arena(Trial trial) noexcept { return trial == Trial::Vmm || trial == Trial::PagesRead || trial == Trial::PagesWrite; }

gpuloan_access access_of(Trial trial) noexcept {
  return trial == Trial::PagesRead || trial == Trial::SegmentRead || trial == Trial::RingRead ? GPULOAN_ACCESS_READ : GPULOAN_ACCESS_WRITE;
}

// E3: the driver says no more than "invalid argument".
std::string likely_cause(const ExporterPeer& peer, Trial trial) {
  const bool by_handle = rung_of(trial) == GPULOAN_RUNG_IPC || rung_of(trial) == GPULOAN_RUNG_POOL;
  if (!by_handle || in_own_pid_namespace(peer.pid)) return "";
  return "; the peer is in another PID namespace, where such handles may not open: start both in one (containers: --pid=host, or "
         "--pid=container:NAME), or lend memory that goes by descriptor (a region of the arena, VMM memory)";
}

std::string about(const ExporterPeer& peer, Trial trial) {
  return std::string("canary of ") + name_of(trial) + " with peer " + std::to_string(peer.pid);
}

} // namespace

bool Canary::out() const noexcept {
  return std::any_of(loans.begin(), loans.end(), [](const auto& loan) { return loan != nullptr; });
}

std::vector<ShapeEnd> Canary::ends() const {
  std::vector<ShapeEnd> ends;
  for (const auto& loan : loans) ends.push_back(loan ? shape_end(loan->ended, loan->outcome) : ShapeEnd::Unproven);
  return ends;
}

bool Canary::ended() const noexcept {
  return std::all_of(loans.begin(), loans.end(), [](const auto& loan) { return !loan || loan->ended; });
}

// Why the first shape that did not come back well did not.
std::pair<gpuloan_status, std::string> Canary::trouble() const {
  for (std::size_t index = 0; index < loans.size(); ++index) {
    if (loans[index] && shape_end(true, loans[index]->outcome) == ShapeEnd::Failed) {
      return {loans[index]->outcome, std::string("shape ") + kCanaryShapes[index].name + ": " + loans[index]->outcome_text};
    }
  }
  for (const auto& loan : loans) {
    if (loan && loan->outcome != GPULOAN_OK) return {loan->outcome, loan->outcome_text};
  }
  return {GPULOAN_ERR_FAILED, ""};
}

gpuloan_canary ExporterPeer::host_canary() const noexcept {
  gpuloan_canary all = GPULOAN_CANARY_NOT_ATTEMPTED;
  for (std::size_t index = 0; index < kTrials; ++index) {
    if (rung_of(static_cast<Trial>(index)) == GPULOAN_RUNG_HOST) all = std::max(all, canaries[index].verdict); // demoted is the greatest
  }
  return all;
}

void Exporter::demote(ExporterPeer& peer, Trial trial, const std::string& why) {
  Canary& canary = peer.canary_of(trial);
  if (canary.verdict == GPULOAN_CANARY_DEMOTED || peer.lost) return;
  canary.verdict = GPULOAN_CANARY_DEMOTED;
  canary.text = why + likely_cause(peer, trial);
  GPULOAN_LOG(GPULOAN_LOG_WARNING, about(peer, trial) + " failed: " + canary.text + ": " +
                                       (rung_of(trial) == GPULOAN_RUNG_HOST ? "the peer is REFUSED, nothing more is lent to it"
                                                                            : "that way is DEMOTED, other rungs carry its loans"));
}

// The battery has ended: what does it prove?
void Exporter::judge_canary(Lock& lock, ExporterPeer& peer, Trial trial) {
  Canary& canary = peer.canary_of(trial);
  if (!canary.out() || closed_) return; // another thread judges it, or nobody needs to know
  const auto ends = canary.ends();
  const auto [status, trouble] = canary.trouble();
  std::uint64_t first_ns = UINT64_MAX;
  for (auto& loan : canary.loans) {
    if (loan) first_ns = std::min(first_ns, loan->step_ns[GPULOAN_STEP_EXPORT]);
    loan.reset();
  }
  CanaryMemory used = std::move(canary.memory);
  canary.memory = {};
  const auto arena = peer.arena;
  gpuloan_canary proven = verdict(ends);
  std::string wrong = proven == GPULOAN_CANARY_DEMOTED ? trouble : "";
  const bool look = !peer.lost && proven == GPULOAN_CANARY_VERIFIED && access_of(trial) == GPULOAN_ACCESS_WRITE;
  lock.unlock();
  if (look) {
    std::vector<std::byte> block(kCanaryBytes);
    if (auto read = move_block(peer, used, block, false); !read) wrong = read.error().text;
    else wrong = compare_blocks(block, canary_block(true));
    if (!wrong.empty()) proven = GPULOAN_CANARY_DEMOTED;
  }
  if (used.region != nullptr) arena->destroy(used.region);
  used = {};
  lock.lock();
  canary.running = canary.waited = false;
  canary.spent = {status, trouble};
  if (proven == GPULOAN_CANARY_DEMOTED) {
    demote(peer, trial, wrong);
  } else if (proven == GPULOAN_CANARY_VERIFIED && !peer.lost && canary.verdict == GPULOAN_CANARY_NOT_ATTEMPTED) {
    canary.verdict = proven;
    GPULOAN_LOG(GPULOAN_LOG_INFO, about(peer, trial) + ": verified, " + std::to_string(kCanaryShapes.size()) + " shapes in " +
                                      std::to_string((now_ns() - first_ns) / 1000) + " us");
  }
  notify();
}

// Answers that came when nobody waited for them any more.
void Exporter::judge_late_canaries(const std::shared_ptr<ExporterPeer>& peer) {
  for (std::size_t index = 0; index < kTrials; ++index) {
    const auto trial = static_cast<Trial>(index);
    const Canary& canary = peer->canary_of(trial);
    if (!canary.out() || !canary.ended() || (!canary.waited && !peer->lost)) continue;
    post([this, peer, trial] {
      Lock inner(mutex_);
      judge_canary(inner, *peer, trial);
    });
  }
}

// A caller that has waited its time in vain is the last one that does, until the peer answers something.
bool Exporter::silent(ExporterPeer& peer) {
  return std::any_of(peer.canaries.begin(), peer.canaries.end(), [](const Canary& canary) {
    return canary.running && canary.waited && canary.verdict == GPULOAN_CANARY_NOT_ATTEMPTED;
  });
}

// Returns once the way is verified, demoted, or unanswered; an error only where the battery could not be sent, or where
// the peer lacked the memory for it.
Result<void> Exporter::prove(const std::shared_ptr<ExporterPeer>& peer, Trial trial, cuda::Pool pool) {
  Lock lock(mutex_);
  const Deadline deadline = Deadline::after_ms(silent(*peer) ? 0 : options_.canary_timeout_ms);
  Canary& canary = peer->canary_of(trial);
  const bool mine = canary.verdict == GPULOAN_CANARY_NOT_ATTEMPTED && !canary.running;
  if (mine) {
    canary.running = true;
    canary.spent = {GPULOAN_OK, ""};
    lock.unlock();
    Result<void> sent;
    try {
      sent = send_canary(peer, trial, pool);
    } catch (const std::bad_alloc&) {
      sent = forward(out_of_memory());
    }
    lock.lock();
    if (!sent) {
      if (canary.out()) canary.waited = true; // judged when what is out has come back
      else canary.running = false;
      canary.spent = {sent.error().status, sent.error().text}; // for those who waited for it
      notify();
      const bool blame = sent.error().status == GPULOAN_ERR_DRIVER || sent.error().status == GPULOAN_ERR_UNSUPPORTED;
      if (!blame || rung_of(trial) == GPULOAN_RUNG_HOST) { // a host rung that fails here is not the peer's fault
        return fail(sent.error().status, "the " + about(*peer, trial) + " could not be done: " + sent.error().text);
      }
      demote(*peer, trial, "it could not be sent: " + sent.error().text);
      return {};
    }
  } else if (canary.running && canary.waited) {
    return {}; // one caller has waited its time for this answer already
  }
  const auto failed = [&] { return verdict(canary.ends()) == GPULOAN_CANARY_DEMOTED; };
  const bool over = wait(lock, deadline, false, [&] {
    return !canary.running || peer->lost || (canary.out() && (canary.ended() || failed()));
  });
  if (canary.out() && canary.ended()) {
    judge_canary(lock, *peer, trial);
  } else if (canary.out() && failed()) { // the rest comes back when it likes
    demote(*peer, trial, canary.trouble().second);
    canary.waited = true;
  } else if (over && canary.running && !peer->lost) { // another thread is judging
    static_cast<void>(wait(lock, deadline, false, [&] { return !canary.running || peer->lost; }));
  }
  if (peer->lost) return fail(GPULOAN_ERR_PEER_LOST, "the peer is gone: " + peer->loss.text);
  if (canary.verdict != GPULOAN_CANARY_NOT_ATTEMPTED) return {};
  if (!canary.running) return fail(canary.spent.first, "the " + about(*peer, trial) + " could not be done: " + canary.spent.second);
  if (!canary.waited) {
    canary.waited = true;
    GPULOAN_LOG(GPULOAN_LOG_WARNING, about(*peer, trial) + " is NOT ATTEMPTED: no answer within " + std::to_string(options_.canary_timeout_ms) + " ms; " +
                                         (rung_of(trial) == GPULOAN_RUNG_HOST ? "the host rung is used unproven until it comes"
                                                                              : "other rungs are used until it comes"));
  }
  return {};
}

Result<void> Exporter::make_canary_memory(ExporterPeer& peer, Trial trial, cuda::Pool pool) {
  const std::lock_guard serial(peer.prepare_mutex);
  if (gpu_) GPULOAN_TRY(prepare_stream(peer.canary_stream));
  CanaryMemory& memory = peer.canary_of(trial).memory;
  if (in_arena(trial)) {
    const gpuloan_memory kind = trial == Trial::Vmm ? GPULOAN_MEMORY_DEVICE : GPULOAN_MEMORY_HOST;
    auto region = peer.arena->create({kCanaryBytes, 0, GPULOAN_ACCESS_WRITE, kind, false});
    if (!region) return forward(std::move(region.error()));
    memory.region = *region;
    memory.pointer = memory.region->host() != nullptr ? reinterpret_cast<std::uint64_t>(memory.region->host()) : memory.region->pointer();
    return {};
  }
  auto buffer = trial == Trial::Pool         ? memory::DeviceBuffer::from_pool(gpu_, kCanaryBytes, pool)
                : trial == Trial::ForeignVmm ? memory::DeviceBuffer::in_two(gpu_, kCanaryBytes, kCanarySeam)
                : trial == Trial::Ipc        ? memory::DeviceBuffer::allocate(gpu_, kCanaryBytes)
                                             : memory::DeviceBuffer::create(gpu_, kCanaryBytes); // VMM memory is freed without waiting (S10)
  if (!buffer) return forward(std::move(buffer.error()));
  auto owned = std::make_shared<memory::DeviceBuffer>(std::move(*buffer));
  memory.buffer = std::shared_ptr<memory::DeviceBuffer>(owned.get(), [owned](memory::DeviceBuffer*) mutable {
    gpuloan::dispose(std::move(owned)); // freeing it waits for the whole context
  });
  memory.pointer = memory.buffer->pointer();
  if (trial == Trial::Ipc) {
    const Lock lock(mutex_);
    if (!peer.memory_released) peer.blocks.push_back(memory.buffer);
  }
  return {};
}

// Between `block` and the canary's memory.
Result<void> Exporter::move_block(ExporterPeer& peer, const CanaryMemory& memory, std::span<std::byte> block, bool in) {
  if (memory.region != nullptr && memory.region->host() != nullptr) {
    if (in) std::memcpy(memory.region->host(), block.data(), block.size());
    else std::memcpy(block.data(), memory.region->host(), block.size());
    return {};
  }
  const cuda::Stream stream = peer.canary_stream.get(); // nothing else is ever in it
  driver::Gpu::Scope scope(*gpu_);
  GPULOAN_TRY(scope.ok());
  if (in) GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuMemcpyHtoDAsync, memory.pointer, block.data(), block.size(), stream));
  else GPULOAN_TRY(GPULOAN_CU(gpu_->driver(), cuMemcpyDtoHAsync, block.data(), memory.pointer, block.size(), stream));
  return run_stream(*gpu_, stream);
}

Result<void> Exporter::lend_canary(const std::shared_ptr<ExporterPeer>& peer, Trial trial) {
  Canary& canary = peer->canary_of(trial);
  const CanaryMemory& memory = canary.memory;
  auto block = canary_block(false);
  GPULOAN_TRY(move_block(*peer, memory, block, true));
  LendOptions options;
  options.access = access_of(trial);
  options.rungs = rung_of(trial);
  const bool by_cpu = memory.region != nullptr && memory.region->host() != nullptr;
  options.stream = by_cpu ? reinterpret_cast<cuda::Stream>(GPULOAN_STREAM_CPU) : peer->canary_stream.get();
  options.memory = trial == Trial::SegmentRead || trial == Trial::SegmentWrite ? GPULOAN_MEMORY_HOST : GPULOAN_MEMORY_DEVICE;
  options.canary = true;
  memory::PointerInfo ours; // what is copied need not be of a kind that can be shared
  ours.kind = memory::PointerKind::Alloc;
  ours.base = memory.pointer;
  ours.bytes = kCanaryBytes;
  if (memory.buffer && rung_of(trial) == GPULOAN_RUNG_HOST) options.known = &ours;
  if (memory.buffer) options.release = [kept = memory.buffer] {}; // the buffer lives until the peer cannot touch it any more
  decltype(canary.loans) loans;
  Result<void> done;
  for (std::size_t index = 0; index < loans.size() && done; ++index) {
    auto loan = lend(peer, memory.pointer + kCanaryShapes[index].offset, kCanaryShapes[index].bytes, options);
    if (loan) loans[index] = std::move(*loan);
    else done = forward(std::move(loan.error()));
  }
  const Lock lock(mutex_);
  for (const auto& loan : loans) {
    if (!done && loan && !loan->ended) fail_loan(*loan, GPULOAN_ERR_CANCELLED, "the rest of the canary could not be sent");
  }
  canary.loans = std::move(loans);
  return done;
}

Result<void> Exporter::send_canary(const std::shared_ptr<ExporterPeer>& peer, Trial trial, cuda::Pool pool) {
  Result<void> done = make_canary_memory(*peer, trial, pool);
  if (done) done = lend_canary(peer, trial);
  Canary& canary = peer->canary_of(trial);
  Lock lock(mutex_);
  if (done || canary.out()) return done;
  CanaryMemory unused = std::move(canary.memory);
  canary.memory = {};
  lock.unlock();
  if (unused.region != nullptr) peer->arena->destroy(unused.region);
  return done;
}

} // namespace gpuloan::loan
