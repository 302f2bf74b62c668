// SPDX-License-Identifier: MIT
//
// The witness: who may touch which device memory, as tests say it, and who touched it all the same.
//
// A claim names a piece of physical memory (the file of its chunk, so that it is the same in every process and at every
// address), two processes that may write it and one that may read it. Every copy and fill looks when it runs, once
// before and once after each slice: work that is still running when its time is over is seen as well. What breaks a claim
// is done all the same, and reported. Memory that nobody claimed is free to all. The library knows nothing of this.
//
// Claims and reports lie in the state file. They are read without a lock, since a process may be killed anywhere: an
// entry's sequence is odd while its maker changes it, and an entry that stays odd is never looked at again.
#pragma once

#include <sim/address_space.hpp>
#include <sim/rows.hpp>

#include <cstdint>
#include <string>

namespace gpuloan::sim {

enum class Touch { Read, Write };

inline constexpr std::uint32_t kAnybody = UINT32_MAX; // in the place of a process id; 0 is nobody

struct Rights {
  std::uint32_t writer = 0, second_writer = 0, reader = 0; // process ids; who may write may read
};

// This process touches the first `bytes` of what is pinned.
void witness(const Pin& pin, std::size_t bytes, Touch touch) noexcept;
// The same of a process that need not be this one.
void witness(const Chunk& chunk, std::size_t offset, std::size_t bytes, Touch touch, std::uint32_t process) noexcept;

// Makes a claim, or changes the rights of this process's claim of exactly this memory. InvalidValue where no device memory
// of one chunk is mapped, or where a part of it is claimed already; OutOfMemory where the table is full.
[[nodiscard]] CuResult claim(DevicePtr start, std::size_t bytes, const Rights& rights, std::uint64_t note) noexcept;
// Ends this process's claim of exactly this memory. InvalidValue where there is none.
[[nodiscard]] CuResult unclaim(DevicePtr start, std::size_t bytes) noexcept;
// Ends all claims that a process made.
void unclaim_all(std::uint32_t process) noexcept;

// How many touches were reported on this machine, and one of the first of them as a sentence; "" where it was not kept.
[[nodiscard]] std::uint64_t witness_reports() noexcept;
[[nodiscard]] std::string witness_report(std::uint64_t index);

} // namespace gpuloan::sim
