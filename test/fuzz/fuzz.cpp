// SPDX-License-Identifier: MIT
#include "fuzz.hpp"

#include <dirent.h>
#include <fcntl.h>

namespace gpuloan::fuzz {

std::size_t open_descriptors() {
  DIR* directory = ::opendir("/proc/self/fd");
  FUZZ_REQUIRE(directory != nullptr);
  std::size_t count = 0;
  while (const dirent* entry = ::readdir(directory)) count += entry->d_name[0] != '.' ? 1U : 0U;
  ::closedir(directory);
  return count;
}

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

DescriptorGuard::~DescriptorGuard() {
  const std::size_t after = open_descriptors();
  if (after == before_) return;
  std::fprintf(stderr, "%zu descriptors are open, %zu were before\n", after, before_);
  FUZZ_FAIL("every descriptor is closed again");
}

} // namespace gpuloan::fuzz
