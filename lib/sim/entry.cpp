// SPDX-License-Identifier: MIT
//
// The checks, each in one place.
#include <sim/capture.hpp>
#include <sim/config.hpp>
#include <sim/context.hpp>
#include <sim/entry.hpp>
#include <sim/process.hpp>
#include <sim/stream.hpp>

namespace gpuloan::sim {

namespace {

CuResult check_context(ContextRef& out) {
  if (!has_current_context()) return InvalidContext;
  out = current_context();
  return out ? out->sticky.load(std::memory_order_acquire) : ContextIsDestroyed;
}

// `sim_answers libcuda.so.1 standing`
bool stands(Row row) {
  switch (row) {
    case Row::cuMemAlloc:
    case Row::cuMemHostRegister:
    case Row::cuStreamCreate:
    case Row::cuStreamDestroy:
    case Row::cuEventCreate:
    case Row::cuEventDestroy:
    case Row::cuEventRecord:
    case Row::cuMemcpyAsync:
    case Row::cuMemcpyHtoDAsync:
    case Row::cuMemcpyDtoHAsync:
    case Row::cuMemcpyDtoDAsync:
    case Row::cuMemsetD8Async:
    case Row::cuMemsetD32Async: return true;
    default: return false;
  }
}

} // namespace

CuResult admit(Row row, Need need, Capture capture) {
  if (need == Need::Nothing) return Success;
  if (const CuResult result = process_state()) return result;
  if (config().calls_stand && stands(row)) stand_behind_others();
  if (!config().has(row_info(row).group)) return NotSupported;
  ContextRef context;
  if (need == Need::Context) {
    if (const CuResult result = check_context(context)) return result;
  }
  switch (capture) {
    case Capture::Safe: break;
    case Capture::Unsafe: return capture_forbids_unsafe_call();
    case Capture::Forbidden: return capture_forbids_context(*context);
  }
  return Success;
}

} // namespace gpuloan::sim
