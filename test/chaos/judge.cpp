// SPDX-License-Identifier: MIT
#include "judge.hpp"

#include <channel/records.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace chaos {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint64_t kNoticeMs = 10'000;
#else
constexpr std::uint64_t kNoticeMs = 1000; // of the end of a process to the event
#endif

// How long the threads of a process that run now have waited for a CPU, together: a machine with more to do than it can is not what is
// judged. 0 where the kernel does not count it.
std::uint64_t waited_for_cpu_ms(pid_t process) {
  std::uint64_t all_ns = 0;
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/task", error)) {
    std::uint64_t ran_ns = 0, waited_ns = 0;
    if (std::ifstream(task.path() / "schedstat") >> ran_ns >> waited_ns) all_ns += waited_ns;
  }
  return all_ns / 1'000'000;
}

} // namespace

Round::Round(const Wish& wish, std::uint64_t number, Board& board, int board_fd, std::uint64_t interval, Blows& blows)
    : wish_(wish), number_(number), board_(board), board_fd_(board_fd), interval_(interval), blows_(blows), random_(wish.seed, number, 99, 0) {
  loans_before_ = loans();
  const std::uint32_t exporters = 1 + static_cast<std::uint32_t>(random_.below(2));
  const std::uint32_t importers = 2 + static_cast<std::uint32_t>(random_.below(2));
  for (std::uint32_t at = 0; at < exporters + importers; ++at) {
    auto proc = std::make_unique<Proc>();
    proc->life = {wish.seed, number, 0, at, at < exporters, wish.threads, wish.verbose};
    procs_.push_back(std::move(proc));
  }
}

Round::~Round() {
  for (const auto& proc : procs_) {
    proc->process.kill();
    if (proc->thread.joinable()) ::_exit(1); // it failed, and the reason was said
  }
}

std::uint64_t Round::loans() const noexcept {
  std::uint64_t sum = 0;
  for (const Slot& slot : board_.slots) sum += slot.loans.load(std::memory_order_relaxed);
  return sum - loans_before_;
}

std::string Round::name(const Proc& proc) const {
  return std::string(proc.life.exporter ? "exporter " : "importer ") + std::to_string(proc.life.number) + "." + std::to_string(proc.life.start) +
         " (process " + std::to_string(proc.process.pid()) + ")";
}

// ---- Sides --------------------------------------------------------------------------------------------------------

void Round::start(Proc& proc) {
  SocketPair control = make_socketpair();
  proc.control = std::move(control.left);
  proc.alive = true;
  proc.struck = proc.drained = false;
  proc.stopped_until_ms = 0;
  proc.runs_since_ms = now_ms();
  board_.slots[proc.life.number].beat_ms.store(now_ms());
  if (wish_.threads) {
    proc.thread = std::thread([life = proc.life, &board = board_, end = std::move(control.right)] {
      try {
        life.exporter ? run_exporter(life, board, end.get()) : run_importer(life, board, end.get());
      } catch (const Failure& failure) {
        std::strncpy(board.slots[life.number].failure, failure.text.c_str(), sizeof board.slots[0].failure - 1);
        board.slots[life.number].failed.store(1);
      }
    });
    return;
  }
  proc.process = Process({"--side", proc.life.exporter ? "exporter" : "importer", std::to_string(proc.life.seed), std::to_string(proc.life.round),
                          std::to_string(proc.life.number), std::to_string(proc.life.start), std::to_string(board_fd_),
                          std::to_string(control.right.get()), proc.life.verbose ? "1" : "0"},
                         {board_fd_, control.right.get()});
}

void Round::join(Proc& exporter, Proc& importer) {
  SocketPair line = make_socketpair();
  const std::uint32_t number = next_link_++;
  Link& link = links_[number];
  link.number = number;
  link.sides[0] = &exporter;
  link.sides[1] = &importer;
  Note note;
  note.word = Word::Link;
  note.link = number;
  send_note(exporter.control.get(), note, line.left.get()); // who is being killed hears nothing
  send_note(importer.control.get(), note, line.right.get());
  if (random_.chance(50)) return; // else a death is noticed by the pidfd alone at one side
  link.kept_side = static_cast<int>(random_.below(2));
  link.kept = std::move(link.kept_side == 0 ? line.left : line.right);
}

// After a death: a new start, joined with all others.
void Round::buried(Proc& proc) {
  for (auto& [number, link] : links_) {
    const int side = proc.life.exporter ? 0 : 1;
    if (link.sides[side] != &proc) continue;
    Proc* other = link.sides[1 - side];
    link.sides[side] = nullptr; // of this start
    link.awaits[side] = false;
    if (!link.ready) link.kept.reset(); // nobody knows a process yet whose death could be noticed
    if (other == nullptr) continue;
    lose(link, side == 1, side == 0);
    link.struck_ms = now_ms();
    link.waited_ms = waited_for_cpu_ms(other->process.pid());
  }
  std::erase_if(links_, [](const auto& entry) { return entry.second.sides[0] == nullptr && entry.second.sides[1] == nullptr; });
  if (!respawns_) return;
  ++proc.life.start;
  start(proc);
  for (const auto& other : procs_) {
    if (other->alive && other->life.exporter != proc.life.exporter) join(proc.life.exporter ? proc : *other, proc.life.exporter ? *other : proc);
  }
}

// ---- Blows --------------------------------------------------------------------------------------------------------

void Round::lose(Link& link, bool exporter_tells, bool importer_tells) {
  link.struck = true;
  link.awaits[0] = link.awaits[0] || (exporter_tells && link.ready && !link.told[0] && link.sides[0] != nullptr);
  link.awaits[1] = link.awaits[1] || (importer_tells && !link.told[1] && link.sides[1] != nullptr);
}

Round::Link* Round::pick_link(bool kept) {
  std::vector<Link*> found;
  for (auto& [number, link] : links_) {
    if ((!kept || link.kept.get() >= 0) && !link.struck && link.sides[0] != nullptr && link.sides[1] != nullptr) found.push_back(&link);
  }
  return found.empty() ? nullptr : found[random_.below(found.size())];
}

void Round::strike() {
  ::usleep(static_cast<useconds_t>(random_.below(1500))); // anywhere between two loans
  const std::uint64_t what = random_.below(wish_.threads ? 37 : 100);
  if (what < 37) {
    Link* link = pick_link(what < 25);
    if (link == nullptr) return;
    if (what < 10) shut(*link);
    else if (what < 25) abuse(*link);
    else close(*link);
    join(*link->sides[0], *link->sides[1]); // another one for the same two, which may outlive it or not
    return;
  }
  std::vector<Proc*> whole;
  for (const auto& proc : procs_) {
    if (proc->alive && !proc->struck) whole.push_back(proc.get());
  }
  if (whole.empty()) return;
  Proc& proc = *whole[random_.below(whole.size())];
  if (what < 50) stop(proc);
  else kill(proc, !proc.life.exporter && random_.chance(40));
}

void Round::kill(Proc& proc, bool with_child) {
  proc.struck = true;
  ++blows_.kills;
  if (with_child && proc.stopped_until_ms == 0) {
    ++blows_.forks;
    Note note;
    note.word = Word::Die;
    note.value = 20 + random_.below(250);
    if (send_note(proc.control.get(), note)) return;
  }
  ::kill(proc.process.pid(), SIGKILL);
}

void Round::stop(Proc& proc) {
  if (proc.stopped_until_ms != 0) return;
  ++blows_.stops;
  proc.stopped_until_ms = now_ms() + 1 + random_.below(200);
  ::kill(proc.process.pid(), SIGSTOP);
}

void Round::shut(Link& link) {
  ++blows_.closes;
  ::shutdown(link.kept.get(), SHUT_RDWR);
  lose(link, true, true);
}

void Round::close(Link& link) {
  ++blows_.closes;
  Note note;
  note.word = Word::Close;
  note.link = link.number;
  send_note(link.sides[0]->control.get(), note);
  link.told[0] = true; // it knows
  lose(link, false, false);
}

// Bytes that the side at the kept end never sent. What is no record at all has to end the connection; of a record with a
// good head it depends on the rest, which names nothing that exists.
void Round::abuse(Link& link) {
  namespace channel = gpuloan::channel;
  ++blows_.hostile;
  link.hostile = true;
  unsigned char bytes[600];
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random_.next());
  std::size_t length = 1 + random_.below(sizeof bytes);
  const bool headed = random_.chance(60);
  if (headed) {
    const auto type = static_cast<std::uint16_t>(1 + random_.below(channel::kTypeMax + 1));
    const auto tail = static_cast<std::uint16_t>(random_.chance(70) ? 0 : random_.below(300));
    const channel::Header head = {channel::kMagic, channel::kVersionMax, type, 0, tail, 0};
    std::memcpy(bytes, &head, sizeof head);
    length = channel::kRecordBytes + tail;
  }
  const bool sent = ::send(link.kept.get(), bytes, length, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
  const bool certain = sent && !headed;
  lose(link, certain, certain);
}

// ---- Looking ------------------------------------------------------------------------------------------------------

void Round::hear(Proc& proc, const Note& note) {
  if (note.word == Word::Drained) proc.drained = true;
  const auto found = links_.find(note.link);
  if (found == links_.end()) return;
  Link& link = found->second;
  if (note.word == Word::Ready) link.ready = true;
  if (note.word != Word::Lost) return;
  const int side = proc.life.exporter ? 0 : 1;
  Proc* other = link.sides[1 - side];
  const bool dying = other == nullptr || other->struck || !respawns_; // its end may be seen here first
  const std::string what = name(proc) + " lost link " + std::to_string(note.link) + " with " + gpuloan_status_name(note.status) + ": " + note.text;
  if (!link.struck && !dying) {
    if (other->process.pid() > 0) static_cast<void>(becomes([&] { return has_ended(*other); }, 500)); // of itself: that is the fault
    reap(*other);
    fail(what + ", and nobody had touched it");
  }
  if (!link.hostile) expect_status(note.status, GPULOAN_ERR_PEER_LOST, what);
  if (link.awaits[side] && link.struck_ms != 0 && link.ready) {
    const std::uint64_t from = std::max(link.struck_ms, proc.runs_since_ms);
    const std::uint64_t took = note.value > from ? note.value - from : 0;
    blows_.noticed_ms = std::max(blows_.noticed_ms, took);
    if (took > kNoticeMs) {
      const std::uint64_t now = waited_for_cpu_ms(proc.process.pid()), waited = now - std::min(now, link.waited_ms);
      const std::string times = std::to_string(took) + " ms after the other process had ended, of which it waited " + std::to_string(waited) + " ms for a CPU";
      if (took > kNoticeMs + waited) fail(what + ", " + times);
      std::printf("# %s lost link %u %s\n", name(proc).c_str(), link.number, times.c_str());
    }
  }
  if (!link.struck) lose(link, side == 1, side == 0); // the other side hears of it as well, if it lives
  link.awaits[side] = false;
  link.told[side] = true;
}

bool Round::has_ended(const Proc& proc) {
  siginfo_t info = {};
  return ::waitid(P_PID, static_cast<id_t>(proc.process.pid()), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
}

void Round::reap(Proc& proc) {
  Slot& slot = board_.slots[proc.life.number];
  if (slot.failed.load() != 0) fail(name(proc) + ": " + slot.failure);
  if (wish_.threads || !proc.alive) return;
  if (!has_ended(proc)) return;
  const auto pid = static_cast<std::uint32_t>(proc.process.pid());
  const std::string who = name(proc);
  const int status = proc.process.wait();
  if (slot.failed.load() != 0) fail(who + ": " + slot.failure);
  if (!proc.struck && (respawns_ || status != 0)) fail(who + " ended by itself with " + std::to_string(status));
  proc.alive = false;
  Note note; // what it said before
  for (Fd fd; receive_note(proc.control.get(), note, fd);) hear(proc, note);
  on_death(pid);
  buried(proc);
}

void Round::watch(Proc& proc) const {
  const std::uint64_t now = now_ms();
  const Slot& slot = board_.slots[proc.life.number];
  const std::uint64_t since = std::max(slot.beat_ms.load(), proc.runs_since_ms);
  if (!proc.alive || proc.stopped_until_ms != 0 || now < since + 3 * kHangMs / 2 || step_of(proc) == "has ended") return;
  fail("hang: " + name(proc) + " \"" + step_of(proc) + "\" since " + std::to_string(now - since) + " ms");
}

std::string Round::step_of(const Proc& proc) const {
  const Slot& slot = board_.slots[proc.life.number];
  char text[sizeof slot.step + 1] = "";
  for (std::size_t at = 0; at < std::size(slot.step); ++at) {
    const std::uint64_t word = slot.step[at].load();
    std::memcpy(text + at * sizeof word, &word, sizeof word);
  }
  return text;
}

std::string Round::steps() const {
  std::string text;
  for (const auto& proc : procs_) {
    const std::uint64_t since = now_ms() - board_.slots[proc->life.number].beat_ms.load();
    text += ", " + name(*proc) + (proc->alive ? "" : " dead") + " \"" + step_of(*proc) + "\" since " + std::to_string(since) + " ms";
  }
  return text;
}

void Round::look() {
  std::vector<pollfd> all;
  for (const auto& proc : procs_) all.push_back({proc->alive ? proc->control.get() : -1, POLLIN, 0});
  ::poll(all.data(), all.size(), 1);
  for (std::size_t at = 0; at < procs_.size(); ++at) {
    Proc& proc = *procs_[at];
    Note note;
    if (all[at].revents != 0) {
      for (Fd fd; receive_note(proc.control.get(), note, fd);) hear(proc, note);
    }
    if (proc.stopped_until_ms != 0 && (now_ms() >= proc.stopped_until_ms || !respawns_)) {
      proc.stopped_until_ms = 0;
      proc.runs_since_ms = now_ms();
      ::kill(proc.process.pid(), SIGCONT);
    }
    reap(proc);
    watch(proc);
  }
}

template <typename Done>
void Round::until(const char* what, Done done) {
  for (const std::uint64_t end = now_ms() + 2 * kHangMs; !done(); look()) {
    if (now_ms() >= end) fail(std::string("hang: ") + what + steps());
  }
}

// ---- A round ------------------------------------------------------------------------------------------------------

void Round::run(std::uint64_t wanted) {
  for (const auto& proc : procs_) start(*proc);
  for (const auto& exporter : procs_) {
    for (const auto& importer : procs_) {
      if (exporter->life.exporter && !importer->life.exporter) join(*exporter, *importer);
    }
  }
  const auto gap = [&] { return interval_ == 0 ? UINT64_MAX / 2 : random_.below(2 * interval_) + 1; };
  std::uint64_t next = gap(), last = 0, moved_ms = now_ms();
  while (loans() < wanted) {
    look();
    const std::uint64_t now = loans();
    if (now != last) moved_ms = now_ms();
    last = now;
    if (now_ms() - moved_ms > 2 * kHangMs) fail("hang: no loan has ended for " + std::to_string(2 * kHangMs) + " ms" + steps());
    if (now < next) continue;
    strike();
    next += gap();
  }
  finish();
}

void Round::end(Proc& proc) {
  Note note;
  note.word = Word::Finish;
  send_note(proc.control.get(), note);
  until("a side does not end", [&] {
    if (!wish_.threads) return !proc.alive;
    const Slot& slot = board_.slots[proc.life.number];
    if (slot.failed.load() != 0) fail(name(proc) + ": " + slot.failure);
    return step_of(proc) == "has ended";
  });
  if (proc.thread.joinable()) proc.thread.join();
  proc.alive = false;
}

void Round::finish() {
  // Who was told to die does so first, and is there again.
  until("a side that was struck does not die", [&] { return std::none_of(procs_.begin(), procs_.end(), [](const auto& proc) { return proc->struck; }); });
  Note note;
  note.word = Word::Stop;
  for (const auto& proc : procs_) {
    if (proc->life.exporter) send_note(proc->control.get(), note);
  }
  until("an exporter's loans do not end", [&] {
    return std::all_of(procs_.begin(), procs_.end(), [](const auto& proc) { return !proc->life.exporter || proc->drained; });
  });
  until("a link was struck, and a side does not say that it is lost", [&] {
    return std::none_of(links_.begin(), links_.end(), [](const auto& entry) { return entry.second.awaits[0] || entry.second.awaits[1]; });
  });
  respawns_ = false;
  for (const bool exporters : {false, true}) { // quarantine ends with the importers' processes
    for (const auto& proc : procs_) {
      if (proc->life.exporter == exporters) end(*proc);
    }
  }
}

} // namespace chaos
