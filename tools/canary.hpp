// SPDX-License-Identifier: MIT
//
// The inside of `gpuloan canary`: options, what is tried, and the run with its worker.
//
// For each kind of memory one block is lent in four shapes. A shape is two loans: one for read, whose bytes the worker
// compares, and one for write, which it fills; then the whole block is read back and compared, byte for byte, with what
// lies around the shape. What the worker has to do stands in the loan's metadata (canary_serve.cpp).
#pragma once

#include "canary_memory.hpp"
#include "child.hpp"
#include "session.hpp"

#include <array>
#include <memory>

namespace gpuloan::tool {

struct CanaryOptions {
  CommonOptions common;
  LoanOptions loans;
  bool pool = false;   // --experimental-pool
  std::string worker;  // a command for the shell; empty: this program
  bool serve = false;  // be the worker
  int fd = Child::kInheritedFd;
};

struct CanaryShape {
  const char* name;
  std::uint64_t offset, bytes;
};
inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20U;
inline constexpr std::array<CanaryShape, 4> kShapes = {{
    {"contiguous", 0, 65536},
    {"view", 65536 + 4096 + 256, 65536},
    {"odd", 139264, 69645},
    {"large", 212992, 2 * kMiB + 65536}, // spans the seam of CanaryMemory
}};
inline constexpr std::uint64_t kBlockBytes = 212992 + 2 * kMiB + 65536 + 4096;

struct CanaryKind {
  const char* name;
  const char* memory; // that is lent
  gpuloan_rung rung;
  std::uint32_t floors; // of the device, that it needs
  bool arena;
  CanaryMemory::Kind made;
};
inline constexpr std::array<CanaryKind, 5> kKinds = {{
    {"vmm", "a region of the arena", GPULOAN_RUNG_VMM, GPULOAN_FLOOR_VMM, true, {}},
    {"vmm-foreign", "VMM memory of two allocations", GPULOAN_RUNG_VMM, std::uint32_t{GPULOAN_FLOOR_VMM} | std::uint32_t{GPULOAN_FLOOR_FOREIGN_VMM}, false, CanaryMemory::Kind::TwoChunks},
    {"pool", "memory of a shareable pool", GPULOAN_RUNG_POOL, GPULOAN_FLOOR_POOLS, false, CanaryMemory::Kind::Pool},
    {"ipc", "cuMemAlloc memory", GPULOAN_RUNG_IPC, GPULOAN_FLOOR_IPC_MEMORY, false, CanaryMemory::Kind::Alloc},
    {"host", "cuMemAlloc memory, copied", GPULOAN_RUNG_HOST, 0, false, CanaryMemory::Kind::Alloc},
}};

enum class Verdict { Verified, NotAttempted, Demoted, Failed };
[[nodiscard]] const char* verdict_name(const CanaryKind& kind, Verdict verdict) noexcept;

struct CanaryResult {
  const CanaryKind* kind = nullptr;
  const CanaryShape* shape = nullptr;
  Verdict verdict = Verdict::NotAttempted;
  int code = ExitOk; // not ok: the exit code
  std::string reason;
  double us = 0; // EXPORT to RELEASE, both loans together
  std::uint64_t copied_bytes = 0;
};

class CanaryRun {
 public:
  using Show = std::function<void(const CanaryResult&)>;
  CanaryRun(const CanaryOptions& options, std::uint32_t rungs, Session& session, Show show);
  void run();
  void finish(); // after run(): the worker has to end well
  [[nodiscard]] const std::vector<CanaryResult>& results() const { return results_; }
  [[nodiscard]] gpuloan_peer_info peer_info() const { return peer_.info(); }
  [[nodiscard]] int code() const; // of the first shape that is not ok

 private:
  void start();
  void welcome();
  [[nodiscard]] std::string refusal(const Event& event);
  void try_kind(const CanaryKind& kind);
  void try_shape(const CanaryKind& kind, std::uint64_t pointer, CanaryResult& result);
  void lend(const CanaryKind& kind, std::uint64_t pointer, gpuloan_access access, std::uint32_t seed,
            CanaryResult& result);
  [[nodiscard]] std::string skip_reason(const CanaryKind& kind) const;
  void judge(const StatusError& error, CanaryResult& result) const;

  const CanaryOptions& options_;
  const std::uint32_t rungs_;
  Session& session_;
  Show show_;
  Deadline deadline_;
  Cuda cuda_;
  std::vector<std::unique_ptr<CanaryMemory>> kept_; // destroyed once the worker is gone
  Child child_;
  Peer peer_;
  std::vector<std::byte> block_;
  std::vector<CanaryResult> results_;
};

// The byte at `offset` of a loan whose seed is `seed`; gpuloan(1) has it too, for workers of another make.
[[nodiscard]] constexpr std::byte canary_byte(std::uint32_t seed, std::uint64_t offset) noexcept {
  return static_cast<std::byte>(seed + 167 * offset + 13 * (offset >> 8U) + 101 * (offset >> 16U));
}

int canary_serve(const CanaryOptions& options);

} // namespace gpuloan::tool
