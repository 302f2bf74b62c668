// SPDX-License-Identifier: MIT
//
// gpuloan probe --import-limit: how large one allocation of a memory pool may be for another process to import it. A larger
// one kills the importer (fact P3), so each size is tried by a process of its own, which may die. This process makes the
// allocation, in a pool of its own whose descriptor is closed before the pool is destroyed: else the device does not get
// the memory back (P8).
//
// The sizes double until one is too large, then the gap is halved down to 2 MiB. What is found has to be survived twice more; where it is
// not, the next smaller size is sought the same way, since just above the limit an import may go well by chance. Where 2 MiB are not survived
// three times the result is 0: the rung has to be refused, whatever was measured before. Nothing else is taken off: the limit was seen to be a
// fixed size, the same on two devices and with two drivers, and an allocation below it is as safe as a small one.
#pragma once

#include "session.hpp"

#include <optional>

namespace gpuloan::tool {

struct ImportLimitFound {
  std::int32_t device = 0;
  std::uint64_t bytes = 0; // the largest that was survived; 0: nothing can be imported
  std::string none; // then why
  bool reached_upper = false; // no limit was met
  std::uint64_t lower = 0, upper = 0; // of the search
  unsigned steps = 0;
  std::uint64_t missing = 0; // bytes of device memory that did not come back
};

// Writes a line on stderr for each step. Throws Failure: without pools, without room, and at the end of --timeout.
[[nodiscard]] ImportLimitFound find_import_limit(const CommonOptions& common, std::uint32_t step_timeout_ms);

} // namespace gpuloan::tool
