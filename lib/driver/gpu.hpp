// SPDX-License-Identifier: MIT
//
// Gpu: one device of a Driver and the CUDA context that gpuloan works in.
//
// The context is the caller's current one if it has one when the Gpu is made, else the device's primary context, which
// is retained at the first use and not before: a process that never borrows makes no context.
#pragma once

#include <driver/driver.hpp>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace gpuloan::driver {

// Another device that this process sees.
struct Neighbour {
  int ordinal = 0;
  Uuid uuid = {};
  bool reachable = false; // peer access: the device can map its memory
};

// What one device can do, probed on it. Fields as in gpuloan_device_info.
struct Floors {
  std::uint32_t bits = 0;    // gpuloan_floor
  std::uint32_t missing = 0; // gpuloan_floor
  std::string reason;        // per missing floor: what is lost and why, one sentence each, separated by "; "
  std::size_t granularity = 0;
  std::size_t total_bytes = 0;
  int compute_mode = 0;
  int integrated = 0;
  bool mps = false; // processes share one server process: a dead one's work cannot be told from the others' (S2)
  Uuid uuid = {};
  std::string name;
  std::vector<Neighbour> neighbours;
  [[nodiscard]] std::string uuid_text() const; // "GPU-67...", "MIG-..." of a slice, as CUDA_VISIBLE_DEVICES takes it
  [[nodiscard]] bool has(gpuloan_floor floor) const noexcept { return (bits & static_cast<std::uint32_t>(floor)) != 0; }
};
// By attribute and symbol; makes no CUDA context. A failing attribute query counts as 0 (K2).
[[nodiscard]] Result<Floors> probe_floors(const Driver& driver, int ordinal);

class Gpu {
 public:
  // Current context of the calling thread, else `ordinal`; with `exactly` that one's current context, if it is of this
  // device. NO_DEVICE names how many there are.
  [[nodiscard]] static Result<std::shared_ptr<Gpu>> open(std::shared_ptr<const Driver> driver, int ordinal, bool exactly = false);
  // In the device's primary context, whatever is current.
  [[nodiscard]] static Result<std::shared_ptr<Gpu>> open_primary(std::shared_ptr<const Driver> driver, int ordinal);
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu(); // releases the primary context if it was retained

  [[nodiscard]] const Driver& driver() const noexcept { return *driver_; }
  [[nodiscard]] const Floors& floors() const noexcept { return floors_; }
  [[nodiscard]] Device device() const noexcept { return device_; }
  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
  [[nodiscard]] bool context_made() const noexcept;
  // Why host memory could not be registered the last time that it was tried; "" if it always could.
  [[nodiscard]] std::string pin_refusal() const;
  void pin_refused(const std::string& why); // the first one is said in the log

  // Makes the context current and the thread's capture mode relaxed for the scope's life, so that the library's own
  // calls never invalidate a caller's graph capture; both are put back. Check ok() first: the primary context may fail.
  // Scopes of a thread end in the reverse order; one within another of the same Gpu costs nothing.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(Gpu& gpu);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();
    [[nodiscard]] const Result<void>& ok() const noexcept { return ok_; }
    // As Driver::over(): where !ok(), what that says of the context's work.
    [[nodiscard]] Result<bool> over() const;

   private:
    static thread_local const Gpu* innermost_; // of this thread's scopes that are ok
    Gpu& gpu_;
    const Gpu* outer_ = nullptr;
    Result<void> ok_;
    CuResult code_ = Deinitialized; // of the call that failed; this one where none was made
    int mode_ = CaptureRelaxed;
    bool pushed_ = false, mode_set_ = false, entered_ = false;
  };

 private:
  Gpu() = default;
  [[nodiscard]] static Result<std::shared_ptr<Gpu>> make(std::shared_ptr<const Driver> driver, int ordinal, Context context);
  [[nodiscard]] Result<Context> context();
  std::shared_ptr<const Driver> driver_;
  Floors floors_;
  Device device_ = 0;
  int ordinal_ = 0;
  mutable std::mutex mutex_;
  std::atomic<Context> context_{nullptr};
  bool retained_ = false;
  std::string pin_refusal_;
};

} // namespace gpuloan::driver
