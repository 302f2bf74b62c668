// SPDX-License-Identifier: MIT
//
// Memory for PyTorch's pluggable allocator (torch.cuda.MemPool): one chunk per block, made with a POSIX FD handle, so that
// the rung vmm lends it as one piece however large it is. It is foreign memory like any other VMM memory of the process:
// lending it knows nothing of this file.
#pragma once

#include <driver/driver.hpp>

namespace gpuloan::memory {

// `bytes` (not 0) on the device of that ordinal, rounded up to the granularity, in its primary context; makes that context if need be.
[[nodiscard]] Result<cuda::DevicePtr> torch_allocate(const std::shared_ptr<const driver::Driver>& driver, std::size_t bytes, int ordinal);
// Gives it back once the work that is in `stream` now has passed; waits a second for that, then leaves it to a later call.
// INVALID for what torch_allocate did not return, or was freed.
[[nodiscard]] Result<void> torch_release(cuda::DevicePtr pointer, cuda::Stream stream);

} // namespace gpuloan::memory
