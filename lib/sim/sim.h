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

#ifdef __cplusplus
}
#endif
#endif
