// SPDX-License-Identifier: MIT
//
// Copies between the device and host memory that the driver would not pin.
//
// Such a copy blocks its caller behind everything that is ahead of it in its stream, perhaps a caller's kernel that never
// ends (S10). So none is made by a thread that holds a lock or turns a loop: each is a job of a thread of its own, which
// first waits for an event behind what has to come before, and then copies on a stream that nobody else uses and that is
// empty by then. The copying call itself so waits for nobody's work, whatever the driver locks meanwhile. Whoever started a
// copy asks from time to time whether it is over, as with an event.
#pragma once

#include <driver/handles.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace gpuloan::memory {

class UnpinnedCopy {
 public:
  // Whether it is over, or the driver's error.
  [[nodiscard]] Result<bool> query() const;

 private:
  friend class UnpinnedCopies;
  std::byte* host_ = nullptr;
  cuda::DevicePtr device_ = 0;
  std::uint64_t bytes_ = 0;
  bool to_host_ = false;
  driver::OwnedEvent behind_;
  std::atomic<bool> over_{false};
  Result<void> result_; // set before over_
};

class UnpinnedCopies {
 public:
  // NO_MEMORY where no thread can be had.
  [[nodiscard]] static Result<std::unique_ptr<UnpinnedCopies>> create(std::shared_ptr<driver::Gpu> gpu);
  UnpinnedCopies(const UnpinnedCopies&) = delete;
  UnpinnedCopies& operator=(const UnpinnedCopies&) = delete;
  ~UnpinnedCopies(); // behind the copy that runs; those that have not begun are dropped

  // Behind what is in the stream `behind` now; one after the other. Once one has failed, so do all that follow: nothing is
  // copied any more. The memory must stay until the copy is over.
  [[nodiscard]] Result<std::shared_ptr<const UnpinnedCopy>> to_host(std::byte* to, cuda::DevicePtr from, std::uint64_t bytes, cuda::Stream behind);
  [[nodiscard]] Result<std::shared_ptr<const UnpinnedCopy>> to_device(cuda::DevicePtr to, std::byte* from, std::uint64_t bytes, cuda::Stream behind);
  [[nodiscard]] bool busy() const noexcept;
  // Waits until all are over, a second at most; false then: this, and what they copy, must stay.
  [[nodiscard]] bool drain() const noexcept;

 private:
  explicit UnpinnedCopies(std::shared_ptr<driver::Gpu> gpu) : gpu_(std::move(gpu)) {}
  [[nodiscard]] Result<std::shared_ptr<const UnpinnedCopy>> start(std::shared_ptr<UnpinnedCopy> copy, cuda::Stream behind);
  void main() noexcept;
  [[nodiscard]] Result<void> run(const UnpinnedCopy& copy) const;

  const std::shared_ptr<driver::Gpu> gpu_;
  driver::OwnedStream stream_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<UnpinnedCopy>> queue_; // the front one runs
  bool stopping_ = false;
  std::thread thread_;
};

} // namespace gpuloan::memory
