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
  // From a pool of the caller's, usable behind what is now in `stream`.
  [[nodiscard]] static Result<DeviceBuffer> from_pool(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes, cuda::Pool pool, cuda::Stream stream);
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;
  ~DeviceBuffer();
  [[nodiscard]] cuda::DevicePtr pointer() const noexcept { return mapping_ ? mapping_.pointer() : allocated_; }

 private:
  DeviceBuffer() = default;
  std::shared_ptr<driver::Gpu> gpu_;
  driver::VmmHandle handle_;
  driver::VmmMapping mapping_;
  cuda::DevicePtr allocated_ = 0;
};

} // namespace gpuloan::memory
