// SPDX-License-Identifier: MIT
//
// Chunk is one piece of physical device memory as this process holds it: a memfd, accounted on its device, and the one
// mapping through which the simulated device reaches the bytes. Nobody else learns that mapping's address: device
// pointers lie in reserved ranges that the CPU cannot touch, as on a real card.
//
// A chunk lives as long as a handle or a device mapping of this process refers to it; the memory itself, as long as any
// process has a chunk of it, or a descriptor (facts V3 and V12). Each import makes a chunk of its own.
#pragma once

#include <sim/accounting.hpp>
#include <sim/fd.hpp>

#include <cstddef>
#include <memory>

namespace gpuloan::sim {

class Chunk {
 public:
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;
  ~Chunk();

  // A chunk that can be shared keeps the memfd open, for handles that carry it and for those that only say where it
  // is (named_file.hpp). The chunk itself needs no descriptor to stay alive.
  [[nodiscard]] static CuResult create(int physical, std::size_t size, bool shareable, std::shared_ptr<Chunk>& out);
  // `fd` stays the caller's. Unknown, as a real driver says, for one that is no device memory of this machine.
  [[nodiscard]] static CuResult import(int fd, std::shared_ptr<Chunk>& out);

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] int physical() const noexcept { return static_cast<int>(account_.device); }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); } // borrowed; -1 of one that this process cannot share
  void bind_to_pool(off_t pool) const noexcept { account_bind(account_, pool); }
  [[nodiscard]] FileIdentity file() const noexcept { return file_; }

 private:
  Chunk(std::byte* data, std::size_t size, Account account, FileIdentity file, Fd fd) noexcept
      : data_(data), size_(size), account_(account), file_(file), fd_(std::move(fd)) {}
  [[nodiscard]] static std::byte* map(int fd, std::size_t size) noexcept;

  std::byte* data_;
  std::size_t size_; // of the file, whole pages; the account may be smaller
  Account account_;
  FileIdentity file_;
  Fd fd_;
};

} // namespace gpuloan::sim
