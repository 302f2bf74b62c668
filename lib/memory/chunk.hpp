// SPDX-License-Identifier: MIT
//
// Chunk: one physical allocation that can be handed to another process: its descriptor and the exporter's own mapping.
//
// Device memory is a VMM allocation that the exporter maps for reading and writing. Host memory is a memfd, mapped and,
// where there is a device that can, registered with it. Destroying a chunk unmaps it without waiting for anything that
// runs (R22): whoever destroys it has made sure that nothing does.
#pragma once

#include <driver/handles.hpp>
#include <memory/device_buffer.hpp>

#include <cstdint>
#include <memory>

namespace gpuloan::memory {

// A shared mapping whose address is a multiple of 2 MiB, so that an offset's alignment in the chunk is its alignment in
// memory, as with device chunks.
class HostPages {
 public:
  static constexpr std::size_t kAlignment = 2U << 20;
  HostPages() noexcept = default;
  [[nodiscard]] static Result<HostPages> map(int fd, std::size_t bytes);
  HostPages(HostPages&& other) noexcept;
  HostPages& operator=(HostPages&& other) noexcept;
  ~HostPages();
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

class Chunk {
 public:
  Chunk(Chunk&&) noexcept = default;
  Chunk& operator=(Chunk&&) noexcept = default;
  ~Chunk(); // registered pages are given back by the reaper: unregistering waits for the whole CUDA context
  // `bytes` is a multiple of the device's granularity. On failure nothing is left behind. Without VMM memory it is plain
  // device memory, without a descriptor: good for the host rung alone.
  [[nodiscard]] static Result<Chunk> create_device(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes);
  // `gpu` may be null. Where registering the pages is refused they have no address for the device, as without one.
  [[nodiscard]] static Result<Chunk> create_host(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes);

  [[nodiscard]] gpuloan_memory memory() const noexcept { return memory_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  // The exporter's device address; 0 for host memory that no device knows.
  [[nodiscard]] std::uint64_t pointer() const noexcept;
  [[nodiscard]] std::byte* host() const noexcept { return pages_.bytes().data(); } // null for device memory
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  void close_fd() noexcept { fd_.reset(); }
  [[nodiscard]] Result<void> reopen_fd(); // device memory: of a chunk that is made known again

 private:
  Chunk(gpuloan_memory memory, std::uint64_t bytes) noexcept : memory_(memory), bytes_(bytes) {}
  gpuloan_memory memory_;
  std::uint64_t bytes_;
  UniqueFd fd_;
  std::shared_ptr<DeviceBuffer> plain_;
  // Destroyed from the last to the first: registrations and mappings before what they map.
  driver::VmmHandle handle_;
  driver::VmmMapping mapping_;
  HostPages pages_;
  driver::HostRegistration registration_;
};

} // namespace gpuloan::memory
