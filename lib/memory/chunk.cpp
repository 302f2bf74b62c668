// SPDX-License-Identifier: MIT
//
// Making chunks. Every step is owned as soon as it succeeded, so an error on the way takes back what was done.
//
// The memfd of a host chunk is sealed against shrinking and growing before it leaves the process: a peer that truncated it
// would turn our next access into SIGBUS. It stays writable and punchable; the peer is trusted with its bytes.
#include <memory/chunk.hpp>

#include <base/mapping.hpp>
#include <base/reaper.hpp>

#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <utility>

namespace gpuloan::memory {

// Reserves enough addresses to hold an aligned range, puts the file over that range and gives the rest back.
Result<HostPages> HostPages::map(int fd, std::size_t bytes) {
  if (bytes > SIZE_MAX - kAlignment) return fail_errno("mmap", ENOMEM);
  const std::size_t reserved = bytes + kAlignment;
  void* range = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return fail_errno("mmap(reserve)", errno);
  std::byte* const start = static_cast<std::byte*>(range);
  const std::size_t before = (kAlignment - reinterpret_cast<std::uintptr_t>(start) % kAlignment) % kAlignment;
  void* pages = ::mmap(start + before, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (pages == MAP_FAILED) {
    const int code = errno;
    ::munmap(range, reserved);
    return fail_errno("mmap", code);
  }
  if (before != 0) ::munmap(range, before);
  ::munmap(start + before + bytes, kAlignment - before);
  HostPages result;
  result.data_ = static_cast<std::byte*>(pages);
  result.size_ = bytes;
  return result;
}

HostPages::HostPages(HostPages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

HostPages& HostPages::operator=(HostPages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

HostPages::~HostPages() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

Result<Chunk> Chunk::create_device(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes) {
  Chunk chunk(GPULOAN_MEMORY_DEVICE, bytes);
  if (!gpu->floors().has(GPULOAN_FLOOR_VMM)) {
    auto plain = DeviceBuffer::create(std::move(gpu), bytes);
    if (!plain) return forward(std::move(plain.error()));
    chunk.plain_ = std::make_shared<DeviceBuffer>(std::move(*plain));
    return chunk;
  }
  auto handle = driver::VmmHandle::create(gpu, bytes);
  if (!handle) return forward(std::move(handle.error()));
  chunk.handle_ = std::move(*handle);
  auto fd = chunk.handle_.export_fd();
  if (!fd) return forward(std::move(fd.error()));
  chunk.fd_ = std::move(*fd);
  auto mapping = driver::VmmMapping::map(std::move(gpu), chunk.handle_, driver::AccessReadWrite);
  if (!mapping) return forward(std::move(mapping.error()));
  chunk.mapping_ = std::move(*mapping);
  return chunk;
}

Result<Chunk> Chunk::create_host(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes) {
  Chunk chunk(GPULOAN_MEMORY_HOST, bytes);
  if (bytes > INT64_MAX) return fail_errno("memfd_create", ENOMEM);
  auto fd = create_memfd("gpuloan-segment", bytes);
  if (!fd) return forward(std::move(fd.error()));
  chunk.fd_ = std::move(*fd);
  if (::fcntl(chunk.fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return fail_errno("fcntl(F_ADD_SEALS)", errno);
  }
  auto pages = HostPages::map(chunk.fd(), bytes);
  if (!pages) return forward(std::move(pages.error()));
  chunk.pages_ = std::move(*pages);
  if (gpu != nullptr) chunk.registration_ = driver::HostRegistration::try_create(std::move(gpu), chunk.pages_.bytes());
  return chunk;
}

std::uint64_t Chunk::pointer() const noexcept {
  if (plain_) return plain_->pointer();
  return memory_ == GPULOAN_MEMORY_DEVICE ? mapping_.pointer() : registration_.device_pointer();
}

Chunk::~Chunk() {
  dispose(std::move(plain_)); // cuMemFree blocks behind pending waits too (S10)
  if (!registration_) return;
  struct Registered {
    HostPages pages;
    driver::HostRegistration registration;
  };
  try {
    auto registered = std::make_shared<Registered>();
    registered->pages = std::move(pages_);
    registered->registration = std::move(registration_);
    dispose(std::move(registered));
  } catch (...) { // no memory to do it elsewhere: the members' own destructors do it here
  }
}

Result<void> Chunk::reopen_fd() {
  if (fd_ || !handle_) return {};
  auto fd = handle_.export_fd();
  if (!fd) return forward(std::move(fd.error()));
  fd_ = std::move(*fd);
  return {};
}

} // namespace gpuloan::memory
