// SPDX-License-Identifier: MIT
//
// The pool rung (experimental): one allocation of a pool of ours, lent by its pointer again and again. Each loan is imported, filled
// and let go of, and so is each turn of the floor.
#include "bare_pool.hpp"
#include "run.hpp"

#include "../output.hpp"

namespace gpuloan::tool::bench {

Comparison Run::pool(std::uint64_t bytes) {
  Comparison out{.name = "pool", .floor = "import of kept export data, a record each way", .bytes = bytes};
  if ((session_.device.floors & GPULOAN_FLOOR_POOLS) == 0) {
    throw Failure(ExitUnsupported, std::string("case pool: the device has no memory pools that can be shared; ") + session_.device.floor_reason);
  }
  if (bytes > session_.device.pool_import_limit) { // it would kill the floor's importer (P3)
    throw Failure(ExitUnsupported, "case pool: importing " + size_text(bytes) + " of a pool is not known to be safe, the limit is " +
                                       size_text(session_.device.pool_import_limit) + "; give a smaller --size");
  }
  const Counts counts = this->counts(bytes);
  const BarePool pool(cuda_, options_.common.device, bytes);
  pool.share(*channel_);
  for (std::uint32_t block = 0; block <= counts.blocks; ++block) {
    auto floor = bare_records(Op::BarePool, counts.turns, pool.pointer(), bytes);
    auto times = fresh_loans(counts.turns, {pool.pointer(), bytes}, bytes, 0, GPULOAN_RUNG_POOL);
    if (block > 0) out.add_block(std::move(floor), std::move(times)); // the first warms up
  }
  return out;
}

} // namespace gpuloan::tool::bench
