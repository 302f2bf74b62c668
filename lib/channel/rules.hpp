// SPDX-License-Identifier: MIT
//
// What each type of record may carry: its name, how many descriptors (exactly), how long a tail (at most).
#pragma once

#include <channel/records.hpp>

namespace gpuloan::channel {

struct TypeRule {
  Type type;
  const char* name; // as in docs/protocol.md
  std::uint16_t fd_count;
  std::uint16_t tail_max;
};

inline constexpr std::uint32_t kMaxDevices = 64;

// Null for numbers that this version does not know.
[[nodiscard]] const TypeRule* rule_of(std::uint16_t type) noexcept;
// "HELLO"; "unknown" for numbers that this version does not know.
[[nodiscard]] const char* type_name(Type type) noexcept;

} // namespace gpuloan::channel
