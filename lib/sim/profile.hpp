// SPDX-License-Identifier: MIT
//
// Known bad drivers by name: each profile is what GPULOAN_SIM_* variables would say. A variable that is set wins over the
// profile. docs/environment.md has the list, with where each was seen.
#pragma once

#include <string>
#include <string_view>

namespace gpuloan::sim {

// The value of a variable in the profile; null: the profile does not set it.
[[nodiscard]] const char* profile_setting(std::string_view profile, std::string_view variable) noexcept;
[[nodiscard]] bool is_profile(std::string_view name) noexcept;
[[nodiscard]] std::string profile_names();

} // namespace gpuloan::sim
