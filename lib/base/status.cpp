// SPDX-License-Identifier: MIT
#include <base/status.hpp>

#include <cerrno>
#include <cstring>

namespace gpuloan {

std::string errno_text(const char* what, int code) {
  const char* name = ::strerrorname_np(code);
  const char* text = ::strerrordesc_np(code);
  return std::string(what) + ": " + (text != nullptr ? text : "unknown error") + " (" +
         (name != nullptr ? std::string(name) : std::to_string(code)) + ")";
}

std::unexpected<Error> fail_errno(gpuloan_status status, const char* what, int code) {
  return fail(status, errno_text(what, code));
}

std::unexpected<Error> fail_errno(const char* what, int code) {
  switch (code) {
    case EMFILE:
    case ENFILE:
      return fail(GPULOAN_ERR_FD_LIMIT, errno_text(what, code) + ": raise RLIMIT_NOFILE or close descriptors");
    case ENOMEM:
      return fail(GPULOAN_ERR_NO_MEMORY, errno_text(what, code));
    default:
      return fail(GPULOAN_ERR_SYSTEM, errno_text(what, code));
  }
}

} // namespace gpuloan
