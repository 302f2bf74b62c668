// SPDX-License-Identifier: MIT
//
// The pool swap.
#include <abi/abi.hpp>

#include <memory/pool_swap.hpp>

using namespace gpuloan;
using namespace gpuloan::abi;

namespace {

using Step = Result<void> (*)(const std::shared_ptr<const driver::Driver> &, int);

gpuloan_status on_driver(Step step, int ordinal) {
  return guard([&]() -> Result<void> {
    auto opened = driver::Driver::open(nullptr);
    if (!opened) return forward(std::move(opened.error()));
    return step(*opened, ordinal);
  });
}

} // namespace

extern "C" {

gpuloan_status gpuloan_pool_install(int32_t device) { return on_driver(memory::install_pool, device); }

gpuloan_status gpuloan_pool_uninstall(int32_t device) { return on_driver(memory::uninstall_pool, device); }

} // extern "C"
