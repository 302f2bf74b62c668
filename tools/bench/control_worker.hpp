// SPDX-License-Identifier: MIT
#pragma once

#include "control.hpp"

namespace gpuloan::tool::bench {

// Does what the parent asks over `fd` until it says BYE.
void run_control_worker(int fd, std::uint32_t timeout_ms);

} // namespace gpuloan::tool::bench
