// SPDX-License-Identifier: MIT
//
// Errors inside the library: a status of the public enum plus the sentence that explains it.
//
// A Result<T> either has a value or an Error. The status says what died (see gpuloan.h); the text names the layer, the
// call that failed, its errno or CUresult by name and number, and what to do about it. Nothing in lib/ throws on purpose.
#pragma once

#include <gpuloan/gpuloan.h>

#include <expected>
#include <string>
#include <utility>

namespace gpuloan {

struct Error {
  gpuloan_status status = GPULOAN_ERR_INTERNAL;
  std::string text;
};

// Of host memory.
[[nodiscard]] inline Error out_of_memory() { return Error{GPULOAN_ERR_NO_MEMORY, "out of memory"}; }

template <typename T>
using Result = std::expected<T, Error>;

[[nodiscard]] inline std::unexpected<Error> fail(gpuloan_status status, std::string text) {
  return std::unexpected(Error{status, std::move(text)});
}

[[nodiscard]] inline std::unexpected<Error> forward(Error&& error) { return std::unexpected(std::move(error)); }

// "socket: Too many open files (EMFILE)": `what` names the call, `code` is a positive errno.
[[nodiscard]] std::string errno_text(const char* what, int code);
[[nodiscard]] std::unexpected<Error> fail_errno(gpuloan_status status, const char* what, int code);
// EMFILE, ENFILE -> FD_LIMIT; ENOMEM -> NO_MEMORY; anything else -> SYSTEM.
[[nodiscard]] std::unexpected<Error> fail_errno(const char* what, int code);

} // namespace gpuloan

// Returns the error of a Result<void> expression from the enclosing function.
#define GPULOAN_TRY(expression)                                                                                        \
  do {                                                                                                                 \
    if (auto result_ = (expression); !result_) return ::gpuloan::forward(std::move(result_.error()));                  \
  } while (false)
