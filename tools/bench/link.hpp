// SPDX-License-Identifier: MIT
//
// A worker of the device's cases: its process, the socket to it, and its connection to the library's context here.
#pragma once

#include "pair.hpp"

#include <memory>

namespace gpuloan::tool::bench {

struct BenchOptions;

struct Link {
  Child child;
  std::unique_ptr<Channel> channel;
  Peer peer; // empty until it joined
};

// Returns when the worker is up: its driver is open, its CUDA context and its stream are made.
[[nodiscard]] Link start_worker(const BenchOptions& options);
// Connects its library with `context`; returns when the handshake is complete. Other events are dropped meanwhile.
void join(Link& link, Context& context, const Deadline& deadline);

} // namespace gpuloan::tool::bench
