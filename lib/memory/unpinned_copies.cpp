// SPDX-License-Identifier: MIT
#include <memory/unpinned_copies.hpp>

#include <base/clock.hpp>
#include <base/thread.hpp>

#include <system_error>

namespace gpuloan::memory {

Result<bool> UnpinnedCopy::query() const {
  if (!over_.load(std::memory_order_acquire)) return false;
  if (!result_) return forward(Error(result_.error()));
  return true;
}

Result<std::unique_ptr<UnpinnedCopies>> UnpinnedCopies::create(std::shared_ptr<driver::Gpu> gpu) {
  auto stream = driver::OwnedStream::create(gpu);
  if (!stream) return forward(std::move(stream.error()));
  std::unique_ptr<UnpinnedCopies> copies(new UnpinnedCopies(std::move(gpu)));
  copies->stream_ = std::move(*stream);
  try {
    copies->thread_ = start_thread("gpuloan-copy", [raw = copies.get()] { raw->main(); });
  } catch (const std::system_error&) {
    return fail(GPULOAN_ERR_NO_MEMORY, "no thread could be made to copy unpinned memory: look at RLIMIT_NPROC and the pids limit of the cgroup");
  }
  return copies;
}

UnpinnedCopies::~UnpinnedCopies() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Result<std::shared_ptr<const UnpinnedCopy>> UnpinnedCopies::start(std::shared_ptr<UnpinnedCopy> copy, cuda::Stream behind) {
  const driver::Gpu::Scope scope(*gpu_);
  if (!scope.ok()) return forward(Error(scope.ok().error()));
  auto event = driver::OwnedEvent::create(gpu_, cuda::EventDisableTiming | cuda::EventBlockingSync);
  if (!event) return forward(std::move(event.error()));
  GPULOAN_TRY(event->record(behind));
  copy->behind_ = std::move(*event);
  const std::lock_guard lock(mutex_);
  queue_.push_back(copy);
  changed_.notify_all();
  return copy;
}

Result<std::shared_ptr<const UnpinnedCopy>> UnpinnedCopies::to_host(std::byte* to, cuda::DevicePtr from, std::uint64_t bytes, cuda::Stream behind) {
  auto copy = std::make_shared<UnpinnedCopy>();
  copy->host_ = to;
  copy->device_ = from;
  copy->bytes_ = bytes;
  copy->to_host_ = true;
  return start(std::move(copy), behind);
}

Result<std::shared_ptr<const UnpinnedCopy>> UnpinnedCopies::to_device(cuda::DevicePtr to, std::byte* from, std::uint64_t bytes, cuda::Stream behind) {
  auto copy = std::make_shared<UnpinnedCopy>();
  copy->host_ = from;
  copy->device_ = to;
  copy->bytes_ = bytes;
  return start(std::move(copy), behind);
}

bool UnpinnedCopies::busy() const noexcept {
  const std::lock_guard lock(mutex_);
  return !queue_.empty();
}

bool UnpinnedCopies::drain() const noexcept {
  const Deadline deadline = Deadline::after_ms(1000);
  while (busy()) {
    if (!driver::calls_allowed() || deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

Result<void> UnpinnedCopies::run(const UnpinnedCopy& copy) const {
  GPULOAN_TRY(copy.behind_.synchronize());
  const driver::Gpu::Scope scope(*gpu_);
  GPULOAN_TRY(scope.ok());
  const driver::Driver& driver = gpu_->driver();
  if (copy.to_host_) GPULOAN_TRY(GPULOAN_CU(driver, cuMemcpyDtoHAsync, copy.host_, copy.device_, copy.bytes_, stream_.get()));
  else GPULOAN_TRY(GPULOAN_CU(driver, cuMemcpyHtoDAsync, copy.device_, copy.host_, copy.bytes_, stream_.get()));
  return stream_.synchronize();
}

void UnpinnedCopies::main() noexcept {
  Result<void> last;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    const std::shared_ptr<UnpinnedCopy> copy = queue_.front();
    lock.unlock();
    try {
      if (last) last = run(*copy);
      copy->result_ = last;
    } catch (const std::bad_alloc&) { // an error without words
      copy->result_ = last = std::unexpected(Error{GPULOAN_ERR_NO_MEMORY, {}});
    }
    copy->over_.store(true, std::memory_order_release);
    lock.lock();
    queue_.pop_front();
  }
}

} // namespace gpuloan::memory
