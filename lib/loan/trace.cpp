// SPDX-License-Identifier: MIT
//
// The format is Chrome's: one array of events, which need not be closed. A worker is a process there and a control slot a thread, since loans
// of one slot follow each other. A line is one write() to a file opened for appending, so lines of several processes do not mix.
#include <loan/trace.hpp>

#include <base/log.hpp>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

namespace gpuloan::loan {
namespace {

int open_file() noexcept {
  const char* path = ::secure_getenv("GPULOAN_TRACE");
  if (path == nullptr || *path == '\0') return -1;
  constexpr int kFlags = O_WRONLY | O_APPEND | O_CLOEXEC | O_NOCTTY | O_NONBLOCK; // a pipe that nobody reads is no file
  int fd = ::open(path, kFlags | O_CREAT | O_EXCL, 0600);
  if (fd >= 0) {
    static_cast<void>(::write(fd, "[\n", 2));
  } else if (errno == EEXIST) {
    fd = ::open(path, kFlags);
  }
  if (fd >= 0) return fd;
  try {
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "GPULOAN_TRACE: cannot write " + std::string(path) + ": " + std::strerror(errno) + "; nothing is traced");
  } catch (const std::bad_alloc&) {
  }
  return -1;
}

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') out += '\\';
    out += static_cast<unsigned char>(letter) < 0x20 ? ' ' : letter;
  }
  return out + '"';
}

std::string microseconds(std::uint64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%llu.%03llu", static_cast<unsigned long long>(ns / 1000), static_cast<unsigned long long>(ns % 1000));
  return text;
}

std::string slice(const std::string& name, const Loan& loan, pid_t peer, std::uint64_t from, std::uint64_t to, const std::string& arguments) {
  return R"({"name":)" + quoted(name) + R"(,"cat":"gpuloan","ph":"X","ts":)" + microseconds(from) + R"(,"dur":)" + microseconds(to - from) + R"(,"pid":)" +
         std::to_string(peer) + R"(,"tid":)" + std::to_string(loan.slot) + R"(,"args":{)" + arguments + "}},";
}

std::string line_of(const Loan& loan, pid_t peer) {
  const auto at = [&](gpuloan_step step) { return loan.step_ns[static_cast<std::size_t>(step)]; };
  const std::uint64_t begin = at(GPULOAN_STEP_EXPORT), end = at(GPULOAN_STEP_RELEASE);
  if (begin == 0 || end < begin) return {}; // it never left
  const std::string access = loan.access == GPULOAN_ACCESS_WRITE ? "write" : "read";
  std::string line = slice((loan.canary_loan ? "canary " : "") + access + " " + std::to_string(loan.bytes), loan, peer, begin, end,
                           R"("loan":)" + std::to_string(loan.id) + R"(,"bytes":)" + std::to_string(loan.bytes) + R"(,"rung":)" +
                               quoted(::gpuloan_rung_name(loan.rung)) + R"(,"gate":)" + quoted(::gpuloan_gate_name(loan.gate)) + R"(,"exporter":)" +
                               std::to_string(::getpid()) + R"(,"turns":)" + std::to_string(loan.turns_done) + R"(,"copied_bytes":)" +
                               std::to_string(loan.copied_bytes) + R"(,"outcome":)" + quoted(::gpuloan_status_name(loan.outcome)) + R"(,"text":)" +
                               quoted(loan.outcome_text));
  // What led to each step; those that did not happen, and those of an earlier turn, are left out.
  std::uint64_t before = begin;
  for (int step = GPULOAN_STEP_READY; step < GPULOAN_STEP_COUNT; ++step) {
    const std::uint64_t now = at(static_cast<gpuloan_step>(step));
    if (now < before || now > end) continue;
    line += slice(std::string("to ") + ::gpuloan_step_name(static_cast<gpuloan_step>(step)), loan, peer, before, now, "");
    before = now;
  }
  return line + "\n";
}

} // namespace

const Trace* Trace::get() noexcept {
  static const int fd = open_file();
  static const Trace trace(fd);
  return fd >= 0 ? &trace : nullptr;
}

void Trace::ended(const Loan& loan, pid_t peer) const noexcept try {
  const std::string line = line_of(loan, peer);
  if (!line.empty()) static_cast<void>(::write(fd_, line.data(), line.size()));
} catch (const std::bad_alloc&) {
}

} // namespace gpuloan::loan
