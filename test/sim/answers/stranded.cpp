// SPDX-License-Identifier: MIT
//
// Which memory of a shared pool does the device not get back (P8)? A table: for each way to share, how many MiB of 256 are
// missing after each step that might give them back. A third process looks, whose context lives all the time: what the
// owner's context holds back would mask the answer there. Every row has processes of its own.
//
//   fd       the owner keeps the pool's descriptor open, or has closed it after it was sent
//   pointer  a pointer of the allocation was exported, or the pool alone
//   peer     none; mapped: it imported the pool, and the pointer if there is one, and keeps both; let-go: it has freed the
//            pointer and keeps the pool; dead: it did as `mapped` and has ended before the owner frees. It closes its copy of
//            the descriptor at once
//
//   lent       the memory is allocated and shared (256 or more, or the row tells nothing)
//   trimmed    then freed by cuMemFreeAsync, the pool trimmed to 0
//   destroyed  then cuMemPoolDestroy
//   closed     then the owner's descriptor closed, where it still was open
//   peer-ended then the importer has ended, compared with when the owner was alone
//   ended      then both processes have ended, compared with before they began
#include "answers.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace answers {
namespace {

constexpr std::size_t kBytes = 256 * kMiB;
constexpr long long kNear = 16; // MiB that do not count, contexts grow a little: answers are in multiples of twice that
constexpr int kSettleMs = 200;  // a dead process's memory was seen to be back after 101

enum class Peer { None, Mapped, LetGo, Dead };
constexpr const char* kPeerNames[] = {"none", "mapped", "let-go", "dead"};

struct Row {
  bool keeps_fd;
  bool pointer;
  Peer peer;
};

std::array<int, 2> make_pair() {
  std::array<int, 2> ends = {};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()) != 0) need(Unknown, "socketpair");
  return ends;
}

// A process that does one step for each word that it is sent, and answers with a word.
class Actor {
 public:
  template <typename Body>
  explicit Actor(Body body) {
    const std::array<int, 2> ends = make_pair();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::alarm(50);
      ::close(ends[0]);
      body(ends[1]);
      std::fflush(stdout);
      ::_exit(0);
    }
    ::close(ends[1]);
    end_ = ends[0];
    constexpr timeval kPatience = {10, 0};
    ::setsockopt(end_, SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof kPatience);
  }
  Actor(const Actor&) = delete;
  Actor& operator=(const Actor&) = delete;
  ~Actor() { end(); }
  // -1 for one that died or stands still.
  [[nodiscard]] long long ask(long long word = 0) {
    long long answer = -1;
    if (::send(end_, &word, sizeof word, MSG_NOSIGNAL) != sizeof word) return -1;
    return ::recv(end_, &answer, sizeof answer, 0) == sizeof answer ? answer : -1;
  }
  void end() { // by SIGKILL, which gives everything back as well
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    ::close(end_);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  int end_ = -1;
};

// In the actor: the next word; ends the process when there is none.
void next(int end) {
  long long word = 0;
  if (::recv(end, &word, sizeof word, 0) != sizeof word) ::_exit(0);
}
void answer(int end, long long word) { static_cast<void>(!::write(end, &word, sizeof word)); }

struct Parcel {
  iovec part;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  explicit Parcel(PoolPointer& shared) : part{&shared, sizeof shared} {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
};

void send_pool(int end, int fd, PoolPointer shared) {
  Parcel parcel(shared);
  cmsghdr* header = CMSG_FIRSTHDR(&parcel.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (::sendmsg(end, &parcel.message, 0) != sizeof shared) need(Unknown, "sendmsg");
}

int receive_pool(int end, PoolPointer& shared) {
  Parcel parcel(shared);
  if (::recvmsg(end, &parcel.message, 0) != sizeof shared) need(Unknown, "recvmsg");
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&parcel.message)), sizeof fd);
  return fd;
}

// Whatever the driver makes at first use.
void warm_up() {
  start();
  const Pool pool = make_pool(HandlePosixFd);
  const DevicePtr pointer = from_pool(pool, kMiB);
  fill(pointer, 1);
  need(cuda.cuMemFree(pointer), "cuMemFree");
  need(cuda.cuMemPoolDestroy(pool), "cuMemPoolDestroy");
}

void observe(int end) {
  start();
  for (;;) {
    next(end);
    std::size_t now = 0, total = 0;
    need(cuda.cuMemGetInfo(&now, &total), "cuMemGetInfo");
    answer(end, static_cast<long long>(now >> 20));
  }
}

void own(int end, int link, const Row& row) {
  warm_up();
  next(end);
  answer(end, 0);
  next(end); // lent
  const Pool pool = make_pool(HandlePosixFd);
  std::uint64_t keep = UINT64_MAX;
  need(cuda.cuMemPoolSetAttribute(pool, PoolReleaseThreshold, &keep), "threshold");
  const DevicePtr pointer = from_pool(pool, kBytes);
  fill(pointer, 2);
  int fd = export_pool(pool);
  PoolPointer shared = {};
  if (row.pointer) need(cuda.cuMemPoolExportPointer(&shared, pointer), "cuMemPoolExportPointer");
  if (row.peer != Peer::None) send_pool(link, fd, shared);
  if (!row.keeps_fd) ::close(fd);
  answer(end, 0);
  next(end); // trimmed
  need(cuda.cuMemFreeAsync(pointer, nullptr), "cuMemFreeAsync");
  need(cuda.cuStreamSynchronize(nullptr), "sync");
  need(cuda.cuMemPoolTrimTo(pool, 0), "cuMemPoolTrimTo");
  need(cuda.cuCtxSynchronize(), "sync");
  answer(end, 0);
  next(end); // destroyed
  need(cuda.cuMemPoolDestroy(pool), "cuMemPoolDestroy");
  need(cuda.cuCtxSynchronize(), "sync");
  answer(end, 0);
  next(end); // closed
  if (row.keeps_fd) ::close(fd);
  answer(end, 0);
  next(end); // until it is ended
}

void import(int end, int link, const Row& row) {
  warm_up();
  next(end);
  answer(end, 0);
  next(end);
  PoolPointer shared = {};
  const int fd = receive_pool(link, shared);
  Pool pool = nullptr;
  need(import_pool(fd, &pool), "cuMemPoolImportFromShareableHandle");
  ::close(fd);
  if (row.pointer) {
    DevicePtr pointer = 0;
    need(cuda.cuMemPoolImportPointer(&pointer, pool, &shared), "cuMemPoolImportPointer");
    fill(pointer, 3);
    if (row.peer == Peer::LetGo) need(cuda.cuMemFree(pointer), "cuMemFree");
  }
  answer(end, 0);
  next(end); // until it is ended
}

// MiB that are missing, once they are back or stay away.
long long missing(Actor& observer, long long before) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kSettleMs);
  for (;;) {
    const long long gone = before - observer.ask();
    if (gone < kNear || std::chrono::steady_clock::now() >= until) return std::max(gone, 0LL);
    ::usleep(10'000);
  }
}

void ask_row(Actor& observer, const Row& row) {
  const std::array<int, 2> link = make_pair();
  const long long at_first = observer.ask();
  Actor owner([&](int end) {
    ::close(link[1]); // so that nobody but the importer has the pool's descriptor
    own(end, link[0], row);
  });
  long long bad = owner.ask();
  const long long alone = observer.ask(); // with the owner's context
  long long before = alone;
  Actor importer([&](int end) {
    ::close(link[0]);
    if (row.peer != Peer::None) import(end, link[1], row);
  });
  ::close(link[0]);
  ::close(link[1]);
  if (row.peer != Peer::None) bad = std::min(bad, importer.ask());
  if (row.peer == Peer::Mapped || row.peer == Peer::LetGo) before = observer.ask(); // with both contexts; for `dead` with one
  bad = std::min(bad, owner.ask());
  if (row.peer != Peer::None) bad = std::min(bad, importer.ask());
  if (row.peer == Peer::Dead) importer.end();
  std::array<long long, 6> gone = {missing(observer, before)};
  for (std::size_t step = 1; step < 4; ++step) {
    bad = std::min(bad, owner.ask());
    gone[step] = missing(observer, before);
  }
  importer.end();
  gone[4] = missing(observer, alone);
  owner.end();
  gone[5] = missing(observer, at_first);
  constexpr const char* kSteps[] = {"lent", "trimmed", "destroyed", "closed", "peer-ended", "ended"};
  for (std::size_t step = 0; step < gone.size(); ++step) {
    const std::string name = std::string(row.keeps_fd ? "fd-open" : "fd-closed") + (row.pointer ? ".pointer-exported" : ".no-pointer") + ".peer-" +
                             kPeerNames[static_cast<int>(row.peer)] + "." + kSteps[step];
    say(name.c_str(), bad < 0 ? -1 : (gone[step] + kNear) / (2 * kNear) * (2 * kNear));
  }
}

} // namespace

void ask_stranded() {
  Actor observer(observe);
  if (observer.ask() < 0) need(Unknown, "the observer");
  for (const bool keeps_fd : {true, false}) {
    for (const bool pointer : {false, true}) {
      for (const Peer peer : {Peer::None, Peer::Mapped, Peer::LetGo, Peer::Dead}) {
        if (peer == Peer::LetGo && !pointer) continue; // there is nothing to let go of
        ask_row(observer, {keeps_fd, pointer, peer});
      }
    }
  }
}

} // namespace answers
