// SPDX-License-Identifier: MIT
//
// Making and importing memfds. The order in the destructor matters: bytes first, then the account that promised them.
#include <sim/chunk.hpp>

#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace gpuloan::sim {
namespace {

// Sealed against resizing: whoever is handed the descriptor could otherwise make its other holders fault.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

CuResult out_of_resources() noexcept { return errno == ENOMEM ? OutOfMemory : OperatingSystem; }

std::size_t whole_pages(std::size_t size) noexcept {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (size + page - 1) / page * page;
}

} // namespace

std::byte* Chunk::map(int fd, std::size_t size) noexcept {
  void* address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (address == MAP_FAILED) return nullptr;
  ::madvise(address, size, MADV_DONTDUMP);
  return static_cast<std::byte*>(address);
}

CuResult Chunk::create(int physical, std::size_t size, bool shareable, std::shared_ptr<Chunk>& out) {
  const std::size_t file_size = whole_pages(size);
  Fd fd(::memfd_create("gpuloan-sim", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(file_size)) != 0 || ::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return out_of_resources();
  }
  FileIdentity identity;
  std::size_t seen = 0;
  if (!identify(fd.get(), identity, seen)) return OperatingSystem;
  Account account;
  if (const CuResult result = account_create(static_cast<std::uint32_t>(physical), size, identity, account))
    return result;
  std::byte* data = map(fd.get(), file_size);
  if (data == nullptr) {
    account_close(account);
    return OutOfMemory;
  }
  out.reset(new Chunk(data, file_size, account, identity, shareable ? std::move(fd) : Fd()));
  return Success;
}

CuResult Chunk::import(int fd, std::shared_ptr<Chunk>& out) {
  FileIdentity identity;
  std::size_t size = 0;
  if (!identify(fd, identity, size) || size == 0) return Unknown;
  Account account;
  if (const CuResult result = account_open(identity, size, account)) return result;
  std::byte* data = map(fd, size);
  if (data == nullptr) {
    account_close(account);
    return OutOfMemory;
  }
  out.reset(new Chunk(data, size, account, identity, Fd()));
  return Success;
}

Chunk::~Chunk() {
  ::munmap(data_, size_);
  account_close(account_);
}

} // namespace gpuloan::sim
