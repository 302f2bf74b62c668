// SPDX-License-Identifier: MIT
//
// A driver table for tests of lib/driver: it writes every call down, keeps account of what is alive, and can fail any
// one call. It has one device with ordinal 0 and the device number 40, so that mixing the two up shows. One recorder
// per process; the contexts and the capture mode of threads are not told apart.
#pragma once

#include <driver/driver.hpp>

#include <map>
#include <string>
#include <vector>

namespace recorder {

inline constexpr int kDevice = 40;
inline constexpr std::size_t kGranularity = 2u << 20;

struct State {
  std::vector<std::string> calls;      // base names, in order
  std::map<std::string, int> fail;     // a name -> what it returns
  std::size_t fail_at = 0;             // the n-th call from now (1, 2, …) fails with fail_code; 0: none
  int fail_code = 999;
  std::map<std::string, int> alive;    // kind -> how many; 0 entries are taken out
  std::vector<gpuloan::cuda::Context> contexts; // the thread's stack; the last is current
  int capture_mode = gpuloan::cuda::CaptureGlobal;
  std::map<int, int> attributes;       // absent: the query fails
  std::vector<int> modes_seen;         // the capture mode at each call
  int device_count = 1;
  bool close_on_export = false;        // the descriptor given out is below 3
  std::size_t asked_bytes = 0;
  int asked_access = 0;
  unsigned asked_flags = 0;
  int asked_location = -1;

  // "cuMemCreate cuMemRelease …": the calls without those of Gpu::Scope.
  [[nodiscard]] std::string work() const;
  [[nodiscard]] std::string all() const;
  [[nodiscard]] std::size_t count(const std::string& name) const;
};

[[nodiscard]] State& state();
// A fresh state with every attribute that a floor needs, and the table that goes with it.
[[nodiscard]] gpuloan::driver::Table fresh_table();

} // namespace recorder
