// SPDX-License-Identifier: MIT
//
// Reaper: destroys what may take the driver long, on a thread of its own.
//
// Unregistering host memory waits for the whole CUDA context (measured on an H200), so for work of the caller's that has
// nothing to do with us and may never end. No loop, no lock and no caller may wait for that.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

namespace gpuloan {

// Destroys `object`, if this is its last reference, elsewhere and soon. Where no thread can be had it is left to the end of
// the process.
void dispose(std::shared_ptr<void> object) noexcept;
// Waits until everything that was disposed of is destroyed; false when that takes longer.
bool wait_disposed(std::uint32_t timeout_ms) noexcept;

// Leaves the object to the end of the process. Where there is no memory for that, it is its owner who destroys it.
template <typename Object>
void abandon(Object&& object) noexcept {
  static_assert(!std::is_lvalue_reference_v<Object>);
  static_cast<void>(new (std::nothrow) Object(std::move(object)));
}

} // namespace gpuloan
