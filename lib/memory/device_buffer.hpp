// SPDX-License-Identifier: MIT
//
// DeviceBuffer: private device memory of this process, where an importer works when the bytes come through the ring.
// Made by VMM where the device has it, since giving that back never blocks behind a pending wait (S10), else by
// cuMemAlloc; destroy it without any lock.
#pragma once

#include <driver/handles.hpp>

namespace gpuloan::memory {

class DeviceBuffer {
 public:
  [[nodiscard]] static Result<DeviceBuffer> create(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes);
  // By cuMemAlloc in any case.
  [[nodiscard]] static Result<DeviceBuffer> allocate(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes);
  // VMM memory of two allocations with the seam `seam` bytes behind pointer(); `bytes` are beyond it, and at most twice that.
  [[nodiscard]] static Result<DeviceBuffer> in_two(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes, std::uint64_t seam);
  // From a pool of the caller's.
  [[nodiscard]] static Result<DeviceBuffer> from_pool(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes, cuda::Pool pool);
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;
  ~DeviceBuffer();
  [[nodiscard]] cuda::DevicePtr pointer() const noexcept { return mapping_ ? mapping_.pointer() : range_ ? range_.pointer() + range_offset_ : allocated_; }

 private:
  DeviceBuffer() = default;
  std::shared_ptr<driver::Gpu> gpu_;
  driver::VmmHandle handle_;
  driver::VmmMapping mapping_;
  driver::VmmRange range_;
  std::uint64_t range_offset_ = 0;
  cuda::DevicePtr allocated_ = 0;
  driver::OwnedStream pool_stream_; // where memory of a pool is allocated and freed
};

} // namespace gpuloan::memory
