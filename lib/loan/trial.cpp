// SPDX-License-Identifier: MIT
#include <loan/trial.hpp>

#include <algorithm>
#include <cstring>

namespace gpuloan::loan {

Trial trial_of(gpuloan_rung rung, Carrier carrier, bool foreign, gpuloan_access access) noexcept {
  if (rung == GPULOAN_RUNG_POOL) return Trial::Pool;
  if (rung == GPULOAN_RUNG_IPC) return Trial::Ipc;
  if (rung == GPULOAN_RUNG_VMM) return foreign ? Trial::ForeignVmm : Trial::Vmm;
  const bool write = access == GPULOAN_ACCESS_WRITE;
  if (carrier == Carrier::Direct) return write ? Trial::PagesWrite : Trial::PagesRead;
  if (carrier == Carrier::Segment) return write ? Trial::SegmentWrite : Trial::SegmentRead;
  return write ? Trial::RingWrite : Trial::RingRead;
}

gpuloan_rung rung_of(Trial trial) noexcept {
  switch (trial) {
    case Trial::Vmm:
    case Trial::ForeignVmm:
      return GPULOAN_RUNG_VMM;
    case Trial::Pool:
      return GPULOAN_RUNG_POOL;
    case Trial::Ipc:
      return GPULOAN_RUNG_IPC;
    default:
      return GPULOAN_RUNG_HOST;
  }
}

const char* name_of(Trial trial) noexcept {
  static constexpr const char* kNames[kTrials] = {
      "vmm", "vmm for memory of others", "pool", "ipc", "host (pages, read)", "host (pages, write)", "host (segment, read)",
      "host (segment, write)", "host (ring, read)", "host (ring, write)"};
  return kNames[static_cast<std::size_t>(trial)];
}

std::vector<std::byte> canary_pattern(std::uint64_t bytes, bool answered) {
  std::vector<std::byte> pattern(bytes);
  std::uint64_t state = bytes;
  for (std::size_t at = 0; at < pattern.size(); at += sizeof state) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const std::uint64_t word = answered ? ~state : state;
    std::memcpy(pattern.data() + at, &word, std::min(sizeof word, pattern.size() - at));
  }
  return pattern;
}

std::vector<std::byte> canary_block(bool answered) {
  std::vector<std::byte> block(kCanaryBytes);
  for (const CanaryShape& shape : kCanaryShapes) {
    const auto pattern = canary_pattern(shape.bytes, answered);
    std::copy(pattern.begin(), pattern.end(), block.begin() + static_cast<std::ptrdiff_t>(shape.offset));
  }
  return block;
}

std::string compare_blocks(std::span<const std::byte> got, std::span<const std::byte> wanted) {
  const auto wrong = std::mismatch(got.begin(), got.end(), wanted.begin(), wanted.end()).first;
  if (wrong == got.end() && got.size() == wanted.size()) return "";
  const auto at = static_cast<std::uint64_t>(wrong - got.begin());
  for (const CanaryShape& shape : kCanaryShapes) {
    if (at >= shape.offset && at - shape.offset < shape.bytes) {
      return std::string("shape ") + shape.name + ": byte " + std::to_string(at - shape.offset) + " that came back is not the importer's";
    }
  }
  return "byte " + std::to_string(at) + " of the block was written, which was not lent";
}

ShapeEnd shape_end(bool ended, gpuloan_status outcome) noexcept {
  switch (outcome) {
    case GPULOAN_OK:
      return ended ? ShapeEnd::Good : ShapeEnd::Open;
    case GPULOAN_ERR_NO_MEMORY:
    case GPULOAN_ERR_DEVICE_MEMORY:
    case GPULOAN_ERR_FD_LIMIT:
    case GPULOAN_ERR_LIMIT:
    case GPULOAN_ERR_PEER_LOST:
    case GPULOAN_ERR_CANCELLED: // by us, when the rest could not be sent
      return ShapeEnd::Unproven;
    default:
      return ShapeEnd::Failed;
  }
}

gpuloan_canary verdict(std::span<const ShapeEnd> shapes) noexcept {
  const auto is = [](ShapeEnd wanted) { return [wanted](ShapeEnd end) { return end == wanted; }; };
  if (std::any_of(shapes.begin(), shapes.end(), is(ShapeEnd::Failed))) return GPULOAN_CANARY_DEMOTED;
  const bool all = !shapes.empty() && std::all_of(shapes.begin(), shapes.end(), is(ShapeEnd::Good));
  return all ? GPULOAN_CANARY_VERIFIED : GPULOAN_CANARY_NOT_ATTEMPTED;
}

} // namespace gpuloan::loan
