// SPDX-License-Identifier: MIT
//
// What a new worker costs until its first loan has ended, step by step. There is no floor to compare it with.
#pragma once

#include "run.hpp"

#include <string>
#include <vector>

namespace gpuloan::tool::bench {

struct StartStep {
  const char* name;
  const char* about;
  bool part; // of the total, which is the sum of the parts of each worker
  std::vector<double> us{}; // of each worker
};

struct Startup {
  std::uint64_t bytes = 0;
  std::uint32_t workers = 0;
  std::string canary; // what became of it: "verified", ...
  std::vector<StartStep> steps{};
};

// This process has its CUDA context before, as a program that works on the GPU does.
[[nodiscard]] Startup measure_startup(const BenchOptions& options, Session& session, const Run::Progress& progress);

} // namespace gpuloan::tool::bench
