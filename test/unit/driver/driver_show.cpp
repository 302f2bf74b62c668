// SPDX-License-Identifier: MIT
//
// Opens one driver and prints what became of it, a "key=value" line each. The loader's tests run it once per case, since
// a process never unloads a driver.
//   driver_show CHOICE [preload=PATH] [threads] [fork]
// CHOICE "-" passes NULL. preload opens PATH first, as a caller's own runtime would; threads opens from eight threads at
// once; fork opens again in a forked child.
#include <driver/driver.hpp>

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <string_view>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

using namespace gpuloan;
using driver::Driver;
using driver::Group;

namespace {

// Destroyed after the handler that the loader registers later.
struct AtExit {
  ~AtExit() { std::printf("allowed_at_exit=%d\n", driver::calls_allowed() ? 1 : 0); }
} at_exit;

bool has_word(int count, char** words, const char* wanted) {
  for (int i = 2; i < count; ++i) {
    if (std::strcmp(words[i], wanted) == 0) return true;
  }
  return false;
}

void print(const Driver& driver) {
  std::printf("status=0\nversion=%d\nsimulated=%d\npath=%s\nfound_by=%s\ndescribe=%s\n", driver.version(),
              driver.simulated() ? 1 : 0, driver.path().c_str(), driver.found_by().c_str(), driver.describe().c_str());
  for (unsigned i = 0; i < static_cast<unsigned>(Group::Count); ++i) {
    const auto group = static_cast<Group>(i);
    if (!driver.has(group)) std::printf("missing=%s: %s\n", driver::group_name(group), driver.missing(group).c_str());
  }
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  std::printf("mem_get_info=%d\n", driver.call.cuMemGetInfo(&free_bytes, &total));
  std::printf("error=%s\n", driver.error("cuMemCreate", 2).text.c_str());
  std::printf("allowed=%d\n", driver::calls_allowed() ? 1 : 0);
}

bool same_from_threads(const char* choice) {
  std::vector<std::shared_ptr<const Driver>> drivers(8);
  {
    std::vector<std::jthread> threads;
    for (auto& slot : drivers) threads.emplace_back([&slot, choice] { slot = Driver::open(choice).value_or(nullptr); });
  }
  for (const auto& driver : drivers) {
    if (driver == nullptr || driver != drivers[0]) return false;
  }
  return true;
}

void open_in_child(const char* choice) {
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto again = Driver::open(choice);
    std::printf("child_status=%d\nchild_allowed=%d\n", again ? 0 : again.error().status, driver::calls_allowed() ? 1 : 0);
    std::fflush(stdout);
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
}

} // namespace

int main(int count, char** words) {
  if (count < 2) return 2;
  const char* choice = std::strcmp(words[1], "-") == 0 ? nullptr : words[1];
  constexpr std::string_view kPreload = "preload=";
  for (int i = 2; i < count; ++i) {
    if (std::string_view(words[i]).starts_with(kPreload)) ::dlopen(words[i] + kPreload.size(), RTLD_NOW);
  }
  if (has_word(count, words, "threads")) std::printf("same=%d\n", same_from_threads(choice) ? 1 : 0);
  const auto driver = Driver::open(choice);
  if (driver) {
    print(**driver);
  } else {
    std::printf("status=%d\ntext=%s\n", driver.error().status, driver.error().text.c_str());
  }
  if (has_word(count, words, "fork")) open_in_child(choice);
  return 0;
}
