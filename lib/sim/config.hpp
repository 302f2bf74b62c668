// SPDX-License-Identifier: MIT
//
// The environment variables of the simulated driver, read once per process at its first driver call (README.md lists
// them). A value that cannot be understood is never ignored: it is reported on stderr and cuInit fails.
#pragma once

#include <sim/rows.hpp>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gpuloan::sim {

inline constexpr int kMaxDevices = 8;

struct FaultRule {
  Row row = Row::Count;
  std::uint64_t first = 0;
  bool onwards = false; // every call from the first on, not that one alone
  CuResult code = Success;
};

// What becomes of a process that imports too large an allocation of a pool (fact P3).
enum class TooLarge { Dies, Fails, Hangs, Wavers };

struct Config {
  std::string state_path;
  int devices = 1; // slices, where the GPUs are divided
  int slices = 0;  // of each GPU; 0: not in MIG mode
  std::uint64_t memory_bytes = std::uint64_t{143360} << 20;
  std::uint64_t lag_ns = 200'000;
  std::uint64_t import_limit = std::uint64_t{5248} << 20; // of one pool allocation; 0: none
  TooLarge too_large = TooLarge::Dies;
  int version = 13000;
  int mps = 0;
  int compute_mode = ModeDefault;
  std::array<unsigned, kMaxDevices> peers{}; // bit m of the n-th: device n reaches memory of device m; physical ordinals
  std::uint64_t pin_limit = UINT64_MAX; // bytes of host memory that the process may register, all in all
  std::optional<CuResult> init_result;
  unsigned without = 0; // one bit per Group
  bool integrated = false, legacy_opens_once = false, pool_imports_die = false, strands_exports = false, calls_stand = false;
  std::vector<int> unknown_attributes; // a question about one is CUDA_ERROR_INVALID_VALUE
  std::vector<Row> hidden; // what cuGetProcAddress denies
  std::vector<FaultRule> faults;
  std::vector<int> visible; // physical ordinals in the order that CUDA_VISIBLE_DEVICES gives them
  bool valid = true;

  [[nodiscard]] bool reaches(int from, int to) const noexcept { return from == to || (peers[static_cast<std::size_t>(from)] >> to & 1U) != 0; }
  [[nodiscard]] bool has(Group group) const noexcept { return (without & (1U << static_cast<unsigned>(group))) == 0; }
};

[[nodiscard]] const Config& config();

// Writes "gpuloan-sim: <text>" to stderr: the only output that this library ever makes.
void complain(const std::string& text) noexcept;

} // namespace gpuloan::sim
