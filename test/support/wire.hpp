// SPDX-License-Identifier: MIT
//
// What a test says to its worker, over a socketpair of its own: one command, one answer. Loans have a number that the test
// chooses, since a request has no other before it is granted.
#pragma once

#include <gpuloan/gpuloan.h>

#include <cstdint>
#include <type_traits>

namespace loan_test {

enum class Op : std::uint32_t {
  Open,      // makes the context and shakes hands; driver, gate, flags, wait_limit, device
  Offered,   // waits for the offer of the loan with the exporter's number `id`, which becomes `loan`
  Request,   // bytes, metadata_bytes, seed
  Acquire,   // timeout_ms
  AcquireOn, // stream, timeout_ms
  Check,     // seed, stream: the view holds the pattern; or, where `bytes` is not 0, these bytes of it from `value` on do
  Fill,      // seed, stream: the view, or that part of it, gets the pattern
  Metadata,  // seed, metadata_bytes: the view has it
  DeviceOf,  // of the view's pointer: value, and its UUID in text
  Done,      // stream; kCpuStream: the CPU's
  UsedOn,    // stream
  Return,
  Fail,      // text
  WaitDone,  // timeout_ms
  WaitEnd,   // timeout_ms
  Report,
  Unref,
  Hold,    // stream
  Release, // stream
  Delay,   // stream: 20 ms of work
  Idle,    // stream; value 1: idle
  Event,   // waits for an event of type `value`; timeout_ms
  Stats,
  Calls,     // text: how often the simulated driver's function was called; -1 on the real one
  Live,        // text: what the simulated driver's gpuloan_sim_live says of it
  FailContext, // the simulated driver's context fails as by a device fault
  Fork,      // forks a child that sleeps; value: its pid
  ClosePeer,
  Close,     // destroys the context and ends; trouble where something stayed behind
};

enum OpenFlags : std::uint32_t {
  OpenCallerLoop = 1,
  OpenNoDevice = 2,
  OpenKeepHandles = 4, // Close leaves the loans' references to the context's end
  OpenBare = 8,        // calls of gpuloan are made from a thread without a current context
  OpenLate = 16,       // makes no CUDA context of its own: the library's is the first
};

inline constexpr std::uint32_t kCpuStream = UINT32_MAX;

struct Command {
  Op op = Op::Stats;
  std::uint32_t stream = 0;
  std::uint64_t loan = 0;
  std::uint64_t id = 0;
  std::uint64_t bytes = 0;
  std::uint64_t seed = 0;
  std::uint64_t value = 0;
  std::uint32_t metadata_bytes = 0;
  std::uint32_t timeout_ms = 0;
  std::uint32_t flags = 0;
  std::uint32_t memory = GPULOAN_MEMORY_DEVICE;
  std::uint32_t gate = GPULOAN_GATE_AUTO;
  std::uint32_t rungs = 0;
  std::uint32_t wait_limit = 0;
  std::int32_t device = 0;
  char text[256] = {};
};

struct Reply {
  gpuloan_status status = GPULOAN_OK; // of the gpuloan call
  std::uint32_t turn = 0;             // of the view
  std::uint32_t access = 0;
  std::uint32_t host = 0; // 1: the view has a host address
  std::uint64_t bytes = 0;
  std::uint64_t value = 0;
  gpuloan_loan_report report = {};
  gpuloan_stats stats = {};
  char text[GPULOAN_TEXT_MAX] = {};    // of the error, or of the event
  char trouble[GPULOAN_TEXT_MAX] = {}; // what the worker itself found wrong
};

static_assert(std::is_trivially_copyable_v<Command> && std::is_trivially_copyable_v<Reply>);

} // namespace loan_test
