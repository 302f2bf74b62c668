// SPDX-License-Identifier: MIT
#include <base/fork.hpp>

#include <atomic>
#include <pthread.h>

namespace gpuloan {
namespace {

std::atomic<std::uint32_t> generation{1};

void in_child() { generation.fetch_add(1, std::memory_order_relaxed); }

const int installed = ::pthread_atfork(nullptr, nullptr, in_child);

} // namespace

std::uint32_t fork_generation() noexcept {
  static_cast<void>(installed);
  return generation.load(std::memory_order_relaxed);
}

} // namespace gpuloan
