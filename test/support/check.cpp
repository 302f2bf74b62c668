// SPDX-License-Identifier: MIT
#include "check.hpp"

#include <cerrno> // program_invocation_short_name
#include <cstdio>
#include <ctime>
#include <exception>

namespace loan_test {

int run_program(int (*run)(int count, char** words), int count, char** words) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::string wrong;
  try {
    return run(count, words);
  } catch (const Skip& skip) {
    std::printf("1..0 # SKIP %s\n", skip.reason.c_str());
    return 77;
  } catch (const Failure& failure) {
    wrong = failure.text;
  } catch (const std::exception& error) {
    wrong = error.what();
  }
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, wrong.c_str());
  return 2;
}

void fail(std::string_view what, Where where) {
  std::string_view file = where.file_name();
  if (const std::size_t slash = file.rfind('/'); slash != std::string_view::npos) file.remove_prefix(slash + 1);
  throw Failure{std::string(file) + ":" + std::to_string(where.line()) + ": " + std::string(what)};
}

void expect(bool good, std::string_view what, Where where) {
  if (!good) fail(what, where);
}

void expect_status(gpuloan_status got, gpuloan_status wanted, std::string_view what, Where where) {
  if (got == wanted) return;
  fail(std::string(what) + ": got " + gpuloan_status_name(got) + ", wanted " + gpuloan_status_name(wanted) +
           (got == GPULOAN_OK ? "" : std::string(" (") + gpuloan_error_text() + ")"),
       where);
}

void expect_ok(gpuloan_status got, std::string_view what, Where where) { expect_status(got, GPULOAN_OK, what, where); }

void expect_contains(std::string_view text, std::string_view part, std::string_view what, Where where) {
  if (text.find(part) != std::string_view::npos) return;
  fail(std::string(what) + ": '" + std::string(part) + "' is not in '" + std::string(text) + "'", where);
}

std::uint64_t now_ms() {
  timespec time = {};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1000 + static_cast<std::uint64_t>(time.tv_nsec) / 1'000'000;
}

void nap() {
  const timespec time = {0, 1'000'000};
  ::nanosleep(&time, nullptr);
}

} // namespace loan_test
