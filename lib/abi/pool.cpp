// SPDX-License-Identifier: MIT
//
// The pool swap.
#include <abi/abi.hpp>

#include <memory/pool_swap.hpp>

using namespace gpuloan;
using namespace gpuloan::abi;

extern "C" {

gpuloan_status gpuloan_pool_install(int32_t device) {
  return on_driver([&](const auto& driver) { return memory::install_pool(driver, device); });
}

gpuloan_status gpuloan_pool_uninstall(int32_t device) {
  return on_driver([&](const auto& driver) { return memory::uninstall_pool(driver, device); });
}

} // extern "C"
