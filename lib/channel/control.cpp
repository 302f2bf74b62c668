// SPDX-License-Identifier: MIT
//
// Reads the items of a control buffer. Every descriptor is taken, wanted or not: one that is left in the buffer is open
// and nobody's. A second pidfd counts as a descriptor that no record declared.
#include <channel/control.hpp>

#include <algorithm>

namespace gpuloan::channel {
namespace {

void read_item(const loop::ControlItem& item, Control& out) noexcept {
  loop::for_each_descriptor(item, [&](int fd) {
    if (item.type == loop::kScmPidfd && out.pidfd < 0) {
      out.pidfd = fd;
    } else {
      out.fds[out.fd_count++] = fd;
    }
  });
  if (item.level != SOL_SOCKET || item.type != SCM_CREDENTIALS) return;
  ucred credentials = {};
  if (item.data.size() < sizeof(credentials)) {
    out.well_formed = false;
    return;
  }
  std::memcpy(&credentials, item.data.data(), sizeof(credentials));
  out.credentials = credentials;
}

} // namespace

Control parse_control(std::span<const std::byte> bytes) noexcept {
  Control out;
  const auto looked_at = bytes.first(std::min(bytes.size(), loop::kControlBytes));
  const bool whole = loop::walk_control(looked_at, [&](const loop::ControlItem& item) { read_item(item, out); });
  out.well_formed = out.well_formed && whole && looked_at.size() == bytes.size();
  return out;
}

} // namespace gpuloan::channel
