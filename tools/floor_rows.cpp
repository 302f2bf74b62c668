// SPDX-License-Identifier: MIT
#include "floor_rows.hpp"

#include "output.hpp"

#include <vector>

namespace gpuloan::tool {

std::string missing_text(const gpuloan_device_info& device, std::uint32_t floors) {
  std::vector<std::string> names;
  for (const FloorRow& floor : kFloors) names.emplace_back(floor.name);
  std::string text;
  for (const FloorRow& floor : kFloors) {
    if ((floors & ~device.floors & floor.bit) == 0) continue;
    const std::string piece = piece_of(device.floor_reason, floor.name, names);
    text += (text.empty() ? "" : "; ") + (piece.empty() ? floor.name + std::string(": missing") : piece); // the text has an end
  }
  return text;
}

} // namespace gpuloan::tool
