// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <new>
#include <pthread.h>

namespace gpuloan {

// The one `Object` of this process, in static memory, so that it is there also when there is no other. Never destroyed: threads may outlive
// main(). A forked child has a new one: it has none of the threads that held locks at the fork, and what else was in it is its parent's.
template <typename Object>
[[nodiscard]] Object& process_wide() noexcept {
  alignas(Object) static std::byte memory[sizeof(Object)];
  static Object* const first = [] {
    Object* const made = new (memory) Object;
    ::pthread_atfork(nullptr, nullptr, [] { new (memory) Object; });
    return made;
  }();
  return *first;
}

} // namespace gpuloan
