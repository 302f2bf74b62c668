// SPDX-License-Identifier: MIT
//
// What has to hold for memory that gpuloan did not make: cuMemAlloc blocks, other allocators' VMM memory, pools, host memory.
// All rungs are allowed in these cases; each case names what it wants.
#pragma once

#include "../support/run.hpp"
#include "foreign_memory.hpp"

#include <atomic>

namespace loan_test {

// suite_foreign_kinds.cpp: what each kind of pointer is carried by, or why it is refused
template <Made made>
void kind_table(const Bench& bench);
void sizes_and_seams(const Bench& bench);
void ranges_refused(const Bench& bench);
void under_mps_copied(const Bench& bench);

// suite_foreign_views.cpp: several loans of one block
void views_of_a_block(const Bench& bench);
void address_used_again(const Bench& bench);
void many_pieces(const Bench& bench);
void pieces_cancelled(const Bench& bench);
void pieces_killed(const Bench& bench);
void closing_stuck(const Bench& bench);
void closing_waits(const Bench& bench);

// suite_foreign_raw.cpp: an exporter made by hand
void any_buffer_number(const Bench& bench);
void announced_and_lost(const Bench& bench);

// suite_foreign_torch.cpp: memory of gpuloan_torch_malloc
void torch_one_piece(const Bench& bench);
void torch_freed_early(const Bench& bench);

// suite_foreign_release.cpp: the release function is called once, and when
void release_ends(const Bench& bench);
void release_grants(const Bench& bench);
void release_lends_again(const Bench& bench);
void release_killed(const Bench& bench);
void release_closed(const Bench& bench);
void release_peer_closed(const Bench& bench);
void release_context(const Bench& bench);
void release_refused(const Bench& bench);

// suite_foreign_quarantine.cpp: a lost peer whose forked child lives on
void quarantine_alloc(const Bench& bench);
void quarantine_vmm(const Bench& bench);
void quarantine_behind_context(const Bench& bench);
void surrendered_arena(const Bench& bench);

const char* under_mps_skip(const Bench& bench);
const char* no_stream_wait_skip(const Bench& bench);
const char* no_mps_skip(const Bench& bench);

// A release function that counts.
struct Released {
  std::atomic<int> calls = 0;
  static void call(void* user) { ++static_cast<Released*>(user)->calls; }
  void expect_none(std::string_view what, Where where = Where::current()) const { expect_equal(calls.load(), 0, what, where); }
  // Waits for the first call; a second one shows at the end of the case.
  void expect_once(std::string_view what, Where where = Where::current()) const {
    if (!becomes([this] { return calls.load() > 0; })) fail(std::string(what) + ": the release function is not called", where);
    expect_equal(calls.load(), 1, what, where);
  }
};
[[nodiscard]] inline LendArgs with_release(LendArgs args, Released& released) {
  args.release = Released::call;
  args.release_user = &released;
  return args;
}

} // namespace loan_test
