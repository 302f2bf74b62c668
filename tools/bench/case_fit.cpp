// SPDX-License-Identifier: MIT
//
// How much of the device one loan can be, beside one bare VMM allocation, both found by the same bisection and handled by the
// worker in the same way. Everything is given back before the next size is tried.
#include "run.hpp"

namespace gpuloan::tool::bench {
namespace {

// The largest multiple of `step` up to `most` for which fits() is true.
template <typename Fits>
std::uint64_t largest(std::uint64_t step, std::uint64_t most, Fits&& fits) {
  std::uint64_t low = 0, high = most / step + 1; // fits, and does not
  while (high - low > 1) {
    const std::uint64_t middle = low + (high - low) / 2;
    (fits(middle * step) ? low : high) = middle;
  }
  return low * step;
}

} // namespace

bool Run::fits_bare(std::uint64_t bytes) {
  try {
    const BareChunk chunk(calls_, options_.common.device, bytes);
    share_chunk(chunk);
    channel_->send({.op = Op::BareProbe, .count = session_.driver.simulated, .bytes = bytes, .value = ++ready_});
    static_cast<void>(channel_->expect(Op::BareProbe));
    drop_chunk();
  } catch (const Failure& failure) {
    if (failure.code() != ExitDeviceMemory) throw;
    drop_chunk();
    return false;
  }
  return true;
}

bool Run::fits_lent(std::uint64_t bytes) {
  Region region;
  try {
    region = this->region(bytes);
  } catch (const StatusError& error) {
    if (error.status() != GPULOAN_ERR_DEVICE_MEMORY) throw;
    drained();
    return false;
  }
  channel_->send({.op = Op::LoanProbe, .count = session_.driver.simulated, .bytes = bytes, .value = ++ready_});
  Loan loan = lend(region.pointer(), bytes, GPULOAN_ACCESS_WRITE, false, 0);
  bool fits = true;
  try {
    static_cast<void>(channel_->expect(Op::LoanProbe));
  } catch (const Failure& failure) { // the worker could not map it
    if (failure.code() != ExitDeviceMemory) throw;
    fits = false;
  }
  wait_in_slices(deadline_, [&](Milliseconds slice) {
    try {
      loan.wait_end(slice);
    } catch (const StatusError& error) {
      if (fits || error.status() == GPULOAN_ERR_TIMEOUT) throw; // else it is the outcome that was expected
    }
  });
  region.destroy();
  drained();
  return fits;
}

Comparison Run::fit(std::uint64_t step) {
  Comparison out{.name = "fit", .floor = "one bare VMM allocation", .bytes = step, .sizes = true};
  const std::uint64_t most = session_.device.total_bytes;
  for (std::uint32_t block = 0; block < (options_.quick ? 1U : 3U); ++block) {
    const std::uint64_t bare = largest(step, most, [&](std::uint64_t bytes) { return fits_bare(bytes); });
    const std::uint64_t lent = largest(step, most, [&](std::uint64_t bytes) { return fits_lent(bytes); });
    if (bare == 0) throw Failure(ExitDeviceMemory, "case fit: not even one bare allocation of the step fits; somebody else has the device's memory");
    out.add_block({static_cast<double>(bare)}, {static_cast<double>(lent)});
  }
  return out;
}

} // namespace gpuloan::tool::bench
