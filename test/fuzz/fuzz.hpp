// SPDX-License-Identifier: MIT
//
// What the fuzz targets share: reading an input, a requirement that also holds in release builds, and descriptors.
//
// A target is one function, LLVMFuzzerTestOneInput. libFuzzer calls it with inputs that it makes up; replay_main.cpp calls
// it with the files of its corpus, as an ordinary test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace gpuloan::fuzz {

// Not assert(): it has to hold with NDEBUG too.
[[noreturn]] inline void broken(const char* what, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: not true: %s\n", file, line, what);
  std::abort();
}

// The input, read from its front. What is not there any more reads as 0, so that every input is a valid one.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}

  template <typename Number>
  [[nodiscard]] Number number() {
    Number value = 0;
    const std::size_t size = left_.size() < sizeof value ? left_.size() : sizeof value;
    if (size != 0) std::memcpy(&value, left_.data(), size); // little-endian, as the wire
    left_ = left_.subspan(size);
    return value;
  }
  [[nodiscard]] std::uint8_t byte() { return number<std::uint8_t>(); }
  [[nodiscard]] bool flag() { return (byte() & 1U) != 0; }
  // 0 to limit - 1
  [[nodiscard]] std::uint32_t below(std::uint32_t limit) { return byte() % limit; }
  // At most so many.
  [[nodiscard]] std::span<const std::uint8_t> bytes(std::size_t count) {
    const auto taken = left_.first(count < left_.size() ? count : left_.size());
    left_ = left_.subspan(taken.size());
    return taken;
  }
  [[nodiscard]] std::span<const std::uint8_t> rest() { return bytes(left_.size()); }
  [[nodiscard]] std::string text(std::size_t count) {
    const auto taken = bytes(count);
    return {taken.begin(), taken.end()};
  }
  [[nodiscard]] bool empty() const { return left_.empty(); }

 private:
  std::span<const std::uint8_t> left_;
};

[[nodiscard]] std::size_t open_descriptors();
[[nodiscard]] bool is_open(int fd);

// First object of a run: when all others are gone, so is every descriptor that they had.
class DescriptorGuard {
 public:
  DescriptorGuard() : before_(open_descriptors()) {}
  DescriptorGuard(const DescriptorGuard&) = delete;
  DescriptorGuard& operator=(const DescriptorGuard&) = delete;
  ~DescriptorGuard();

 private:
  std::size_t before_;
};

} // namespace gpuloan::fuzz

#define FUZZ_REQUIRE(condition)                                                                                        \
  do {                                                                                                                 \
    if (!(condition)) ::gpuloan::fuzz::broken(#condition, __FILE__, __LINE__);                                         \
  } while (false)
#define FUZZ_FAIL(what) ::gpuloan::fuzz::broken(what, __FILE__, __LINE__)
