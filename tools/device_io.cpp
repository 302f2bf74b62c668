// SPDX-License-Identifier: MIT
#include "device_io.hpp"

#include "exit_codes.hpp"
#include "wait.hpp"

#include <cstring>

namespace gpuloan::tool {

std::span<std::byte> DeviceIo::buffer(std::uint64_t bytes) {
  const std::size_t size = static_cast<std::size_t>(std::min<std::uint64_t>(bytes, kPiece));
  if (buffer_.size() < size) buffer_.resize(size);
  return std::span(buffer_).first(size);
}

std::string DeviceIo::upload(Source& from, const Memory& to) {
  Sha256 hash;
  for (std::uint64_t offset = 0; offset < to.bytes;) {
    const std::span<std::byte> piece = buffer(to.bytes - offset);
    from.read(offset, piece);
    hash.update(piece);
    if (to.host != nullptr) {
      std::memcpy(static_cast<std::byte*>(to.host) + offset, piece.data(), piece.size());
    } else {
      cuda_->copy_in(to.pointer + offset, piece.data(), piece.size());
      cuda_->synchronize(); // the buffer is used again
    }
    offset += piece.size();
  }
  return hash.finish();
}

void DeviceIo::peek(const Memory& from, std::uint64_t offset, std::span<std::byte> bytes) {
  if (from.host != nullptr) {
    std::memcpy(bytes.data(), static_cast<const std::byte*>(from.host) + offset, bytes.size());
  } else if (!bytes.empty()) {
    cuda_->copy_out(bytes.data(), from.pointer + offset, bytes.size());
    cuda_->synchronize();
  }
}

std::string DeviceIo::download(const Memory& from, const Sink& sink) {
  Sha256 hash;
  for (std::uint64_t offset = 0; offset < from.bytes;) {
    check_interrupted();
    const std::span<std::byte> piece = buffer(from.bytes - offset);
    peek(from, offset, piece);
    hash.update(piece);
    sink(offset, piece);
    offset += piece.size();
  }
  return hash.finish();
}

} // namespace gpuloan::tool
