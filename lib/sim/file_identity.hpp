// SPDX-License-Identifier: MIT
//
// Which file a descriptor is of. No two files that are open anywhere on the machine have the same identity.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpuloan::sim {

struct FileIdentity {
  std::uint64_t dev = 0;
  std::uint64_t ino = 0;
  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

// False for what is no regular file.
[[nodiscard]] bool identify(int fd, FileIdentity& out_identity, std::size_t& out_size) noexcept;

} // namespace gpuloan::sim
