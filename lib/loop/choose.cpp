// SPDX-License-Identifier: MIT
//
// Which engine runs, and the sentence that says why. An engine that was asked for by name is used or the call fails;
// nobody gets another one silently. AUTO takes epoll on any failure of io_uring, whatever its errno: the list of ways in
// which kernels, filters and limits refuse a ring is open (KERNEL-FACTS 3).
#include <loop/engine.hpp>

#include <base/log.hpp>

#include <cstdlib>
#include <string_view>

namespace gpuloan::loop {
namespace {

constexpr const char* kRingNotAllowed =
    "a ring belongs to a loop thread of the exporter: importers and caller-driven contexts use epoll";

Result<Choice> use_epoll(std::string reason) {
  auto engine = make_epoll();
  if (!engine) return forward(std::move(engine.error()));
  return Choice{std::move(*engine), std::move(reason)};
}

Result<Choice> use_ring(std::string reason) {
  auto engine = make_uring();
  if (!engine) return forward(std::move(engine.error()));
  return Choice{std::move(*engine), std::move(reason)};
}

Result<Choice> choose_freely(bool ring_allowed) {
  if (!ring_allowed) return use_epoll(std::string("epoll: ") + kRingNotAllowed);
  auto ring = use_ring("io_uring: its self-test passed");
  if (ring) return ring;
  GPULOAN_LOG(GPULOAN_LOG_DEBUG, "the loop uses epoll: " + ring.error().text);
  return use_epoll("epoll: " + ring.error().text);
}

} // namespace

Result<Choice> make_engine(gpuloan_engine wanted, bool ring_allowed) {
  switch (wanted) {
    case GPULOAN_ENGINE_EPOLL:
      return use_epoll("epoll: asked for in the options");
    case GPULOAN_ENGINE_IO_URING:
      if (!ring_allowed) return fail(GPULOAN_ERR_UNSUPPORTED, std::string("io_uring: ") + kRingNotAllowed);
      return use_ring("io_uring: asked for in the options");
    case GPULOAN_ENGINE_AUTO:
      break;
    default:
      return fail(GPULOAN_ERR_INVALID, "engine " + std::to_string(static_cast<int>(wanted)) + " is not a gpuloan_engine");
  }
  const char* text = std::getenv("GPULOAN_ENGINE");
  const std::string_view name = text != nullptr ? text : "";
  if (name.empty() || name == "auto") return choose_freely(ring_allowed);
  if (name == "epoll") return use_epoll("epoll: GPULOAN_ENGINE=epoll");
  // The variable speaks to every context of the process, also to those that never have a ring.
  if (name == "io_uring") return ring_allowed ? use_ring("io_uring: GPULOAN_ENGINE=io_uring") : choose_freely(false);
  return fail(GPULOAN_ERR_INVALID, "GPULOAN_ENGINE=" + std::string(name) + " is none of auto, epoll and io_uring");
}

} // namespace gpuloan::loop
