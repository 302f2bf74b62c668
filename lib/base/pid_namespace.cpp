// SPDX-License-Identifier: MIT
#include <base/pid_namespace.hpp>

#include <cstdio>
#include <sys/stat.h>

namespace gpuloan {

bool in_own_pid_namespace(pid_t pid) noexcept {
  if (pid == 0) return false;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/ns/pid", static_cast<int>(pid));
  struct stat own = {}, other = {};
  if (::stat("/proc/self/ns/pid", &own) != 0 || ::stat(path, &other) != 0) return true;
  return own.st_dev == other.st_dev && own.st_ino == other.st_ino;
}

} // namespace gpuloan
