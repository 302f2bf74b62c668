// SPDX-License-Identifier: MIT
#include <memory/device_buffer.hpp>

#include <driver/standing.hpp>

#include <algorithm>

namespace gpuloan::memory {

Result<DeviceBuffer> DeviceBuffer::allocate(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes) {
  DeviceBuffer buffer;
  driver::Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  GPULOAN_TRY(GPULOAN_CU(gpu->driver(), cuMemAlloc, &buffer.allocated_, bytes));
  buffer.gpu_ = std::move(gpu);
  return buffer;
}

Result<DeviceBuffer> DeviceBuffer::from_pool(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes, cuda::Pool pool) {
  DeviceBuffer buffer;
  driver::Gpu::Scope scope(*gpu);
  GPULOAN_TRY(scope.ok());
  auto stream = driver::OwnedStream::create(gpu);
  if (!stream) return forward(std::move(stream.error()));
  buffer.pool_stream_ = std::move(*stream);
  GPULOAN_TRY(GPULOAN_CU(gpu->driver(), cuMemAllocFromPoolAsync, &buffer.allocated_, bytes, pool, buffer.pool_stream_.get()));
  buffer.gpu_ = std::move(gpu);
  GPULOAN_TRY(buffer.pool_stream_.synchronize());
  return buffer;
}

Result<DeviceBuffer> DeviceBuffer::in_two(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes, std::uint64_t seam) {
  const std::uint64_t unit = std::max<std::uint64_t>(gpu->floors().granularity, 2U << 20);
  if (seam > unit || bytes <= seam || bytes - seam > unit) return fail(GPULOAN_ERR_INTERNAL, "no two allocations of the granularity have this seam");
  std::vector<driver::VmmHandle> handles;
  for (int piece = 0; piece < 2; ++piece) {
    auto handle = driver::VmmHandle::create(gpu, unit);
    if (!handle) return forward(std::move(handle.error()));
    handles.push_back(std::move(*handle));
  }
  auto range = driver::VmmRange::map(gpu, handles, cuda::AccessReadWrite); // which keeps the memory
  if (!range) return forward(std::move(range.error()));
  DeviceBuffer buffer;
  buffer.range_ = std::move(*range);
  buffer.range_offset_ = unit - seam;
  buffer.gpu_ = std::move(gpu);
  return buffer;
}

Result<DeviceBuffer> DeviceBuffer::create(std::shared_ptr<driver::Gpu> gpu, std::uint64_t bytes) {
  if (!gpu->floors().has(GPULOAN_FLOOR_VMM)) return allocate(std::move(gpu), bytes);
  DeviceBuffer buffer;
  buffer.gpu_ = gpu;
  const std::uint64_t unit = std::max<std::uint64_t>(gpu->floors().granularity, 2U << 20);
  if (bytes > UINT64_MAX - unit) return fail(GPULOAN_ERR_DEVICE_MEMORY, std::to_string(bytes) + " bytes are more than any device has");
  auto handle = driver::VmmHandle::create(gpu, (bytes + unit - 1) / unit * unit);
  if (!handle) return forward(std::move(handle.error()));
  auto mapping = driver::VmmMapping::map(gpu, *handle, cuda::AccessReadWrite);
  if (!mapping) return forward(std::move(mapping.error()));
  buffer.handle_ = std::move(*handle);
  buffer.mapping_ = std::move(*mapping);
  return buffer;
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : gpu_(std::move(other.gpu_)), handle_(std::move(other.handle_)), mapping_(std::move(other.mapping_)),
      range_(std::move(other.range_)), range_offset_(other.range_offset_),
      allocated_(std::exchange(other.allocated_, 0)), pool_stream_(std::move(other.pool_stream_)) {}

DeviceBuffer::~DeviceBuffer() {
  if (allocated_ == 0 || !driver::calls_allowed()) return;
  if (pool_stream_) { // the pool goes on counting what cuMemFree took as used (P15)
    driver::Gpu::Scope scope(*gpu_);
    const bool freed = scope.ok() && gpu_->driver().call.cuMemFreeAsync(allocated_, pool_stream_.get()) == cuda::Success;
    if (freed) static_cast<void>(pool_stream_.synchronize());
    else if (scope.ok()) static_cast<void>(gpu_->driver().call.cuMemFree(allocated_));
    return;
  }
  const driver::StandingCall standing;
  driver::Gpu::Scope scope(*gpu_);
  if (scope.ok()) static_cast<void>(gpu_->driver().call.cuMemFree(allocated_));
}

} // namespace gpuloan::memory
