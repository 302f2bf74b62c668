// SPDX-License-Identifier: MIT
//
// Asked before the first call of an optional group, whose functions may be null. For lib/driver only.
#pragma once

#include <driver/driver.hpp>

namespace gpuloan::driver {

// UNSUPPORTED, naming what is missing.
[[nodiscard]] inline Result<void> require(const Driver& driver, Group group) {
  if (driver.has(group)) [[likely]] return {};
  return fail(GPULOAN_ERR_UNSUPPORTED, std::string("no ") + group_name(group) + ": " + driver.describe() + " lacks " +
                                           driver.missing(group));
}

} // namespace gpuloan::driver
