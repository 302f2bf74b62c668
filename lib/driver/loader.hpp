// SPDX-License-Identifier: MIT
//
// Loader makes a Driver of an opened library: it resolves the symbol table, initialises the driver and keeps the
// process's list of drivers. For lib/driver only.
#pragma once

#include <driver/driver.hpp>
#include <driver/library.hpp>


namespace gpuloan::driver {

class Loader {
 public:
  // The Driver of this library, made at the first call for it.
  [[nodiscard]] static Result<std::shared_ptr<const Driver>> load(const Library& library);
  // Fills in which symbols and groups are missing from `driver.call`.
  static void note_missing(Driver& driver);

 private:
  [[nodiscard]] static Result<std::shared_ptr<const Driver>> start(const Library& library);
};

// The Error for a driver whose cuInit said `code`, with remedy.
[[nodiscard]] Error startup_error(const Driver& driver, CuResult code);
// The Error for a library that lacks required symbols, if it does.
[[nodiscard]] Result<void> check_required(const Driver& driver);
// "13.0" for 13000, "of unknown version" for 0.
[[nodiscard]] std::string version_text(int version);
// "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory", in the driver's words where it knows the code.
[[nodiscard]] std::string code_text(const Driver& driver, CuResult code);

} // namespace gpuloan::driver
