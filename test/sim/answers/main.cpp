// SPDX-License-Identifier: MIT
//
// sim_answers LIBRARY: asks all questions of the driver library given by path or name and prints the answers.
// sim_answers LIBRARY SECTION: asks those of one section, also of one whose answers a real driver does not give
// twice. sim_answers LIBRARY --compare RECORD EXCEPTIONS: asks, and prints only what differs from the recorded
// answers. A line of the exceptions is "question answer reason": this answer is expected instead. Exits 1 when
// anything differs, and when an exception has no reason, is of no recorded question, or is none any more.
#include "answers.hpp"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace answers {

Driver cuda;

namespace {

const char* section_name = "";

struct Section {
  const char* name;
  void (*ask)();
  bool settled = true; // the same answers every time
};

constexpr Section kSections[] = {
    {"startup", ask_startup},
    {"no-context", ask_no_context},
    {"vmm", ask_vmm},
    {"export", ask_export},
    {"pointers", ask_pointers},
    {"copies", ask_copies},
    {"read-only", ask_read_only},
    {"read-only-word", ask_read_only_word},
    {"no-access", ask_no_access},
    {"sticky", ask_sticky},
    {"plain", ask_plain},
    {"events", ask_events},
    {"memops", ask_memops},
    {"host", ask_host},
    {"capture", ask_capture},
    {"unsafe", ask_unsafe},
    {"pageable", ask_pageable},
    {"standing", ask_standing},
    {"waits", ask_waits},
    {"event-waits", ask_event_waits, false},
    {"record-again", ask_record_again},
    {"unmap-under-work", ask_unmap_under_work},
    {"unregister-under-wait", ask_unregister_under_wait},
    {"released", ask_released},
    {"fork", ask_fork},
    {"devices", ask_devices},
    {"peer", ask_peer},
    {"blocks", ask_blocks},
    {"channels", ask_channels, false},
    {"busy-channels", ask_busy_channels, false},
    {"first-fill", ask_first_fill},
    {"other-context", ask_other_context},
    {"release-under-wait", ask_release_under_wait},
    {"kinds", ask_kinds},
    {"legacy", ask_legacy},
    {"pools", ask_pools},
    {"pool-import", ask_pool_import},
    {"stranded", ask_stranded},
};

void load(const char* path) {
  void* library = ::dlopen(path, RTLD_NOW);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", ::dlerror());
    std::exit(2);
  }
#define GPULOAN_CUDA(need, since, group, name, exported, params)                                                       \
  cuda.name = reinterpret_cast<decltype(cuda.name)>(::dlsym(library, #exported));
#include <driver/symbols.inc>
#include <sim/extra_symbols.inc>
#undef GPULOAN_CUDA
  cuda.get_proc_address = reinterpret_cast<decltype(cuda.get_proc_address)>(::dlsym(library, "cuGetProcAddress_v2"));
}

void run(const Section& section, const char* path) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    section_name = section.name;
    load(path);
    section.ask();
    std::fflush(stdout);
    ::_exit(0); // work may be stuck on purpose
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (status != 0) std::printf("%s died %d\n", section.name, status);
  std::fflush(stdout);
}

} // namespace

void say(const char* question, long long answer) {
  std::printf("%s.%s %lld\n", section_name, question, answer);
  std::fflush(stdout);
}

void need(CuResult result, const char* what) {
  if (result == Success) return;
  std::printf("%s stopped: %s says %d\n", section_name, what, result);
  std::fflush(stdout);
  ::_exit(1);
}

void start() {
  need(cuda.cuInit(0), "cuInit");
  Context context = nullptr;
  need(cuda.cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
  need(cuda.cuCtxPushCurrent(context), "cuCtxPushCurrent");
}

int patience_ms() {
  const char* text = std::getenv("ANSWERS_PATIENCE_MS");
  return text != nullptr ? std::atoi(text) : 300;
}

bool ends_within_ms(int milliseconds, const std::function<void()>& body) {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
  };
  auto state = std::make_shared<State>();
  Context context = nullptr;
  need(cuda.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  std::thread([state, body, context] {
    cuda.cuCtxPushCurrent(context);
    body();
    const std::lock_guard lock(state->mutex);
    state->ended = true;
    state->changed.notify_all();
  }).detach();
  std::unique_lock lock(state->mutex);
  return state->changed.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] { return state->ended; });
}

AllocationProp prop() {
  AllocationProp wish = {};
  wish.type = AllocationPinned;
  wish.requested_handle_types = HandlePosixFd;
  wish.location = {LocationDevice, 0};
  return wish;
}

MemHandle create(std::size_t bytes) {
  MemHandle handle = 0;
  const AllocationProp wish = prop();
  need(cuda.cuMemCreate(&handle, bytes, &wish, 0), "cuMemCreate");
  return handle;
}

CuResult give(DevicePtr address, std::size_t bytes, int access) {
  const AccessDesc grant = {{LocationDevice, 0}, access};
  return cuda.cuMemSetAccess(address, bytes, &grant, 1);
}

DevicePtr map(MemHandle handle, int access, std::size_t bytes) {
  DevicePtr address = 0;
  need(cuda.cuMemAddressReserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
  need(cuda.cuMemMap(address, bytes, 0, handle, 0), "cuMemMap");
  if (access != AccessNone) need(give(address, bytes, access), "cuMemSetAccess");
  return address;
}

Stream stream(unsigned flags) {
  Stream made = nullptr;
  need(cuda.cuStreamCreate(&made, flags), "cuStreamCreate");
  return made;
}

std::uint64_t* words() {
  void* page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  need(cuda.cuMemHostRegister(page, 4096, RegisterPortable | RegisterDeviceMap), "cuMemHostRegister");
  return static_cast<std::uint64_t*>(page);
}

void store(std::uint64_t* word, std::uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

Event event(unsigned flags) {
  Event made = nullptr;
  need(cuda.cuEventCreate(&made, flags), "cuEventCreate");
  return made;
}

CuResult later(Stream stream, int milliseconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  while (true) {
    const CuResult result = cuda.cuStreamQuery(stream);
    if (result != NotReady || std::chrono::steady_clock::now() >= end) return result;
    ::usleep(1000);
  }
}

} // namespace answers

namespace {

using Answers = std::map<std::string, std::string>;

// "question answer" or, with reasons, "question answer reason ...". Lines that start with # are comments.
Answers read_answers(const char* path, std::set<std::string>* unexplained = nullptr) {
  Answers found;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string question;
    std::string answer;
    if (line.starts_with('#') || !(words >> question >> answer)) continue;
    if (std::string reason; unexplained != nullptr && !(words >> reason)) unexplained->insert(question);
    found[question] = answer;
  }
  return found;
}

void ask_all(const char* library) {
  for (const auto& section : answers::kSections) {
    if (section.settled) answers::run(section, library);
  }
}

// The children print to standard output, so that becomes a file for a while.
Answers ask_into_map(const char* library) {
  char path[] = "/tmp/answersXXXXXX";
  const int file = ::mkstemp(path);
  std::fflush(stdout); // what was said before is no answer
  const int before = ::dup(STDOUT_FILENO);
  ::dup2(file, STDOUT_FILENO);
  ask_all(library);
  std::fflush(stdout);
  ::dup2(before, STDOUT_FILENO);
  ::close(before);
  ::close(file);
  Answers found = read_answers(path);
  ::unlink(path);
  return found;
}

std::string answer_of(const Answers& all, const std::string& question) {
  const auto found = all.find(question);
  return found != all.end() ? found->second : "nothing";
}

int differences(const Answers& given, const Answers& record, const Answers& exceptions) {
  int differences = 0;
  for (const auto& [question, real] : record) {
    const auto exception = exceptions.find(question);
    const std::string expected = exception != exceptions.end() ? exception->second : real;
    const std::string answer = answer_of(given, question);
    if (answer != expected) {
      std::printf("%s: %s, expected %s (real driver: %s)\n", question.c_str(), answer.c_str(), expected.c_str(),
                  real.c_str());
      ++differences;
    } else if (exception != exceptions.end() && answer == real) {
      std::printf("%s: the exception is none\n", question.c_str());
      ++differences;
    }
  }
  for (const auto& [question, answer] : given) {
    if (record.contains(question)) continue;
    std::printf("%s: %s, but it is not recorded\n", question.c_str(), answer.c_str());
    ++differences;
  }
  return differences;
}

int compare(const char* library, const char* record_path, const char* exceptions_path) {
  const Answers record = read_answers(record_path);
  if (record.empty()) {
    std::printf("%s: no answers\n", record_path);
    return 1;
  }
  std::set<std::string> unexplained;
  const Answers exceptions = read_answers(exceptions_path, &unexplained);
  int bad = 0;
  for (const auto& [question, answer] : exceptions) {
    const char* const why = !record.contains(question) ? "is not recorded" : unexplained.contains(question) ? "has no reason" : nullptr;
    if (why == nullptr) continue;
    std::printf("%s: the exception %s\n", question.c_str(), why);
    ++bad;
  }
  if (bad != 0) return 1;
  if (differences(ask_into_map(library), record, exceptions) == 0) return 0;
  // On a machine that is busy with other things an answer comes late; a wrong one stays wrong.
  std::printf("Asking again, with more patience.\n");
  ::setenv("ANSWERS_PATIENCE_MS", "2000", 1);
  return differences(ask_into_map(library), record, exceptions) == 0 ? 0 : 1;
}

} // namespace

int main(int count, char** arguments) {
  if (count == 5 && std::strcmp(arguments[2], "--compare") == 0)
    return compare(arguments[1], arguments[3], arguments[4]);
  if (count == 2) ask_all(arguments[1]);
  for (const auto& section : answers::kSections) {
    if (count == 3 && std::strcmp(arguments[2], section.name) == 0) answers::run(section, arguments[1]);
  }
  return count == 2 || count == 3 ? 0 : 2;
}
