// SPDX-License-Identifier: MIT
//
// A forked child inherits handles that belong to its parent: it may neither use nor free them. An object remembers the
// process generation it was made in; fork_generation() differs in every child.
#pragma once

#include <cstdint>

namespace gpuloan {

[[nodiscard]] std::uint32_t fork_generation() noexcept;

} // namespace gpuloan
