// SPDX-License-Identifier: MIT
//
// Text for people: aligned tables, sizes and times with their units.
#pragma once

#include <gpuloan/gpuloan.h>

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

namespace gpuloan::tool {

// Rows of cells; the first column is flush left, the others flush right.
class Table {
 public:
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  void print(std::FILE* out, const char* indent = "  ") const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

[[nodiscard]] std::string size_text(std::uint64_t bytes);         // "17 B", "1.0 MiB"
[[nodiscard]] std::string size_text_long(std::uint64_t bytes);    // "1.0 MiB (1048577 bytes)"
// Of a text "name: words; name: words", the piece of `name`, which ends where one of `names` begins or with the text; "" for none.
[[nodiscard]] std::string piece_of(std::string_view text, const std::string& name, std::span<const std::string> names);
[[nodiscard]] std::string microseconds(std::int64_t nanoseconds); // "12.3"
[[nodiscard]] std::string version_text(int version);              // "13.0" for 13000
[[nodiscard]] std::string uuid_text(const gpuloan_device_info& info); // "GPU-6770756c-…", of a slice "MIG-…", as the driver's own tools write it

} // namespace gpuloan::tool
