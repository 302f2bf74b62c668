// SPDX-License-Identifier: MIT
//
// The io_uring engine of a build without liburing: it names itself as missing. meson picks this file or uring.cpp.
#include <loop/engine.hpp>

namespace gpuloan::loop {

Result<std::unique_ptr<Engine>> make_uring() {
  return fail(GPULOAN_ERR_UNSUPPORTED, "io_uring: built without liburing");
}

} // namespace gpuloan::loop
