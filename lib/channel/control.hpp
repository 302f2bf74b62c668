// SPDX-License-Identifier: MIT
//
// What a control buffer says: descriptors, the sender's credentials, its pidfd.
#pragma once

#include <loop/cmsg.hpp>
#include <loop/engine.hpp>

#include <array>
#include <optional>

namespace gpuloan::channel {

// Plain numbers: nothing is owned, so any bytes can be parsed (a fuzzer does). The caller takes ownership of every
// descriptor in it.
struct Control {
  static constexpr std::size_t kRoom = loop::kControlBytes / sizeof(int); // a control buffer cannot hold more
  std::array<int, kRoom> fds = {};
  std::size_t fd_count = 0;
  int pidfd = -1;
  std::optional<ucred> credentials;
  bool well_formed = true;
};

// `bytes` beyond what an engine gives room for are not looked at. Several SCM_RIGHTS headers add up.
[[nodiscard]] Control parse_control(std::span<const std::byte> bytes) noexcept;

} // namespace gpuloan::channel
