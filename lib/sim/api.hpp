// SPDX-License-Identifier: MIT
//
// What stands behind each exported function, under its base name. exports.cpp calls these after the fault hook and the
// checks that all functions share (entry.hpp); a body may therefore rely on what its row in entries.inc demands.
#pragma once

#include <sim/rows.hpp>

namespace gpuloan::sim::api {

#define GPULOAN_CUDA(need, since, group, name, exported, params) CuResult name params;
#include <driver/symbols.inc>
#include <sim/extra_symbols.inc>
#undef GPULOAN_CUDA

} // namespace gpuloan::sim::api
