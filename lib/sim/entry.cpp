// SPDX-License-Identifier: MIT
//
// The checks, each in one place.
#include <sim/capture.hpp>
#include <sim/config.hpp>
#include <sim/context.hpp>
#include <sim/entry.hpp>
#include <sim/process.hpp>

namespace gpuloan::sim {

namespace {

CuResult check_context(ContextRef& out) {
  if (!has_current_context()) return InvalidContext;
  out = current_context();
  return out ? out->sticky.load(std::memory_order_acquire) : ContextIsDestroyed;
}

} // namespace

CuResult admit(Row row, Need need, Capture capture) {
  if (need == Need::Nothing) return Success;
  if (const CuResult result = process_state()) return result;
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
