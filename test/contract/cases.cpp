// SPDX-License-Identifier: MIT
#include "suite.hpp"

namespace loan_test {
namespace {

constexpr Case kCases[] = {
    {"read loan behind a lagging stream", read_loan},
    {"request, grant, write loan", write_loan},
    {"50 turns of two open loans", many_turns},
    {"sizes from 0 to 20 MiB", sizes},
    {"32 loans in flight", in_flight},
    {"work on several streams", several_streams},
    {"busy rules", busy_rules},
    {"cancel of a held loan", cancel_held},
    {"cancel of a loan that waits", cancel_waiting},
    {"failed work", failed_work},
    {"returned without done", returned_unfinished},
    {"denied request", denied_request},
    {"metadata", metadata},
    {"wrong calls", wrong_calls},
    {"not ready yet", not_ready_yet},
    {"wait on a stream", wait_on_stream, false, no_stream_waits},
    {"no wait on a stream", no_wait_elsewhere, false, stream_waits},
    {"worker killed with a write loan", killed_worker, true},
    {"worker killed, its socket kept open", killed_socket_kept, true},
    {"worker killed after done", done_then_killed, true},
    {"worker stopped for a while", stopped_worker, true},
    {"exporter killed", killed_exporter, true},
    {"worker closes with loans out", closed_worker},
    {"worker closes right after its word", closed_after_its_word},
    {"two workers", two_workers},
    {"an exporter that spoils DONE", spoiled_done, false, no_words_by_device},
    {"caller-driven importer", caller_importer},
    {"caller-driven exporter", caller_exporter, false, no_caller_driven},
    {"exporter looks after the worker was killed", late_exporter, true, no_caller_driven},
    {"host memory", host_memory, false, only_host_rung},
    {"worker without a device", cpu_worker, false, no_cpu_worker},
    {"foreign pointer", foreign_pointer, false, only_host_rung},
    {"host memory that is not pinned", unpinned_ring, true, no_pin_limit},
    {"nothing can be pinned", nothing_pinned, true, no_pin_limit},
    {"no ring can be made", no_ring, true, no_pin_limit},
    {"lent on to another worker", lent_on, false, only_vmm},
    {"lent on to a worker that is killed", lent_on_and_killed, true, only_vmm},
    {"lent on exclusively, its maker killed", exclusive_of_a_lost_maker, true, only_simulated_vmm},
    {"addresses of many imports", addresses_of_imports, true, no_costs},
    {"no CUDA context before a loan", no_context_before_a_loan, true, no_costs},
    {"a canary that fails", canary_fails, true, no_rung_above},
    {"a host canary that fails", host_canary_fails, true, only_host_fails},
    {"a canary without memory", canary_without_memory, true, only_host_fails},
    {"a canary that is not answered", canary_unanswered, true, no_zero_copy},
    {"first loans of several threads", canary_shared, false, no_zero_copy},
    {"a CUDA context that fails", failed_context, true, only_simulated},
    {"one of two readers killed", one_reader_killed, true},
    {"eight readers of one region", eight_readers, false, no_eight_peers},
    {"one of two views ends", one_view_ends},
    {"chunks come and go", chunks_come_and_go, false, no_costs},
    {"twenty exporters one after the other", many_exporters, true},
    {"handles left behind", handles_left_behind},
};

} // namespace

std::span<const Case> contract_cases() { return kCases; }

} // namespace loan_test
