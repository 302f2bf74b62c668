// SPDX-License-Identifier: MIT
//
// Driver: one opened libcuda and its table of functions.
#pragma once

#include <base/status.hpp>
#include <driver/types.hpp>

#include <memory>
#include <string>

namespace gpuloan::driver {

using namespace gpuloan::cuda;

// What is lost when one of its optional symbols is missing.
enum class Group : unsigned { Core, Copy, Info, Capture, Vmm, MemOps, IpcEvents, HostRegister, ForeignVmm, IpcMemory, Pools, Count };
[[nodiscard]] const char* group_name(Group group) noexcept;

struct Table {
#define GPULOAN_CUDA(need, since, group, name, exported, params) CuResult(*name) params = nullptr;
#include <driver/symbols.inc>
#undef GPULOAN_CUDA
};

class Driver {
 public:
  // Opens the driver that `choice` names: "real", "sim", a path (has a '/'), or NULL for GPULOAN_DRIVER, else "real".
  // Order for "real": a libcuda already loaded in the process, then libcuda.so.1. "sim" is libgpuloan-sim.so beside this
  // library, then by the loader. cuInit has been called on success. One Driver per library and process; it is never
  // unloaded, since driver threads may still run in it. Errors: NO_DRIVER, STUB_DRIVER, OLD_DRIVER, DRIVER_MISMATCH,
  // NO_DEVICE, DRIVER; the text has path, version and remedy.
  [[nodiscard]] static Result<std::shared_ptr<const Driver>> open(const char* choice);
  // A Driver around a table of the test's own; every symbol counts as present unless it is null.
  [[nodiscard]] static std::shared_ptr<const Driver> wrap(const Table& table);

  Table call;

  [[nodiscard]] bool has(Group group) const noexcept { return (missing_mask_ & (1U << static_cast<unsigned>(group))) == 0; }
  // "cuMemCreate, cuMemMap": the symbols of the group that this driver lacks; "" when complete.
  [[nodiscard]] const std::string& missing(Group group) const noexcept { return missing_[static_cast<unsigned>(group)]; }

  [[nodiscard]] int version() const noexcept { return version_; } // 13000 for 13.0
  [[nodiscard]] bool simulated() const noexcept { return simulated_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] const std::string& found_by() const noexcept { return found_by_; }
  [[nodiscard]] std::string describe() const; // "simulated driver 13.0 at /…/libgpuloan-sim.so"

  // The Error for a failed call: "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory [driver 13.0 at /…]" and what
  // to do. OutOfMemory -> DEVICE_MEMORY, sticky codes (700, 719, 709 …) -> DEVICE_LOST, capture codes -> CAPTURE,
  // anything else -> DRIVER.
  [[nodiscard]] Error error(const char* function, CuResult code) const;
  [[nodiscard]] Result<void> check(const char* function, CuResult code) const {
    if (code == Success) [[likely]] return {};
    return std::unexpected(error(function, code));
  }
  // The answer of a query: true: the work is over; false: it is not, or the driver did not say; the error, where the work ended with its
  // context. Any other code says nothing of the work, so what it uses must not be given back yet.
  [[nodiscard]] Result<bool> over(const char* function, CuResult code) const;

 private:
  friend class Loader;
  std::string missing_[static_cast<unsigned>(Group::Count)];
  std::string path_, found_by_;
  unsigned missing_mask_ = 0;
  int version_ = 0;
  bool simulated_ = false;
};

// False once the process runs its exit handlers or has forked since the driver was opened: destructors then leave the
// driver alone (the kernel gives everything back).
[[nodiscard]] bool calls_allowed() noexcept;

} // namespace gpuloan::driver

// GPULOAN_CU(driver, cuMemCreate, &handle, …) -> Result<void>
#define GPULOAN_CU(driver_, function_, ...) (driver_).check(#function_, (driver_).call.function_(__VA_ARGS__))
