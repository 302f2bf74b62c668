// SPDX-License-Identifier: MIT
//
// The contract suite: what has to hold in every cell of {vmm, pool, ipc, host} x {memop, event, host} x {epoll, io_uring}, on the
// simulated and on the real driver, between two processes; and, as far as no process has to die, between two threads.
#pragma once

#include "../support/run.hpp"

namespace loan_test {

inline constexpr std::uint32_t kNoticedMs = 5000; // a death is noticed by then

void read_loan(const Bench& bench);
void write_loan(const Bench& bench);
void many_turns(const Bench& bench);
void sizes(const Bench& bench);
void in_flight(const Bench& bench);
void several_streams(const Bench& bench);

void busy_rules(const Bench& bench);
void cancel_held(const Bench& bench);
void cancel_waiting(const Bench& bench);
void failed_work(const Bench& bench);
void returned_unfinished(const Bench& bench);
void denied_request(const Bench& bench);
void metadata(const Bench& bench);
void wrong_calls(const Bench& bench);

void not_ready_yet(const Bench& bench);
void wait_on_stream(const Bench& bench);
const char* no_stream_waits(const Bench& bench);
void no_wait_elsewhere(const Bench& bench);
const char* stream_waits(const Bench& bench);

void killed_worker(const Bench& bench);
void killed_socket_kept(const Bench& bench);
void done_then_killed(const Bench& bench);
void killed_exporter(const Bench& bench);
int run_victim(int control, int loan_end, const Cell& cell); // the exporter that dies
void stopped_worker(const Bench& bench);
void closed_worker(const Bench& bench);
void closed_after_its_word(const Bench& bench);
void two_workers(const Bench& bench);

void caller_importer(const Bench& bench);
void caller_exporter(const Bench& bench);
void late_exporter(const Bench& bench);
const char* no_caller_driven(const Bench& bench);

void spoiled_done(const Bench& bench);
const char* no_words_by_device(const Bench& bench);

void host_memory(const Bench& bench);
void cpu_worker(const Bench& bench);
void foreign_pointer(const Bench& bench);
void unpinned_ring(const Bench& bench);
void nothing_pinned(const Bench& bench);
void no_ring(const Bench& bench);
const char* no_pin_limit(const Bench& bench);
const char* only_host_rung(const Bench& bench);
const char* no_cpu_worker(const Bench& bench);

void lent_on(const Bench& bench);
void lent_on_and_killed(const Bench& bench);
void exclusive_of_a_lost_maker(const Bench& bench);
const char* only_vmm(const Bench& bench);
const char* only_simulated_vmm(const Bench& bench);

void addresses_of_imports(const Bench& bench);
void no_context_before_a_loan(const Bench& bench);
const char* no_costs(const Bench& bench);

void canary_fails(const Bench& bench);
void host_canary_fails(const Bench& bench);
void canary_without_memory(const Bench& bench);
void canary_unanswered(const Bench& bench);
void canary_shared(const Bench& bench);
const char* no_rung_above(const Bench& bench);
const char* only_host_fails(const Bench& bench);
const char* no_zero_copy(const Bench& bench);

void failed_context(const Bench& bench);
void one_reader_killed(const Bench& bench);
const char* only_simulated(const Bench& bench);

void eight_readers(const Bench& bench);
const char* no_eight_peers(const Bench& bench);
void one_view_ends(const Bench& bench);
void chunks_come_and_go(const Bench& bench);
void many_exporters(const Bench& bench);

void handles_left_behind(const Bench& bench);

[[nodiscard]] std::span<const Case> contract_cases();

} // namespace loan_test
