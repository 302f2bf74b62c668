// SPDX-License-Identifier: MIT
//
// Device-wide accounting: which allocations exist on which physical device of the machine, in all processes together.
// An allocation counts as long as any process holds it (a handle or a mapping); see state_file.hpp for how that is
// known.
#pragma once

#include <sim/file_identity.hpp>
#include <sim/rows.hpp>

#include <cstdint>
#include <sys/types.h>

namespace gpuloan::sim {

struct Account {
  std::uint32_t id = 0;
  std::uint32_t device = 0; // physical
  std::uint64_t size = 0;
};

// Takes `size` bytes on the device and holds them. OutOfMemory when they do not fit.
[[nodiscard]] CuResult account_create(std::uint32_t device, std::uint64_t size, FileIdentity file, Account& out);
// Holds the allocation behind a file that was created by account_create in any process; Unknown for other files.
[[nodiscard]] CuResult account_open(FileIdentity file, std::uint64_t size, Account& out);
// Gives up one hold of account_create or account_open.
void account_close(const Account& account) noexcept;

// A pointer of it was exported from the pool of that pool_byte: it is taken until nobody holds that either.
void account_bind(const Account& account, off_t pool) noexcept;

[[nodiscard]] std::uint64_t account_used(std::uint32_t device);

} // namespace gpuloan::sim
