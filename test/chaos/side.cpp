// SPDX-License-Identifier: MIT
#include "chaos.hpp"

#include <algorithm>
#include <cstring>
#include <dirent.h>
#include <dlfcn.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace chaos {
namespace {

struct WitnessCalls {
  int (*claim)(std::uint64_t, std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint64_t);
  int (*unclaim)(std::uint64_t, std::uint64_t);
};

} // namespace

// ---- Notes --------------------------------------------------------------------------------------------------------

bool send_note(int control, const Note& note, int fd) {
  Note copy = note;
  iovec part = {&copy, sizeof copy};
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  return ::sendmsg(control, &message, MSG_NOSIGNAL) == sizeof copy;
}

bool receive_note(int control, Note& note, Fd& fd) {
  iovec part = {&note, sizeof note};
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof room;
  if (::recvmsg(control, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != sizeof note) return false;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr) {
    int taken = -1;
    std::memcpy(&taken, CMSG_DATA(header), sizeof taken);
    fd = Fd(taken);
  }
  return true;
}

std::size_t thread_count() {
  std::size_t count = 0;
  DIR* folder = ::opendir("/proc/self/task");
  expect(folder != nullptr, "no /proc/self/task");
  while (const dirent* entry = ::readdir(folder)) count += entry->d_name[0] != '.' ? 1 : 0;
  ::closedir(folder);
  return count;
}

// ---- Side ---------------------------------------------------------------------------------------------------------

Side::Side(const Life& life, Board& board, int control)
    : life_(life), board_(board), slot_(board.slots[life.number]), random_(life.seed, life.round, life.number, life.start), control_(control),
      self_(static_cast<std::uint32_t>(::getpid())) {}

void Side::step(std::string_view what) noexcept {
  std::uint64_t words[4] = {};
  std::memcpy(words, what.data(), std::min(what.size(), sizeof words));
  for (std::size_t at = 0; at < std::size(words); ++at) slot_.step[at].store(words[at], std::memory_order_relaxed);
  slot_.beat_ms.store(now_ms(), std::memory_order_relaxed);
}

void Side::tell(Word word, std::uint32_t link, gpuloan_status status, const char* text) {
  Note note;
  note.word = word;
  note.link = link;
  note.value = now_ms();
  note.status = status;
  std::strncpy(note.text, text, sizeof note.text - 1);
  expect(send_note(control_, note), "the judge is gone");
}

void Side::create_context(gpuloan_context_options& options, const char* role) {
  caller_loop_ = random_.chance(25);
  options.loop = caller_loop_ ? GPULOAN_LOOP_CALLER : GPULOAN_LOOP_THREAD;
  if (caller_loop_) options.engine = GPULOAN_ENGINE_EPOLL; // the other needs a thread
  options.driver = "sim";
  options.rungs = GPULOAN_RUNG_VMM | GPULOAN_RUNG_HOST;
  if (!life_.thread) options.rungs |= GPULOAN_RUNG_POOL | GPULOAN_RUNG_IPC; // whose quarantine ends with the process
  options.canary_timeout_ms = kHangMs; // a stopped peer goes on
  gpuloan_status status = gpuloan_context_create(&options, &context_);
  if (status == GPULOAN_ERR_UNSUPPORTED && options.engine == GPULOAN_ENGINE_IO_URING) { // not on this machine
    options.engine = GPULOAN_ENGINE_EPOLL;
    status = gpuloan_context_create(&options, &context_);
  }
  expect_ok(status, role);
}

// One round of the loop: everything that has come, then a wait if nothing has.
void Side::turn(std::uint32_t wait_ms) {
  step("waits");
  pollfd both[] = {{control_, POLLIN, 0}, {gpuloan_context_fd(context_), POLLIN, 0}};
  ::poll(both, 2, static_cast<int>(wait_ms));
  if (both[0].revents != 0) {
    Note note;
    Fd fd;
    const bool came = receive_note(control_, note, fd);
    expect(came || life_.thread || (both[0].revents & POLLHUP) == 0, "the judge is gone");
    if (came && note.word == Word::Finish) finishing_ = true;
    else if (came) on_note(note, std::move(fd));
  }
  if (caller_loop_) expect_ok(gpuloan_context_dispatch(context_, 0), "gpuloan_context_dispatch");
  for (auto event = init<gpuloan_event>();;) {
    const gpuloan_status status = gpuloan_context_next_event(context_, 0, &event);
    if (status == GPULOAN_ERR_TIMEOUT) return;
    expect_ok(status, "gpuloan_context_next_event");
    on_event(event);
  }
}

void Side::run() {
  gpu_.warm_up();
  gpu_.alloc_from_pool();
  const std::uint64_t scratch = gpu_.alloc(64); // both streams now, so that they do not look like a leak
  for (const unsigned index : {0U, 1U}) static_cast<void>(gpu_.mismatch(scratch, 64, 0, index));
  gpu_.free(scratch);
  const auto fds = open_fds();
  const auto live = gpu_.live();
  const std::size_t threads = thread_count();
  step("creates its context");
  create();
  while (!finishing_) turn(work() ? 0 : caller_loop_ ? 1 : 5);
  finish();
  step("destroys its context");
  gpuloan_context_destroy(std::exchange(context_, nullptr));
  if (!life_.thread) look_for_leaks(fds, live, threads);
  step("has ended");
}

void Side::look_for_leaks(const std::set<std::string>& fds, const std::map<std::string, std::int64_t>& live, std::size_t threads) {
  step("looks for leaks");
  std::string what;
  const auto clean = [&] {
    gpu_.settle_pool();
    what = added(fds, open_fds());
    if (!what.empty()) what = "descriptors: " + what;
    for (const auto& [name, count] : gpu_.live()) {
      if (count > live.at(name)) what += " " + name + ": " + std::to_string(live.at(name)) + " before, " + std::to_string(count) + " after";
    }
    if (const std::size_t now = thread_count(); now > threads) what += " threads: " + std::to_string(now) + " of " + std::to_string(threads);
    return what.empty();
  };
  if (!becomes(clean, 5000)) fail("left behind: " + what);
}

// ---- The witness --------------------------------------------------------------------------------------------------

namespace {

const WitnessCalls& witness(const Gpu& gpu) {
  static const WitnessCalls found = [&] {
    void* library = ::dlopen(gpu.info().path, RTLD_NOW | RTLD_LOCAL);
    expect(library != nullptr, "the simulated driver cannot be opened");
    const WitnessCalls hooks = {reinterpret_cast<decltype(WitnessCalls::claim)>(::dlsym(library, "gpuloan_sim_claim")),
                           reinterpret_cast<decltype(WitnessCalls::unclaim)>(::dlsym(library, "gpuloan_sim_unclaim"))};
    expect(hooks.claim != nullptr && hooks.unclaim != nullptr, "a driver without a witness");
    return hooks;
  }();
  return found;
}

} // namespace

void Side::claim(std::uint64_t pointer, std::uint64_t bytes, std::uint32_t writer, std::uint32_t second_writer, std::uint32_t reader) {
  const int result = witness(gpu_).claim(pointer, bytes, writer, second_writer, reader, life_.number);
  if (result != 0) fail("memory cannot be claimed (" + std::to_string(result) + "): it was handed out twice, or is not there");
}

void Side::unclaim(std::uint64_t pointer, std::uint64_t bytes) { expect(witness(gpu_).unclaim(pointer, bytes) == 0, "a claim is gone"); }

} // namespace chaos
