// SPDX-License-Identifier: MIT
#include "exit_codes.hpp"

namespace gpuloan::tool {

const char* exit_name(int code) noexcept {
  if (code > ExitInterrupted) code = ExitInterrupted;
  for (const ExitRow& row : kExitRows) {
    if (row.code == code) return row.name;
  }
  return "unknown";
}

int exit_code(gpuloan_status status) noexcept {
  switch (status) {
    case GPULOAN_OK: return ExitOk;
    case GPULOAN_ERR_CANCELLED:
    case GPULOAN_ERR_FAILED:
    case GPULOAN_ERR_DENIED:
    case GPULOAN_ERR_RETURNED: return ExitLoanFailed;
    case GPULOAN_ERR_TIMEOUT: return ExitTimeout;
    case GPULOAN_ERR_NO_RUNG:
    case GPULOAN_ERR_UNSUPPORTED:
    case GPULOAN_ERR_WAIT_LIMIT:
    case GPULOAN_ERR_LIMIT: return ExitUnsupported;
    case GPULOAN_ERR_NO_MEMORY:
    case GPULOAN_ERR_FD_LIMIT:
    case GPULOAN_ERR_SYSTEM: return ExitSystem;
    case GPULOAN_ERR_PEER_LOST: return ExitPeerLost;
    case GPULOAN_ERR_PROTOCOL:
    case GPULOAN_ERR_VERSION:
    case GPULOAN_ERR_HOST:
    case GPULOAN_ERR_DEVICE_MISMATCH: return ExitPeerRefused;
    case GPULOAN_ERR_KEY: return ExitKeyRefused;
    case GPULOAN_ERR_UID: return ExitUidRefused;
    case GPULOAN_ERR_CONNECT: return ExitNoListener;
    case GPULOAN_ERR_ADDRESS_IN_USE: return ExitPathBusy;
    case GPULOAN_ERR_NO_DRIVER:
    case GPULOAN_ERR_STUB_DRIVER:
    case GPULOAN_ERR_OLD_DRIVER:
    case GPULOAN_ERR_DRIVER_MISMATCH:
    case GPULOAN_ERR_NO_DEVICE:
    case GPULOAN_ERR_DRIVER:
    case GPULOAN_ERR_DEVICE_LOST: return ExitNoDriver;
    case GPULOAN_ERR_DEVICE_MEMORY: return ExitDeviceMemory;
    case GPULOAN_ERR_INVALID: return ExitUsage; // what reaches the library unchecked: a driver's or engine's name
    case GPULOAN_ERR_BUSY:
    case GPULOAN_ERR_STATE:
    case GPULOAN_ERR_CAPTURE:
    case GPULOAN_ERR_FORKED:
    case GPULOAN_ERR_INTERNAL: break; // the command uses the library wrongly
  }
  return ExitInternal;
}

} // namespace gpuloan::tool
