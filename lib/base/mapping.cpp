// SPDX-License-Identifier: MIT
#include <base/mapping.hpp>

#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace gpuloan {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

} // namespace

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    reset();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

void Mapping::reset() noexcept {
  if (data_ != nullptr) ::munmap(data_, size_);
  data_ = nullptr;
  size_ = 0;
}

Result<Mapping> Mapping::map_shared(int fd, std::size_t size, bool writable) {
  void* address = ::mmap(nullptr, size, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return fail_errno("mmap", errno);
  Mapping mapping;
  mapping.data_ = static_cast<std::byte*>(address);
  mapping.size_ = size;
  return mapping;
}

Result<UniqueFd> create_memfd(const char* label, std::size_t size) {
  UniqueFd fd = UniqueFd::take(::memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fail_errno("memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0) return fail_errno("ftruncate(memfd)", errno);
  return fd;
}

Result<void> seal_shared(int fd) {
  if (::fcntl(fd, F_ADD_SEALS, kSeals) != 0) return fail_errno("fcntl(F_ADD_SEALS)", errno);
  return {};
}

Result<void> check_sealed(int fd, std::size_t size) {
  struct stat info = {};
  if (::fstat(fd, &info) != 0) return fail_errno("fstat", errno);
  if (info.st_size < 0 || static_cast<std::size_t>(info.st_size) != size) {
    return fail(GPULOAN_ERR_PROTOCOL, "shared pages have " + std::to_string(info.st_size) + " bytes where the record says " +
                                          std::to_string(size));
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) return fail_errno(GPULOAN_ERR_PROTOCOL, "fcntl(F_GET_SEALS): the shared pages are no memfd", errno);
  if ((seals & kSeals) != kSeals) return fail(GPULOAN_ERR_PROTOCOL, "shared pages are not sealed as agreed");
  return {};
}

} // namespace gpuloan
