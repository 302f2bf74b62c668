// SPDX-License-Identifier: MIT
//
// How borrow finds its lender at a socket path. The lender may be started later, so until the deadline a missing socket
// or key file means "not yet". It may also just be replacing one that was killed: a key file gets a moment to change
// before a refused key counts, and a connection that is closed without an answer is tried again.
#pragma once

#include "transfer.hpp"

namespace gpuloan::tool {

// Throws Failure, as the next: no-listener, key-refused, uid-refused, peer-lost, timeout, path-unusable …
[[nodiscard]] Peer connect_to_lender(Context& context, const MeetOptions& meet, const Deadline& deadline);
// Over the inherited end `fd`, which is the context's then.
[[nodiscard]] Peer adopt_inherited(Context& context, int fd, const Deadline& deadline);

} // namespace gpuloan::tool
