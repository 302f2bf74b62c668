// SPDX-License-Identifier: MIT
//
// The judge of a round: starts the sides, joins them, strikes, and knows of every loss whether there was a reason for it.
#pragma once

#include "chaos.hpp"

#include <map>
#include <memory>
#include <thread>
#include <vector>

namespace chaos {

struct Blows {
  std::uint64_t kills = 0, forks = 0, stops = 0, closes = 0, hostile = 0; // forks are kills too
  std::uint64_t noticed_ms = 0;                                          // the longest that a loss took to be noticed
};

class Round {
 public:
  // `interval`: so many loans between two blows, on average; 0: none.
  Round(const Wish& wish, std::uint64_t number, Board& board, int board_fd, std::uint64_t interval, Blows& blows);
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;
  ~Round();
  // Until `loans` have ended; then everything is closed. Throws Failure.
  void run(std::uint64_t loans);
  [[nodiscard]] std::uint64_t loans() const noexcept;
  std::function<void(std::uint32_t)> on_death; // the process id of a side that was killed

 private:
  struct Proc {
    Life life;
    Process process;
    std::thread thread;
    Fd control;
    bool alive = false, struck = false, drained = false;
    std::uint64_t stopped_until_ms = 0; // 0: it runs
    std::uint64_t runs_since_ms = 0;    // started or continued
  };
  struct Link {
    std::uint32_t number = 0;
    Proc* sides[2]; // exporter, importer; null once that start of it is dead
    Fd kept;        // a second end of the connection
    int kept_side = 0;
    bool ready = false, struck = false, hostile = false;
    bool awaits[2] = {false, false}; // that side has to say that it is lost
    bool told[2] = {false, false};   // it has
    std::uint64_t struck_ms = 0, waited_ms = 0; // when the other side died, and what the living one had waited for a CPU until then
  };

  void start(Proc& proc);
  void join(Proc& exporter, Proc& importer);
  void strike();
  void kill(Proc& proc, bool with_child);
  void stop(Proc& proc);
  void shut(Link& link);
  void abuse(Link& link);
  void close(Link& link);
  void lose(Link& link, bool exporter_tells, bool importer_tells);
  void buried(Proc& proc);
  void look();
  void hear(Proc& proc, const Note& note);
  [[nodiscard]] static bool has_ended(const Proc& proc);
  void reap(Proc& proc);
  void watch(Proc& proc) const;
  void finish();
  void end(Proc& proc);
  [[nodiscard]] std::string step_of(const Proc& proc) const;
  [[nodiscard]] std::string steps() const; // of all, for a report
  [[nodiscard]] std::string name(const Proc& proc) const;
  [[nodiscard]] Link* pick_link(bool kept); // not struck yet, both sides alive; null where there is none
  template <typename Done>
  void until(const char* what, Done done);

  const Wish& wish_;
  const std::uint64_t number_;
  Board& board_;
  const int board_fd_;
  const std::uint64_t interval_;
  Blows& blows_;
  Random random_;
  std::vector<std::unique_ptr<Proc>> procs_;
  std::map<std::uint32_t, Link> links_;
  std::uint32_t next_link_ = 1;
  bool respawns_ = true;
  std::uint64_t loans_before_ = 0;
};

} // namespace chaos
