// SPDX-License-Identifier: MIT
//
// Small private text files that are kept between runs, in $XDG_CACHE_HOME/gpuloan, else ~/.cache/gpuloan. Losing one costs
// nothing but the work to make it again, so a reader takes whatever is odd about one for a reason not to use it.
#pragma once

#include <base/status.hpp>

#include <optional>

namespace gpuloan {

inline constexpr std::size_t kCacheFileMax = 4096; // bytes

// Where the file `name` is, if it exists. "" where neither variable names a folder.
[[nodiscard]] std::string cache_file_path(const std::string& name);
// What is in it; empty where there is no such file. INVALID for one that is not a regular file of this user's with mode 0600 or less,
// or that is too long; SYSTEM for one that cannot be read.
[[nodiscard]] Result<std::optional<std::string>> read_cache_file(const std::string& path);
// Makes the folders (0700) and puts a new file (0600) in the place of the old one at once: a reader sees one or the other.
[[nodiscard]] Result<void> write_cache_file(const std::string& path, const std::string& text);

} // namespace gpuloan
