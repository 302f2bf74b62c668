// SPDX-License-Identifier: MIT
//
// How the simulated device moves bytes. The instructions are spelled out so that no sanitizer sees them: two streams
// that race for device memory are the tested program's business, not a data race of this library, and shadow memory for
// gigabytes of device memory would not fit anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gpuloan::sim {

inline void raw_copy(void* to, const void* from, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#else
  std::memmove(to, from, bytes);
#endif
}

// Repeats the four pattern bytes; a rest of one to three bytes gets the first of them.
inline void raw_fill(void* to, std::uint32_t pattern, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  std::size_t words = bytes / 4;
  std::size_t rest = bytes % 4;
  __asm__ volatile("rep stosl" : "+D"(to), "+c"(words) : "a"(pattern) : "memory");
  __asm__ volatile("rep stosb" : "+D"(to), "+c"(rest) : "a"(pattern) : "memory");
#else
  auto* bytes_to = static_cast<unsigned char*>(to);
  for (std::size_t index = 0; index < bytes; ++index) {
    bytes_to[index] = static_cast<unsigned char>(pattern >> (index % 4 * 8));
  }
#endif
}

} // namespace gpuloan::sim
