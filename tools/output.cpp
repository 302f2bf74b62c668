// SPDX-License-Identifier: MIT
#include "output.hpp"

#include <algorithm>

namespace gpuloan::tool {
namespace {

std::string fixed(double value, int digits) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%.*f", digits, value);
  return buffer;
}

} // namespace

void Table::print(std::FILE* out, const char* indent) const {
  std::vector<std::size_t> widths;
  for (const auto& cells : rows_) {
    widths.resize(std::max(widths.size(), cells.size()));
    for (std::size_t column = 0; column < cells.size(); ++column) {
      widths[column] = std::max(widths[column], cells[column].size());
    }
  }
  for (const auto& cells : rows_) {
    std::string line = indent;
    for (std::size_t column = 0; column < cells.size(); ++column) {
      const std::string padding(widths[column] - cells[column].size(), ' ');
      if (column > 0) line += "  " + padding;
      line += cells[column];
      if (column == 0) line += padding;
    }
    line.resize(line.find_last_not_of(' ') + 1);
    std::fprintf(out, "%s\n", line.c_str());
  }
}

std::string size_text(std::uint64_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + " B";
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  return fixed(value, 1) + " " + kUnits[unit];
}

std::string size_text_long(std::uint64_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
  return size_text(bytes) + " (" + std::to_string(bytes) + " bytes)";
}

std::string piece_of(std::string_view text, const std::string& name, std::span<const std::string> names) {
  const std::string head = name + ": ", inner = "; " + head;
  const std::size_t found = text.starts_with(head) ? 0 : text.find(inner);
  if (found == std::string_view::npos) return "";
  text.remove_prefix(found == 0 ? 0 : 2 + found);
  for (const std::string& other : names) text = text.substr(0, text.find("; " + other + ": "));
  return std::string(text);
}

std::string microseconds(std::int64_t nanoseconds) { return fixed(static_cast<double>(nanoseconds) / 1000, 1); }

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string uuid_text(const gpuloan_device_info& info) {
  std::string text = std::string_view(info.name).find(" MIG ") == std::string_view::npos ? "GPU-" : "MIG-";
  for (std::size_t index = 0; index < sizeof info.uuid; ++index) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", info.uuid[index]);
    if (index == 4 || index == 6 || index == 8 || index == 10) text += '-';
    text += digits;
  }
  return text;
}

} // namespace gpuloan::tool
