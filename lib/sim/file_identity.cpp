// SPDX-License-Identifier: MIT
#include <sim/file_identity.hpp>

#include <sys/stat.h>

namespace gpuloan::sim {

bool identify(int fd, FileIdentity& out_identity, std::size_t& out_size) noexcept {
  struct stat info = {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return false;
  out_identity = {info.st_dev, info.st_ino};
  out_size = static_cast<std::size_t>(info.st_size);
  return true;
}

} // namespace gpuloan::sim
