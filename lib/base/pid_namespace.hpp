// SPDX-License-Identifier: MIT
//
// Whether another process is in this one's PID namespace. CUDA's legacy handles and pool pointers may not open across two of them.
#pragma once

#include <sys/types.h>

namespace gpuloan {

// `pid` as this process sees it, 0 for one that it does not see. True also where nothing can be learned of it.
[[nodiscard]] bool in_own_pid_namespace(pid_t pid) noexcept;

} // namespace gpuloan
