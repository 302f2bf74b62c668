// SPDX-License-Identifier: MIT
//
// Included before everything else in the three sources that know the protocol's version, for builds of the library that
// speak other ones: OTHER_MIN to OTHER_MAX.
#pragma once

#include <channel/records.hpp>

namespace gpuloan::channel {
inline constexpr std::uint16_t kOtherMin = OTHER_MIN, kOtherMax = OTHER_MAX;
} // namespace gpuloan::channel

#define kVersionMin kOtherMin
#define kVersionMax kOtherMax
