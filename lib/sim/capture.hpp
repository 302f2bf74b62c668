// SPDX-License-Identifier: MIT
//
// Stream capture, as far as a bystander notices it: operations on a capturing stream are recorded instead of run (here:
// dropped), and calls that a capture does not bear fail and invalidate it. There are no graphs.
#pragma once

#include <sim/stream.hpp>

namespace gpuloan::sim {

// The first three with the stream's context locked.
// What a submission to this stream means: `swallowed` when it is capturing; an error when it may not be made now.
[[nodiscard]] CuResult capture_submit(StreamState& stream, bool& swallowed);
// For calls that wait for or ask about a stream's work: these invalidate a capture.
[[nodiscard]] CuResult capture_forbids(StreamState& stream);
void capture_abandon(StreamState& stream);

// For calls that CUDA calls potentially unsafe: refused, by the rule of the calling thread's capture mode, while a
// capture is going on, which is then invalid.
[[nodiscard]] CuResult capture_forbids_unsafe_call();
// For calls about all the work of a context.
[[nodiscard]] CuResult capture_forbids_context(ContextState& context);

} // namespace gpuloan::sim
