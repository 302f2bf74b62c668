// SPDX-License-Identifier: MIT
//
// The command gpuloan: finds the subcommand, runs it, and turns whatever it throws into one sentence on stderr, one
// JSON object where --json was given, and an exit code.
#include "commands.hpp"
#include "json.hpp"
#include "options.hpp"
#include "session.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <new>
#include <string>
#include <vector>

namespace gpuloan::tool {
namespace {

struct Command {
  const char* name;
  int (*run)(Arguments);
  const char* about; // null: not listed
};

constexpr Command kCommands[] = {
    {"demo", demo, "parent and workers hand bytes over through GPU memory; prints the eight steps"},
    {"canary", canary, "proves each rung with a worker, shape by shape, and prints TAP or JSON"},
    {"probe", probe, "what this machine's driver, devices and kernel can do"},
    {"lend", lend, "lend a file's bytes to one borrower"},
    {"borrow", borrow, "borrow from a lender and write the bytes to a file"},
    {"bench", bench_command, "loans beside bare driver code that does the same work"},
    {"demo-worker", demo_worker, nullptr},
    {"bench-worker", bench_worker, nullptr},
    {"import-limit-child", import_limit_child, nullptr},
};

void print_help(std::FILE* out) {
  std::fprintf(out,
               "Usage: gpuloan SUBCOMMAND [OPTION]...\n\n"
               "Lends GPU memory from one process to another on the same host, without copying it.\n\nSubcommands:\n");
  for (const Command& command : kCommands) {
    if (command.about != nullptr) std::fprintf(out, "  %-8s  %s\n", command.name, command.about);
  }
  std::fprintf(out, "\n'gpuloan SUBCOMMAND --help' has the options and the exit codes; gpuloan(1) has all of it.\n");
}

int complain(const char* name, bool json, int code, const std::string& text) {
  std::fprintf(stderr, "gpuloan%s%s: %s\n", *name != '\0' ? " " : "", name, text.c_str());
  if (json) {
    Json object;
    object.begin_object();
    json_outcome(object, name, code);
    object.member("error", text).end();
    std::fputs(object.text().c_str(), stdout);
  }
  return code;
}

// A full disk or a closed pipe may show only when the last of the output is written.
int flushed(const char* name, int code) {
  const bool now = std::fflush(stdout) != 0; // else errno is of something later
  if (!now && std::ferror(stdout) == 0) return code;
  complain(name, false, ExitFile, std::string("cannot write to standard output") + (now ? std::string(": ") + std::strerror(errno) : ""));
  return code == ExitOk ? ExitFile : code;
}

int run(const Command& command, Arguments arguments) {
  const bool json = std::any_of(arguments.begin(), arguments.end(),
                                [](const char* argument) { return std::strcmp(argument, "--json") == 0; });
  try {
    return flushed(command.name, command.run(arguments));
  } catch (const Failure& failure) {
    return complain(command.name, json, failure.code(), failure.what());
  } catch (const StatusError& error) {
    return complain(command.name, json, exit_code(error.status()), error.what());
  } catch (const std::bad_alloc&) {
    return complain(command.name, json, ExitSystem, "out of host memory");
  } catch (const std::exception& error) {
    return complain(command.name, json, ExitInternal, std::string("unexpected: ") + error.what());
  }
}

int dispatch(Arguments arguments) {
  if (arguments.empty()) {
    print_help(stderr);
    return ExitUsage;
  }
  const std::string name = arguments[0];
  if (name == "--help" || name == "-h" || name == "help") {
    print_help(stdout);
    return flushed("", ExitOk);
  }
  if (name == "--version") {
    std::printf("gpuloan %s\n", gpuloan_version_text());
    return flushed("", ExitOk);
  }
  std::vector<std::string> known;
  for (const Command& command : kCommands) {
    if (name == command.name) return run(command, arguments.subspan(1));
    if (command.about != nullptr) known.emplace_back(command.name);
  }
  const std::string near = nearest(name, known);
  return complain("", false, ExitUsage,
                  "unknown subcommand '" + name + "'" + (near.empty() ? "." : "; did you mean '" + near + "'?") +
                      " See 'gpuloan --help'.");
}

} // namespace
} // namespace gpuloan::tool

// A shell may start us with a standard stream closed (>&-). Its number must not go to a descriptor of the library's, which
// our output would then be written to. What takes the place is open the other way round, so that reading from standard input
// that was closed, and writing to such output, is the error that it would have been (EBADF). Nobody misses error messages.
static void fill_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) == -1 && errno == EBADF && ::open("/dev/null", fd == 1 ? O_RDONLY : O_WRONLY) != fd) std::_Exit(15);
  }
}

int main(int argc, char** argv) {
  using namespace gpuloan::tool;
  fill_standard_streams();
  install_signal_handlers();
  const std::span<char* const> all(argv, static_cast<std::size_t>(argc));
  return dispatch(all.subspan(all.empty() ? 0 : 1));
}
