// SPDX-License-Identifier: MIT
//
// The control buffer as the kernel's headers describe it, read a second time and in another way than the library does: by
// offsets. It says which numbers are descriptors, so that a fuzzer can put real ones there.
#pragma once

#include "fuzz.hpp"

#include <sys/socket.h>
#include <vector>

namespace gpuloan::fuzz {

struct ControlModel {
  struct Item {
    int level = 0, type = 0;
    std::size_t at = 0, bytes = 0; // the data
  };
  std::vector<Item> items;
  std::vector<std::size_t> descriptors; // offsets of numbers that the kernel would have put a descriptor in
  bool whole = true;                    // nothing is left over that is no item
};

inline ControlModel model_of(std::span<const std::byte> control) {
  constexpr std::size_t kHead = 16; // size_t length, int level, int type
  ControlModel model;
  std::size_t at = 0;
  while (control.size() - at >= kHead) {
    std::size_t length = 0;
    ControlModel::Item item;
    std::memcpy(&length, control.data() + at, sizeof length);
    std::memcpy(&item.level, control.data() + at + 8, sizeof item.level);
    std::memcpy(&item.type, control.data() + at + 12, sizeof item.type);
    if (length < kHead || length > control.size() - at) {
      model.whole = false;
      return model;
    }
    item.at = at + kHead;
    item.bytes = length - kHead;
    model.items.push_back(item);
    if (item.level == SOL_SOCKET && (item.type == SCM_RIGHTS || item.type == 4)) { // 4: SCM_PIDFD
      for (std::size_t i = 0; i < item.bytes / 4; ++i) model.descriptors.push_back(item.at + i * 4);
    }
    at += (length + 7) / 8 * 8;
    if (at >= control.size()) return model; // the last item may lack its padding
  }
  model.whole = at == control.size();
  return model;
}

} // namespace gpuloan::fuzz
