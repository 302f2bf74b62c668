// SPDX-License-Identifier: MIT
//
// Memory that gpuloan did not make: one piece of it, by each of the means that a driver has. It is made and freed by the
// driver library that gpuloan opened, in the test's own thread.
#pragma once

#include "../support/bench.hpp"

namespace loan_test {

enum class Made {
  Alloc,          // cuMemAlloc
  PoolShareable,  // from a pool made with POSIX FD handles
  PoolPrivate,    // from a pool made without, as the device's own is
  VmmOne,         // one chunk with a POSIX FD handle
  VmmMany,        // the same in chunks of 2 MiB, one behind the other
  Torch,          // gpuloan_torch_malloc
  VmmPrivate,     // one chunk without a handle
  Managed,        // cuMemAllocManaged
  HostAlloc,      // cuMemAllocHost
  HostRegistered, // cuMemHostRegister
  Opened,         // another process's cuMemAlloc memory, opened by its legacy handle
  Unknown,        // of the C++ heap
};

inline constexpr std::uint64_t kChunk = std::uint64_t{2} << 20; // of VMM memory (V5)

// A block of `before + bytes + after` bytes, of which the middle is what a test lends. VMM blocks are rounded up to chunks.
struct Shape {
  std::uint64_t bytes = 0;
  std::uint64_t before = 0;
  std::uint64_t after = 0;
};

class Foreign {
 public:
  // Throws Skip where the driver does not make such memory.
  Foreign(const Bench& bench, Made made, const Shape& shape);
  Foreign(const Foreign&) = delete;
  Foreign& operator=(const Foreign&) = delete;
  ~Foreign();

  [[nodiscard]] std::uint64_t base() const noexcept { return base_; }
  [[nodiscard]] std::uint64_t block_bytes() const noexcept { return block_; }
  // What a peer can touch beyond the lent bytes, where they are not copied: the rest of the block, or of the chunks touched.
  [[nodiscard]] std::uint64_t exposed_bytes() const noexcept;
  [[nodiscard]] std::uint64_t pointer() const noexcept { return base_ + before_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  // The whole block gets, or has, patterns of its own: one before what is lent, one there, one behind.
  void fill(std::uint64_t before, std::uint64_t middle, std::uint64_t after) const;
  void check(std::uint64_t before, std::uint64_t middle, std::uint64_t after, Where where = Where::current()) const;
  void fill(std::uint64_t seed) const { fill(1, seed, 2); }
  void check(std::uint64_t seed, Where where = Where::current()) const { check(1, seed, 2, where); }
  void free(); // nobody has it any more

 private:
  void start(Made made);
  void drop() noexcept;
  void make_alloc();
  void make_from_pool(int handle_types);
  void make_vmm(int handle_types, std::uint64_t chunk);
  void make_torch();
  void make_managed();
  void make_pinned();
  void make_registered();
  void make_opened();
  void make_unknown();
  void write(std::uint64_t offset, std::uint64_t bytes, std::uint64_t seed) const;
  [[nodiscard]] std::string wrong(std::uint64_t offset, std::uint64_t bytes, std::uint64_t seed) const;

  const Bench& bench_;
  std::uint64_t base_ = 0, block_ = 0;
  std::uint64_t chunk_ = 0; // VMM memory only
  const std::uint64_t before_, bytes_;
  bool on_host_ = false; // the CPU reads and writes it
  std::function<void()> free_;
};

// Takes one chunk away from a VmmMany block, and puts another in its place at the end: a range with a gap.
class Gap {
 public:
  Gap(const Bench& bench, std::uint64_t address);
  Gap(const Gap&) = delete;
  Gap& operator=(const Gap&) = delete;
  ~Gap();

 private:
  const Bench& bench_;
  const std::uint64_t address_;
};

[[nodiscard]] bool under_mps(const Bench& bench);

// Of a block that cuMemAlloc made. Throws Skip where the driver gives none.
[[nodiscard]] cuda::IpcMemHandle legacy_handle(const Bench& bench, std::uint64_t block);

// The process behind Made::Opened: allocates, says its handle, and keeps the memory until `control` is closed.
int run_owner(int control, const char* driver);

} // namespace loan_test
