// SPDX-License-Identifier: MIT
//
// A handle of 64 bytes carries no descriptor. What it carries instead is where a process keeps one: whoever gets the
// handle opens that process's entry under /proc, and takes what it finds only if it is the very file that was meant.
// So a handle ends with the descriptor: when the exporter frees the memory, and when it dies.
#pragma once

#include <sim/fd.hpp>
#include <sim/file_identity.hpp>

#include <cstdint>

namespace gpuloan::sim {

struct NamedFile {
  std::int32_t pid = 0;
  std::int32_t fd = -1;
  FileIdentity file;

  [[nodiscard]] bool is_ours() const noexcept;
  // A descriptor of our own for the file; none when it is not there (any more).
  [[nodiscard]] Fd open() const noexcept;
};

// Names a file that this process has open.
[[nodiscard]] NamedFile name_file(int fd, FileIdentity file) noexcept;

} // namespace gpuloan::sim
