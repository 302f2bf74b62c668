// SPDX-License-Identifier: MIT
//
// Finding and opening the shared library of a driver; nothing in it is called here. For lib/driver only.
#pragma once

#include <base/status.hpp>

#include <string>

namespace gpuloan::driver {

// An opened library. Its handle is never closed: threads of the driver may still run in it.
struct Library {
  void* handle = nullptr;
  std::string found_by; // as gpuloan_driver_info.found_by
};

// `choice` as for Driver::open. Errors: INVALID, NO_DRIVER.
[[nodiscard]] Result<Library> open_library(const char* choice);
// The simulated driver: GPULOAN_SIM_LIBRARY alone if it is set; else beside this code, in the installed library folder,
// in the build tree that this code lies in, by the loader's search.
[[nodiscard]] Result<Library> open_sim_library();
// The file that `handle` was loaded from, symbolic links resolved.
[[nodiscard]] std::string loaded_path(void* handle);

// dlopen of a path, NO_DRIVER with a sentence where it fails.
[[nodiscard]] Result<void*> open_path(const std::string& path);

} // namespace gpuloan::driver
