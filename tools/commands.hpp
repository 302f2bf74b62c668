// SPDX-License-Identifier: MIT
//
// The subcommands. Each takes the arguments after its name, prints what it did and returns an exit code, or throws
// Failure or StatusError, which main() turns into one sentence.
#pragma once

#include <span>

namespace gpuloan::tool {

using Arguments = std::span<char* const>;

int demo(Arguments arguments);
int demo_worker(Arguments arguments); // what demo starts; not for people
int canary(Arguments arguments);
int probe(Arguments arguments);
int import_limit_child(Arguments arguments); // what probe --import-limit starts; not for people
int lend(Arguments arguments);
int borrow(Arguments arguments);
int bench_command(Arguments arguments);
int bench_worker(Arguments arguments); // what bench starts; not for people

} // namespace gpuloan::tool
