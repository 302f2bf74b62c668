// SPDX-License-Identifier: MIT
//
// How large one allocation of a pool may be for another process to import it. One that is too large kills the importer, without an
// error (P3), so nobody finds out but by trying in a process that may die: `gpuloan probe --import-limit` does, and the
// result is kept in a file for each device (base/cache_file.hpp).
//
// The file is text, and all of it follows from the device, the driver and the number, so it is checked by writing it again:
// one that says anything else is damaged, of another format, another device's, or older than the driver, and is not used.
#pragma once

#include <driver/gpu.hpp>

namespace gpuloan::memory {

inline constexpr std::uint64_t kImportLimitDefault = std::uint64_t{5248} << 20; // P3
inline constexpr std::uint64_t kImportLimitUnit = std::uint64_t{2} << 20;       // in which it was seen to move
inline constexpr std::uint64_t kImportPiece = std::uint64_t{32} << 20;          // in which a pool takes memory

// What an importer dies of is the number of pieces that the allocation touches: 164 are fine, 165 are not. So 5248 MiB arrive
// that start with a piece, while of 5247 MiB behind 733 others the importer died.
[[nodiscard]] constexpr std::uint64_t import_pieces(std::uint64_t base, std::uint64_t bytes) noexcept {
  const std::uint64_t before = base % kImportPiece;
  return (bytes + before) / kImportPiece + ((bytes + before) % kImportPiece != 0 ? 1 : 0);
}
// Whether an importer survives the allocation, where `limit` bytes that start with a piece are the most that it survives.
[[nodiscard]] constexpr bool importable(std::uint64_t base, std::uint64_t bytes, std::uint64_t limit) noexcept {
  return bytes <= limit && import_pieces(base, bytes) <= import_pieces(0, limit);
}

struct ImportLimit {
  std::uint64_t bytes = kImportLimitDefault; // 0: nothing can be imported
  gpuloan_limit_source source = GPULOAN_LIMIT_DEFAULT;
};
// "the option pool_import_limit", "measured on this device and driver", ...
[[nodiscard]] const char* limit_source_text(gpuloan_limit_source source) noexcept;

// What a context takes whose options name none: the measured one, else the default. A file that is there and not used
// makes one line in the log.
[[nodiscard]] ImportLimit find_import_limit(const driver::Driver& driver, const driver::Floors& floors);
// Keeps `bytes`, rounded down to 2 MiB, or 0: nothing can be imported; the path of the file. INVALID for less than 2 MiB or
// more than the device has.
[[nodiscard]] Result<std::string> remember_import_limit(const driver::Driver& driver, const driver::Floors& floors, std::uint64_t bytes);

// The file's name and text.
[[nodiscard]] std::string import_limit_name(const driver::Floors& floors);
[[nodiscard]] std::string import_limit_text(const driver::Driver& driver, const driver::Floors& floors, std::uint64_t bytes);

} // namespace gpuloan::memory
