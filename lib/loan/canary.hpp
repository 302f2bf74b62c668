// SPDX-License-Identifier: MIT
//
// What the two ends of a canary loan agree on.
#pragma once

#include <cstddef>
#include <vector>

namespace gpuloan::loan {

inline constexpr std::size_t kCanaryBytes = 65536 + 4096 + 13; // an odd size, more than one page

// What the exporter writes; what the importer answers with.
[[nodiscard]] std::vector<std::byte> canary_pattern(bool answered);

} // namespace gpuloan::loan
