// SPDX-License-Identifier: MIT
//
// An exporter: lends memory of four kinds to all its peers, a few loans at a time, and checks every turn, every outcome, every
// release. Who may touch a piece of memory is claimed at the witness all the time:
//
//   at rest                         this process
//   out over a rung without a copy  the importer writes, or anybody reads; this process too while its upload is under way
//   out as a copy                   this process: the library copies from and to it
//   a turn is done                  this process
//   its importer was lost           nobody's any more where it is retired; as it was where it is quarantined, until the release
//                                   function says that nobody else may touch it
#pragma once

#include "chaos.hpp"

#include <list>
#include <memory>

namespace chaos::exporter {

enum class Kind { Arena, ArenaHost, Block, Pool };

struct Link {
  std::uint32_t number = 0;
  gpuloan_peer* peer = nullptr; // null before PEER_READY, and once it is closed
  std::uint32_t pid = 0;
  bool lost = false;
};

struct Memory {
  Kind kind = Kind::Arena;
  Link* link = nullptr; // of the arena's kinds
  gpuloan_region* region = nullptr;
  gpuloan_access access = GPULOAN_ACCESS_WRITE; // that the region was made for
  std::uint64_t pointer = 0, bytes = 0;
  void* host = nullptr;
  unsigned out = 0;      // loans that have not ended
  bool shared = false;   // out for read, perhaps to several
  bool claimed = false;
  bool spent = false;    // retired: not lent again
  bool resting = true;   // nothing is out, and it is claimed for this process again: collect() says so
  std::uint64_t lent = 0;
  std::atomic<std::uint64_t> released{0}; // calls of the release function
  [[nodiscard]] bool own() const noexcept { return kind == Kind::Block || kind == Kind::Pool; }
  [[nodiscard]] bool at_rest() const noexcept { return out == 0 && released.load() == lent; }
};

struct Job {
  gpuloan_loan* loan = nullptr;
  Link* link = nullptr;
  Memory* memory = nullptr;
  std::uint64_t pointer = 0, bytes = 0;
  void* host = nullptr;
  bool write = false, copied = false, cancelled = false, asked_back = false, turn_out = true;
  std::uint32_t turn = 1;
  std::uint64_t since_ms = 0;
  Order order = {};
};

class ChaosExporter final : public Side {
 public:
  using Side::Side;

 private:
  void create() override;
  void on_note(const Note& note, Fd fd) override;
  void on_event(const gpuloan_event& event) override;
  bool work() override;
  void finish() override;

  [[nodiscard]] Memory* take_memory(Link& link, bool write, bool one_turn);
  [[nodiscard]] Memory* make_memory(Link& link, bool write);
  void free_memory(Memory& memory);
  void collect();
  void lend();
  void offer(Job& job, const gpuloan_lend_options& options);
  void grant(const gpuloan_event& event);
  void fill(Job& job, bool wait);
  void rights(const Job& job, bool uploading);
  void own_again(Memory& memory);
  void out(std::unique_ptr<Job> job);
  void turn_done(Job& job);
  void next_turn(Job& job);
  void ended(Job& job, gpuloan_status outcome, const char* text);
  void judge(const Job& job, gpuloan_status outcome, const char* text) const;
  void verify(const Job& job);
  void drop(Link& link);
  [[nodiscard]] gpuloan_lend_options options_for(const Job& job, bool granted);
  [[nodiscard]] std::uint64_t size();
  [[nodiscard]] Order order();

  std::list<Link> links_;
  std::list<Memory> memory_;
  std::list<std::unique_ptr<Job>> jobs_;
  std::size_t window_ = 4;
  bool stopping_ = false, drained_ = false;
  std::uint64_t seed_ = 0; // of the next bytes
};

} // namespace chaos::exporter
