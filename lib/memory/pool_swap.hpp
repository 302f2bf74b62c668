// SPDX-License-Identifier: MIT
//
// The pool swap (EXPERIMENTAL): a memory pool that can be shared in the place of a device's current one, so that what a
// framework allocates by cuMemAllocAsync can be lent over the rung pool. One for each device, kept by the process.
//
// A pool that ends its time with memory in use is set aside, not destroyed: the memory may still be lent, for which the
// driver is asked about its pool. It is destroyed at the next call here that finds nothing of it in use. Its threshold is 0
// meanwhile, so freed memory goes back to the device (but see P8). At the end of the process nothing is done.
#pragma once

#include <driver/driver.hpp>

namespace gpuloan::memory {

// `ordinal` alone says which device; the thread's current context does not matter, and stays. The device's primary context
// is made, and held as long as the pool. STATE when one is installed, UNSUPPORTED without pools, NO_DEVICE, FORKED, DRIVER.
[[nodiscard]] Result<void> install_pool(const std::shared_ptr<const driver::Driver>& driver, int ordinal);
// Makes the pool current again that was so before, unless somebody has put another in its place. STATE when none is
// installed; FORKED, DRIVER.
[[nodiscard]] Result<void> uninstall_pool(const std::shared_ptr<const driver::Driver>& driver, int ordinal);

} // namespace gpuloan::memory
