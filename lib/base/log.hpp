// SPDX-License-Identifier: MIT
//
// The library's log. Silent unless a sink was installed (gpuloan_log_set) or GPULOAN_LOG names a level, in which case
// lines go to stderr. Whoever first decides that something is an error logs it once.
#pragma once

#include <gpuloan/gpuloan.h>

#include <string_view>

namespace gpuloan {

void log_set(gpuloan_log_function function, void* user, gpuloan_log_level level) noexcept;
[[nodiscard]] bool log_enabled(gpuloan_log_level level) noexcept;
void log_line(gpuloan_log_level level, std::string_view text) noexcept;

} // namespace gpuloan

#define GPULOAN_LOG(level, text)                                                                                       \
  do {                                                                                                                 \
    if (::gpuloan::log_enabled(level)) ::gpuloan::log_line(level, text);                                               \
  } while (false)
