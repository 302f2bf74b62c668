// SPDX-License-Identifier: MIT
//
// What is pure in the canaries: the ways that are proven apart, the battery of shapes that goes each way, the bytes that
// its two ends agree on, and the verdict. canary.cpp is the exporter's end, answer.cpp the importer's.
#pragma once

#include <loan/admission.hpp>

#include <array>
#include <span>
#include <vector>

namespace gpuloan::loan {

// Ways that bytes take to a peer. Each is proven before its first loan, so none costs anything that is never used. What
// the host rung carries is copied in one direction, so its reads and its writes are proven apart.
enum class Trial : std::uint8_t { Vmm, ForeignVmm, Pool, Ipc, PagesRead, PagesWrite, SegmentRead, SegmentWrite, RingRead, RingWrite };
inline constexpr std::size_t kTrials = 10;

// `foreign`: the importer maps memory that is not of its part of the arena.
[[nodiscard]] Trial trial_of(gpuloan_rung rung, Carrier carrier, bool foreign, gpuloan_access access) noexcept;
[[nodiscard]] gpuloan_rung rung_of(Trial trial) noexcept;
[[nodiscard]] const char* name_of(Trial trial) noexcept; // "vmm", "vmm for memory of others", ...

// The battery: all shapes lie in one block and are lent at the same time.
struct CanaryShape {
  const char* name;
  std::uint64_t offset, bytes;
};
inline constexpr std::uint64_t kCanarySeam = std::uint64_t{2} << 20; // where foreign VMM memory has its second chunk
inline constexpr std::array<CanaryShape, 4> kCanaryShapes = {{
    {"contiguous", 0, 65536},
    {"view", 65536 + 4096 + 256, 65536},
    {"odd", 139264, 65536 + 4096 + 13},
    {"large", 212992, (std::uint64_t{2} << 20) + 65536},
}};
inline constexpr std::uint64_t kCanaryBytes = 212992 + (std::uint64_t{2} << 20) + 65536 + 4096; // of the block
static_assert(kCanaryShapes[3].offset < kCanarySeam && kCanaryShapes[3].offset + kCanaryShapes[3].bytes > kCanarySeam);

// An importer answers canaries up to this size; the exporter may change its shapes.
inline constexpr std::uint64_t kCanaryMaxBytes = std::uint64_t{16} << 20;

// The bytes of a canary of that size; the importer's answer has them inverted (docs/protocol.md).
[[nodiscard]] std::vector<std::byte> canary_pattern(std::uint64_t bytes, bool answered);
// The whole block: the shapes' patterns, and zeros between them, which nobody may touch.
[[nodiscard]] std::vector<std::byte> canary_block(bool answered);
// "" when they are equal, else the first byte that is wrong, with its shape.
[[nodiscard]] std::string compare_blocks(std::span<const std::byte> got, std::span<const std::byte> wanted);

// How one shape's loan came out.
enum class ShapeEnd : std::uint8_t {
  Open,     // no answer yet
  Good,
  Failed,
  Unproven, // it ended for want of memory or descriptors, which says nothing about the way
};
[[nodiscard]] ShapeEnd shape_end(bool ended, gpuloan_status outcome) noexcept;
// The rule: one failure demotes at once, whatever the others do; only all of them verify.
[[nodiscard]] gpuloan_canary verdict(std::span<const ShapeEnd> shapes) noexcept;

} // namespace gpuloan::loan
