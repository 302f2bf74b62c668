// SPDX-License-Identifier: MIT
//
// Opening in two steps. The first, O_PATH, has no effect on whatever lies there, which may be anything when the handle
// is nonsense or its process has put the number to other use; only the file that was meant is really opened.
#include <sim/named_file.hpp>

#include <cstdio>
#include <fcntl.h>
#include <unistd.h>

namespace gpuloan::sim {

NamedFile name_file(int fd, FileIdentity file) noexcept { return {::getpid(), fd, file}; }

bool NamedFile::is_ours() const noexcept { return pid == ::getpid(); }

Fd NamedFile::open() const noexcept {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
  const Fd found(::open(path, O_PATH | O_CLOEXEC));
  FileIdentity seen;
  std::size_t size = 0;
  if (!found || !identify(found.get(), seen, size) || seen != file) return Fd();
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", found.get());
  return Fd(::open(path, O_RDWR | O_CLOEXEC));
}

} // namespace gpuloan::sim
