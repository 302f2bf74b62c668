// SPDX-License-Identifier: MIT
//
// Moves bytes between files and the memory of a loan, in pieces, so that a file may be larger than host memory. A
// Memory is a loan's or a region's bytes, on the device or in host pages.
#pragma once

#include "cuda.hpp"
#include "files.hpp"
#include "sha256.hpp"

#include <functional>
#include <vector>

namespace gpuloan::tool {

struct Memory {
  std::uint64_t pointer = 0; // on the device
  void* host = nullptr;      // used instead of pointer when it is set
  std::uint64_t bytes = 0;
};

class DeviceIo {
 public:
  // `cuda` is borrowed and may be null where only host memory is moved.
  explicit DeviceIo(Cuda* cuda) : cuda_(cuda) {}

  // Fills `to` with all of `from`; returns the SHA-256 of the bytes. The last copy may still run on the stream's end.
  [[nodiscard]] std::string upload(Source& from, const Memory& to);
  // Hands over all of `from` in order; returns the SHA-256 of the bytes.
  using Sink = std::function<void(std::uint64_t offset, std::span<const std::byte> bytes)>;
  [[nodiscard]] std::string download(const Memory& from, const Sink& sink);
  // `bytes.size()` bytes at `offset`.
  void peek(const Memory& from, std::uint64_t offset, std::span<std::byte> bytes);

 private:
  static constexpr std::size_t kPiece = std::size_t{8} << 20U;
  [[nodiscard]] std::span<std::byte> buffer(std::uint64_t bytes);
  Cuda* cuda_;
  std::vector<std::byte> buffer_;
};

} // namespace gpuloan::tool
