// SPDX-License-Identifier: MIT
//
// One loan of nearly the whole device, beside the same fill of a bare chunk. A card does not hold both, so they take turns; making
// them is not timed. The loan's time is from READY seen by the worker (its memory is mapped then) to DONE seen by the parent.
#include "run.hpp"

#include "../output.hpp"

namespace gpuloan::tool::bench {
namespace {

constexpr std::uint64_t kMost = 100 * kGiB;
constexpr std::uint64_t kReserve = kGiB; // for page tables and for others
constexpr std::uint64_t kSimulated = 64 * kMiB; // of this machine's memory

} // namespace

std::uint64_t Run::whole_bytes() const {
  if (session_.driver.simulated != 0) return kSimulated;
  const std::uint64_t free = calls_.free_bytes();
  return std::clamp(free > kReserve ? (free - kReserve) / kGiB * kGiB : 0, kGiB, kMost);
}

Comparison Run::whole(std::uint64_t bytes) {
  Comparison out{.name = "whole", .floor = "the fill in the worker, synchronised", .bytes = bytes};
  if (const std::uint64_t free = calls_.free_bytes(); bytes > free) {
    throw Failure(ExitDeviceMemory, "case whole: " + size_text(bytes) + " do not fit into the " + size_text(free) + " that are free; give a smaller --size");
  }
  const std::uint32_t blocks = options_.quick ? 3 : 5, fills = options_.quick ? 2 : 4;
  for (std::uint32_t block = 0; block < blocks; ++block) {
    std::vector<double> floor, times;
    {
      const BareChunk chunk(calls_, options_.common.device, bytes);
      share_chunk(chunk);
      for (std::uint32_t fill = 0; fill <= fills; ++fill) { // the first touches new memory, here and below
        channel_->send({.op = Op::BareFill, .bytes = bytes, .value = ++ready_});
        const Message answer = channel_->expect(Op::BareFill);
        if (fill > 0) floor.push_back(static_cast<double>(answer.bytes) / 1000);
      }
      check_filled(chunk.pointer(), bytes, ready_, "the bare fill");
      drop_chunk();
    }
    Region region = this->region(bytes);
    for (std::uint32_t fill = 0; fill <= fills; ++fill) {
      channel_->send({.op = Op::WholeLoan, .bytes = bytes});
      Loan loan = lend(region.pointer(), bytes, GPULOAN_ACCESS_WRITE, false, 0);
      wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_done(slice); });
      const std::uint64_t done = clock_ns();
      wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
      const Message answer = channel_->expect(Op::WholeLoan);
      check_filled(region.pointer(), bytes, answer.value, "the loan");
      if (fill > 0) times.push_back(static_cast<double>(done - answer.bytes) / 1000);
    }
    region.destroy();
    drained();
    out.add_block(std::move(floor), std::move(times));
  }
  return out;
}

} // namespace gpuloan::tool::bench
