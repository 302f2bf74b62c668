// SPDX-License-Identifier: MIT
//
// close() is never retried: on Linux the number is free again even when it reports EINTR.
#include <base/unique_fd.hpp>

#include <cerrno>
#include <fcntl.h>
#include <unistd.h>

namespace gpuloan {

void UniqueFd::reset(int fd) noexcept {
  if (fd_ >= 0) {
    const int saved = errno;
    ::close(fd_);
    errno = saved;
  }
  fd_ = fd;
}

Result<UniqueFd> UniqueFd::dup(int fd) {
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (copy < 0) return fail_errno("fcntl(F_DUPFD_CLOEXEC)", errno);
  return UniqueFd(copy);
}

} // namespace gpuloan
