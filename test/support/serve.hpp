// SPDX-License-Identifier: MIT
//
// The importer's side of every test: does what it is told over `control` until that is closed. It runs as a separate
// program or, for tools that see one process only, in a thread.
#pragma once

namespace loan_test {

enum class Habitat { Process, Thread };

// `loan_end` is the inherited end of the connection; taken. Returns the exit status.
int serve(int control, int loan_end, Habitat habitat);

} // namespace loan_test
