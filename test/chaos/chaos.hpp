// SPDX-License-Identifier: MIT
//
// What the parts of the chaos harness share. The judge starts exporters and importers, as processes of this program or as
// threads, joins each exporter with each importer by a socketpair, and strikes. A side draws what it does from (seed, round,
// its number, how often it was started), so a seed says what is tried, and the scheduler in which order.
//
// A side tells the judge of its life on the board, which is shared memory and survives it, and of lost peers over its
// control socket. The first thing that is wrong ends the side, with a sentence on the board.
#pragma once

#include "../support/bench.hpp"

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

namespace chaos {

using namespace loan_test;

inline constexpr std::uint32_t kHangMs = 20'000; // nothing takes so long, not in a build with sanitizers either
inline constexpr std::uint32_t kSides = 8;       // exporters and importers of a round, at most

// SplitMix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}
  Random(std::uint64_t seed, std::uint64_t round, std::uint64_t number, std::uint64_t start) noexcept
      : state_(seed * 0x9E3779B97F4A7C15U + round * 0xD1342543DE82EF95U + number * 0xA0761D6478BD642FU + start * 0xE7037ED1A0B428DBU) {}
  [[nodiscard]] std::uint64_t next() noexcept {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }
  [[nodiscard]] std::uint64_t below(std::uint64_t limit) noexcept { return next() % limit; }
  [[nodiscard]] bool chance(unsigned percent) noexcept { return below(100) < percent; }
  template <typename Value, std::size_t count>
  [[nodiscard]] Value pick(const Value (&values)[count]) noexcept {
    return values[below(count)];
  }

 private:
  std::uint64_t state_;
};

// What the importer is to do with a loan; travels as its metadata.
enum class Act : std::uint32_t {
  Done,
  Return, // acquired and not done, with work under way
  Fail,
  Drop,   // the last reference, acquired and not done
};
struct Order {
  std::uint64_t seed;  // of the bytes of turn 1; each turn has the next
  std::uint32_t turns; // that come if nothing goes wrong
  std::uint32_t act_turn;
  Act act; // in that turn; the others are done
  std::uint32_t delay_us; // the stream works so long first
  std::uint32_t hold_ms;  // the view is kept so long
  std::uint32_t stream;
};

// What the judge says to a side, and a side to the judge.
enum class Word : std::uint32_t {
  Link,    // with a descriptor: connect over it
  Close,   // to an exporter: close the peer of this link
  Die,     // to an importer: fork a child that lives `value` ms longer, then end by SIGKILL
  Stop,    // to an exporter: lend nothing more, and say Drained when all loans have ended
  Finish,  // close everything, look for what stayed behind, and end
  Ready,   // from an exporter: the handshake over this link is complete
  Lost,    // from a side: the peer of this link was lost; `value` is when, by now_ms()
  Drained,
};
struct Note {
  Word word = Word::Stop;
  std::uint32_t link = 0;
  std::uint64_t value = 0;
  gpuloan_status status = GPULOAN_OK;
  char text[256] = "";
};
// false: nobody is there any more (or, receiving, nothing has come).
bool send_note(int control, const Note& note, int fd = -1);
[[nodiscard]] bool receive_note(int control, Note& note, Fd& fd);

struct Slot {
  std::atomic<std::uint64_t> beat_ms; // when the side's loop last turned
  std::atomic<std::uint64_t> loans;   // ended, at an exporter
  std::atomic<std::uint64_t> orphans; // children that this importer left behind
  std::atomic<std::uint64_t> writers; // of these, that went on writing
  std::atomic<std::uint64_t> step[4]; // what it does, as text
  std::atomic<std::uint32_t> failed;
  char failure[768];
};
struct Board {
  Slot slots[kSides];
  std::atomic<std::uint64_t> turns;
  std::atomic<std::uint64_t> outcomes[128]; // of loans at exporters, by the status's number without its sign
  std::atomic<std::uint64_t> rungs[4];      // loans over vmm, pool, ipc, host
};

// What a side is told at its start.
struct Life {
  std::uint64_t seed = 0, round = 0, start = 0;
  std::uint32_t number = 0; // its slot
  bool exporter = false;
  bool thread = false; // of the judge's process, which then looks for leaks
  bool verbose = false;
};

// What exporters and importers have in common.
class Side {
 public:
  Side(const Life& life, Board& board, int control);
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;
  virtual ~Side() { gpuloan_context_destroy(context_); }
  void run();

 protected:
  virtual void create() = 0;
  virtual void on_note(const Note& note, Fd fd) = 0;
  virtual void on_event(const gpuloan_event& event) = 0;
  // What is to be done besides; true when it wants to be called again at once.
  virtual bool work() = 0;
  virtual void finish() = 0; // after Finish: what has to end before the context
  void create_context(gpuloan_context_options& options, const char* role);
  void step(std::string_view what) noexcept;
  void tell(Word word, std::uint32_t link = 0, gpuloan_status status = GPULOAN_OK, const char* text = "");
  void turn(std::uint32_t wait_ms); // waits for events or notes, and handles them
  [[nodiscard]] cuda::Stream stream(unsigned index) { return gpu_.stream(index); }
  void claim(std::uint64_t pointer, std::uint64_t bytes, std::uint32_t writer, std::uint32_t second_writer, std::uint32_t reader);
  void unclaim(std::uint64_t pointer, std::uint64_t bytes);
  [[nodiscard]] std::uint32_t self() const noexcept { return self_; }

  const Life life_;
  Board& board_;
  Slot& slot_;
  Random random_;
  Gpu gpu_{"sim"};
  gpuloan_context* context_ = nullptr;
  bool finishing_ = false;

 private:
  void look_for_leaks(const std::set<std::string>& fds, const std::map<std::string, std::int64_t>& live, std::size_t threads);
  const int control_;
  const std::uint32_t self_;
  bool caller_loop_ = false;
};

[[nodiscard]] std::size_t thread_count();
void run_exporter(const Life& life, Board& board, int control);
void run_importer(const Life& life, Board& board, int control);

struct Wish {
  std::uint64_t seed = 1, loans = 4000, kills = 40;
  std::uint64_t seconds = 0; // 0: no limit
  std::optional<std::uint64_t> round; // this one alone
  bool threads = false, verbose = false;
};
// Everything: the rounds, and the last line. The exit status.
int run_judge(const Wish& wish);

} // namespace chaos
