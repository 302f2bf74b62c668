/* SPDX-License-Identifier: MIT
 *
 * What the simulated driver offers beyond the driver API, for tests. The functions are exported by libgpuloan-sim.so
 * under these names; programs that load the library with dlopen look them up with dlsym. A stream is a CUstream of the
 * simulated driver (NULL: the legacy default stream of the current context). An int that is returned is a CUresult.
 */
#ifndef GPULOAN_SIM_H
#define GPULOAN_SIM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Queues an operation that takes this long. */
int gpuloan_sim_stream_delay(void *stream, unsigned microseconds);

/* A held stream starts no further operation until it is released; one that runs already goes on. */
int gpuloan_sim_stream_hold(void *stream);
int gpuloan_sim_stream_release(void *stream);

/* The current context fails as by a device fault: `result` (for example 700) is what all its later calls return. */
int gpuloan_sim_context_fail(int result);

/* From now on this process may register no more than this many bytes of host memory, all in all: the calls beyond return
 * CUDA_ERROR_OUT_OF_MEMORY, as under a limit on locked memory. UINT64_MAX: no limit. */
void gpuloan_sim_pin_limit(uint64_t bytes);

/* From now on every call returns CUDA_ERROR_DEINITIALIZED, as after a real driver's exit handler. */
void gpuloan_sim_deinitialize(void);

/* How many of these this process holds now: "contexts", "streams", "events", "handles" (of VMM memory), "reservations",
 * "mappings", "allocations" (from pools too), "imports" (opened memory handles and pool pointers), "host" (registered
 * or allocated host ranges), "waits" (streams that stand in cuStreamWaitValue64), "pools"; "reserved-bytes" (of addresses of
 * the device's). -1 for another word. */
int64_t gpuloan_sim_live(const char *what);

/* How often a function was called in this process, by its base name ("cuMemMap"); -1 for an unknown name. */
int64_t gpuloan_sim_calls(const char *function);

/* The witness: tests say who may touch which device memory, and each copy and fill that breaks it is reported when it runs.
 * A process id of 0 is nobody, UINT32_MAX anybody; who may write may read. Claims hold for all processes of the machine.
 *
 * claim: of [pointer, pointer + bytes), which is device memory of one chunk as this process has it mapped, or a change of the
 * rights of this process's claim of exactly that. 1 (invalid value) where it is none, or overlaps another claim; 2 (out of
 * memory) beyond 4096 claims. `note` comes back in the reports.
 * unclaim: the end of such a claim; 1 where there is none. unclaim_all: of all claims that a process made, living or dead. */
int gpuloan_sim_claim(uint64_t pointer, uint64_t bytes, uint32_t writer, uint32_t second_writer, uint32_t reader, uint64_t note);
int gpuloan_sim_unclaim(uint64_t pointer, uint64_t bytes);
void gpuloan_sim_unclaim_all(uint32_t process);
/* How many touches broke a claim on this machine; -1 before cuInit. The sentence of one of the first 64 of them; 0 where there
 * is none, and then nothing is written. */
int64_t gpuloan_sim_witness_reports(void);
int gpuloan_sim_witness_report(uint64_t index, char *out_text, uint64_t room);

/* GPU work that outlives its process (S13): forks a child that waits until this process is dead and then writes `value` to the
 * device memory [pointer, pointer + bytes) of one chunk again and again for so long, as this process does in the witness's
 * eyes. The child has what a fork inherits, and ends by itself, at the latest 10 s after the fork plus that time. Its process
 * id; -1 where that is no such memory or nothing could be forked. */
int gpuloan_sim_orphan_writer(uint64_t pointer, uint64_t bytes, uint32_t value, unsigned milliseconds);

#ifdef __cplusplus
}
#endif
#endif
