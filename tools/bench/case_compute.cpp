// SPDX-License-Identifier: MIT
//
// Both processes compute, so the GPU changes between their contexts twice in each pair of turns (S1). There is no compiler here: a
// kernel is played by a fill of enough bytes. The parent's goes to memory of its own and is queued before READY; the worker's goes to what
// is lent. The floor does the same with bare control words, both written by the streams.
#include "run.hpp"

namespace gpuloan::tool::bench {

std::uint64_t Run::compute_bytes() const { return session_.driver.simulated != 0 ? 4 * kMiB : 832 * kMiB; } // about 200 us on an H200

Comparison Run::compute(std::uint64_t bytes) {
  Comparison out{.name = "compute", .floor = "control words, written by both streams", .bytes = bytes};
  const Counts counts = this->counts(bytes);
  const BareChunk own(calls_, options_.common.device, bytes), chunk(calls_, options_.common.device, bytes);
  share_chunk(chunk);
  Region region = this->region(bytes);
  std::uint32_t value = 0;
  const auto work = [&] { cuda_.fill32(own.pointer(), ++value, bytes / 4); };
  for (std::uint32_t block = 0; block <= counts.blocks; ++block) {
    auto floor = bare_spin(counts.turns, chunk, bytes, [&](std::uint64_t ready) {
      work();
      calls_.check("cuStreamWriteValue64", calls_.write_value(cuda_.stream(), words_->pointer(kReadyWord), ready, cuda::WriteDefault));
    });
    auto times = loan_turns(counts.turns, region, [&](Loan& loan) {
      work();
      loan.ready(cuda_.stream());
    });
    check_filled(own.pointer(), bytes, value, "the parent's own work");
    if (block > 0) out.add_block(std::move(floor), std::move(times)); // the first warms up
  }
  region.destroy();
  return out;
}

} // namespace gpuloan::tool::bench
