// SPDX-License-Identifier: MIT
//
// HandleTable turns the objects of one kind into the opaque handles that callers hold. A handle is a number that is
// not used for two objects, so a stale one is recognised instead of followed.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gpuloan::sim {

template <typename Object>
class HandleTable {
 public:
  // `tag` makes the handles of different kinds differ.
  explicit HandleTable(std::uint64_t tag) noexcept : next_((tag << 40) + kStep) {}

  [[nodiscard]] std::uint64_t add(std::shared_ptr<Object> object) {
    const std::uint64_t handle = reserve();
    put(handle, std::move(object));
    return handle;
  }
  // A handle for put(), which may be called again once the object was taken out.
  [[nodiscard]] std::uint64_t reserve() {
    const std::lock_guard lock(mutex_);
    return std::exchange(next_, next_ + kStep);
  }
  void put(std::uint64_t handle, std::shared_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    objects_.insert_or_assign(handle, std::move(object));
  }
  [[nodiscard]] std::shared_ptr<Object> find(std::uint64_t handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    return found != objects_.end() ? found->second : nullptr;
  }
  // What was taken out, or null: of two callers that destroy one object, one gets it.
  [[nodiscard]] std::shared_ptr<Object> take(std::uint64_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }
  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return objects_.size();
  }
  [[nodiscard]] std::vector<std::shared_ptr<Object>> all() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Object>> objects;
    for (const auto& [handle, object] : objects_) objects.push_back(object);
    return objects;
  }
  // Takes out every object that `matches`.
  template <typename Predicate>
  void remove_if(Predicate matches) {
    std::unordered_map<std::uint64_t, std::shared_ptr<Object>> removed; // ends after the lock
    const std::lock_guard lock(mutex_);
    for (auto next = objects_.begin(); next != objects_.end();) {
      const auto here = next++;
      if (matches(*here->second)) removed.insert(objects_.extract(here));
    }
  }

 private:
  static constexpr std::uint64_t kStep = 16;
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Object>> objects_;
  std::uint64_t next_;
};

// CUcontext, CUstream and CUevent are pointers that nobody follows.
template <typename Pointer>
[[nodiscard]] Pointer to_handle(std::uint64_t number) noexcept {
  return reinterpret_cast<Pointer>(static_cast<std::uintptr_t>(number));
}
template <typename Pointer>
[[nodiscard]] std::uint64_t from_handle(Pointer pointer) noexcept {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

} // namespace gpuloan::sim
