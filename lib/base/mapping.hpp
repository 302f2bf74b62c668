// SPDX-License-Identifier: MIT
//
// Mapping owns one mmap()ed range of host memory; memfd helpers make the files behind shared ones.
#pragma once

#include <base/unique_fd.hpp>

#include <cstddef>
#include <span>

namespace gpuloan {

class Mapping {
 public:
  Mapping() noexcept = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping() { reset(); }

  // Maps `size` bytes of `fd` from offset 0, shared; read-write unless told otherwise. `size` must not be 0.
  [[nodiscard]] static Result<Mapping> map_shared(int fd, std::size_t size, bool writable = true);

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data_, size_}; }
  [[nodiscard]] explicit operator bool() const noexcept { return data_ != nullptr; }
  void reset() noexcept;

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// A memfd of `size` zero bytes that allows sealing, close-on-exec. It has no name that anyone could find.
[[nodiscard]] Result<UniqueFd> create_memfd(const char* label, std::size_t size);

// Seals that the owner of shared pages sets once both sides mapped them: SHRINK, GROW, FUTURE_WRITE, SEAL.
// Without FUTURE_WRITE a peer could punch a hole, and a CPU store would land on a page that the GPU does not poll
// (measured: S14).
[[nodiscard]] Result<void> seal_shared(int fd);
// Ok when `fd` is exactly `size` bytes long and carries those seals.
[[nodiscard]] Result<void> check_sealed(int fd, std::size_t size);

} // namespace gpuloan
