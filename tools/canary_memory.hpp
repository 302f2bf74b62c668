// SPDX-License-Identifier: MIT
//
// Memory of each rung's own kind for `gpuloan canary`, made by the driver's own calls as an application would make it.
#pragma once

#include "cuda.hpp"

#include <functional>
#include <vector>

namespace gpuloan::tool {

class CanaryMemory {
 public:
  enum class Kind {
    TwoChunks, // VMM memory of two allocations, with the seam kSeam bytes behind pointer()
    Pool,      // of a pool with POSIX FD handles
    Alloc,     // by cuMemAlloc
  };
  static constexpr std::uint64_t kSeam = std::uint64_t{2} << 20U;

  // The context that `cuda` keeps current is used; `granularity` is the device's. Throws Failure that names the call.
  CanaryMemory(Cuda& cuda, const gpuloan_driver_info& driver, int ordinal, Kind kind, std::uint64_t bytes,
               std::uint64_t granularity);
  ~CanaryMemory(); // of memory that nobody has any more
  CanaryMemory(const CanaryMemory&) = delete;
  CanaryMemory& operator=(const CanaryMemory&) = delete;
  [[nodiscard]] std::uint64_t pointer() const noexcept { return pointer_; }

 private:
  void make_two_chunks(const char* path, int ordinal, std::uint64_t bytes, std::uint64_t granularity);
  void make_pool(const char* path, int ordinal, std::uint64_t bytes);
  void make_alloc(const char* path, std::uint64_t bytes);
  Cuda& cuda_;
  std::uint64_t pointer_ = 0;
  std::vector<std::function<void()>> undo_; // in the order of making
};

} // namespace gpuloan::tool
