// SPDX-License-Identifier: MIT
//
// An importer: does with every loan what the order in its metadata says, and asks for results of its own accord.
#include "../support/pattern.hpp"
#include "chaos.hpp"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <list>
#include <unistd.h>
#include <vector>

namespace chaos {
namespace {

struct Link {
  std::uint32_t number = 0;
  gpuloan_peer* peer = nullptr; // null once it is closed
  bool lost = false;
  std::string trouble = {}; // why a loan could not be acquired; the exporter has to be dead then, and is soon known to be
  std::uint64_t trouble_ms = 0;
};

struct Job {
  gpuloan_loan* loan = nullptr; // null once it is dropped
  Link* link = nullptr;
  gpuloan_view view = {};
  Order order = {};
  bool held = false; // acquired, and due at `due_ms`
  std::uint64_t due_ms = 0;
  std::uint64_t since_ms = 0;
};

class ChaosImporter final : public Side {
 public:
  using Side::Side;

 private:
  void create() override;
  void on_note(const Note& note, Fd fd) override;
  void on_event(const gpuloan_event& event) override;
  bool work() override;
  void finish() override;

  void connect(const Note& note, Fd fd);
  void request();
  void acquire(Job& job);
  void check(const Job& job);
  void start_write(Job& job);
  void act(Job& job);
  [[noreturn]] void die(Job* job);

  std::list<Link> links_;
  std::list<Job> jobs_;
  std::uint64_t dies_at_ms_ = 0; // at the latest; 0: not
  std::uint64_t child_ms_ = 0;
};

void ChaosImporter::create() {
  auto options = init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_IMPORTER;
  options.gate = random_.pick({GPULOAN_GATE_AUTO, GPULOAN_GATE_AUTO, GPULOAN_GATE_AUTO, GPULOAN_GATE_HOST});
  create_context(options, "an importer's context");
}

void ChaosImporter::on_note(const Note& note, Fd fd) {
  if (note.word == Word::Link) connect(note, std::move(fd));
  if (note.word != Word::Die) return;
  dies_at_ms_ = now_ms() + 30; // before that with the first loan that it writes to
  child_ms_ = note.value;
}

void ChaosImporter::connect(const Note& note, Fd fd) {
  step("adopts a connection");
  gpuloan_peer* peer = nullptr;
  const gpuloan_status status = gpuloan_context_adopt(context_, fd.get(), kHangMs / 2, &peer);
  if (status != GPULOAN_ERR_INVALID) static_cast<void>(fd.release());
  if (status == GPULOAN_OK) {
    Link& link = links_.emplace_back();
    link.number = note.link;
    link.peer = peer;
    return;
  }
  const std::string text = gpuloan_error_text();
  tell(Word::Lost, note.link, status, text.c_str()); // after hostile records it may be any status
}

void ChaosImporter::on_event(const gpuloan_event& event) {
  const auto job = std::find_if(jobs_.begin(), jobs_.end(), [&](const Job& one) { return one.loan == event.loan && event.loan != nullptr; });
  switch (event.type) {
    case GPULOAN_EVENT_PEER_LOST: {
      const auto link = std::find_if(links_.begin(), links_.end(), [&](const Link& one) { return one.peer == event.peer; });
      expect(link != links_.end() && !link->lost, "a peer was lost that there is not");
      link->lost = true;
      return tell(Word::Lost, link->number, event.status, event.text);
    }
    case GPULOAN_EVENT_LOAN_OFFERED: {
      expect(job == jobs_.end(), "a loan was offered twice");
      Job& made = jobs_.emplace_back();
      made.loan = event.loan; // the event's reference
      made.since_ms = now_ms();
      const auto link = std::find_if(links_.begin(), links_.end(), [&](const Link& one) { return one.peer == event.peer; });
      made.link = link != links_.end() ? &*link : nullptr;
      return;
    }
    case GPULOAN_EVENT_LOAN_READY:
      expect(job != jobs_.end(), "an event of no loan");
      return acquire(*job);
    case GPULOAN_EVENT_LOAN_ENDED:
      expect(job != jobs_.end(), "an event of no loan");
      gpuloan_loan_unref(job->loan);
      jobs_.erase(job);
      return;
    default:
      fail("event " + std::to_string(event.type) + " at an importer");
  }
}

void ChaosImporter::request() {
  std::vector<Link*> open;
  for (Link& link : links_) {
    if (!link.lost) open.push_back(&link);
  }
  if (open.empty()) return;
  auto options = init<gpuloan_request_options>();
  options.bytes = random_.below(random_.chance(5) ? 3 << 20 : 20'000);
  options.memory = random_.chance(80) ? GPULOAN_MEMORY_DEVICE : GPULOAN_MEMORY_HOST;
  options.onward = random_.chance(20) ? 1 : 0;
  Job made;
  made.link = open[random_.below(open.size())];
  made.since_ms = now_ms();
  step("requests");
  const gpuloan_status status = gpuloan_request_send(made.link->peer, &options, &made.loan);
  if (status == GPULOAN_OK) jobs_.push_back(made);
  else expect_status(status, GPULOAN_ERR_PEER_LOST, "gpuloan_request_send");
}

// ---- Turns --------------------------------------------------------------------------------------------------------

void ChaosImporter::acquire(Job& job) {
  step("acquires");
  auto view = init<gpuloan_view>();
  const gpuloan_status status = gpuloan_loan_acquire(job.loan, 0, &view);
  if (status != GPULOAN_OK) { // it ended meanwhile, which its event says
    const bool ended = status == GPULOAN_ERR_PEER_LOST || status == GPULOAN_ERR_CANCELLED || status == GPULOAN_ERR_STATE;
    if (status == GPULOAN_ERR_DRIVER && job.link != nullptr) { // what the handle of a dead exporter leads to
      job.link->trouble = gpuloan_error_text();
      job.link->trouble_ms = now_ms();
    } else if (!ended) expect_status(status, GPULOAN_OK, "gpuloan_loan_acquire behind LOAN_READY");
    return;
  }
  expect_equal(view.metadata_bytes, sizeof job.order, "the metadata's bytes");
  std::memcpy(&job.order, view.metadata, sizeof job.order);
  job.view = view;
  job.held = true;
  job.due_ms = now_ms() + job.order.hold_ms;
  if (view.access == GPULOAN_ACCESS_READ) check(job);
  else start_write(job);
}

void ChaosImporter::check(const Job& job) {
  const gpuloan_view& view = job.view;
  if (view.bytes == 0) return;
  const std::uint64_t seed = job.order.seed + view.turn - 1;
  std::string wrong;
  if (view.host != nullptr) {
    const std::size_t at = pattern_mismatch({static_cast<const unsigned char*>(view.host), view.bytes}, seed);
    if (at != view.bytes) wrong = "byte " + std::to_string(at);
  } else {
    if (job.order.delay_us > 0) gpu_.call.sim_delay(stream(job.order.stream), job.order.delay_us);
    wrong = gpu_.mismatch(view.pointer, view.bytes, seed, job.order.stream);
  }
  if (wrong.empty()) return;
  auto report = init<gpuloan_loan_report>();
  static_cast<void>(gpuloan_loan_report_get(job.loan, &report));
  if (report.outcome != GPULOAN_OK || job.link == nullptr) return; // speculative: it was cancelled or lost meanwhile
  fail("turn " + std::to_string(view.turn) + " of a read loan of " + std::to_string(view.bytes) + " bytes over " + gpuloan_rung_name(report.rung) + "/" +
       gpuloan_gate_name(report.gate) + ": " + wrong);
}

void ChaosImporter::start_write(Job& job) {
  const gpuloan_view& view = job.view;
  if (view.bytes == 0) return;
  const std::uint64_t seed = job.order.seed + view.turn - 1;
  if (view.host != nullptr) {
    write_pattern({static_cast<unsigned char*>(view.host), view.bytes}, seed);
    return;
  }
  if (job.order.delay_us > 0) gpu_.call.sim_delay(stream(job.order.stream), job.order.delay_us);
  gpu_.upload(view.pointer, view.bytes, seed, job.order.stream);
  if (dies_at_ms_ != 0) die(&job);
}

// The end of the turn, as the order says. The library waits for what is under way.
void ChaosImporter::act(Job& job) {
  job.held = false;
  const Act what = job.view.turn == job.order.act_turn ? job.order.act : Act::Done;
  void* where = job.view.host != nullptr ? GPULOAN_STREAM_CPU : static_cast<void*>(stream(job.order.stream));
  step("ends a turn");
  gpuloan_status status = GPULOAN_OK;
  switch (what) {
    case Act::Done:
      status = gpuloan_loan_done(job.loan, where);
      break;
    case Act::Return:
      status = gpuloan_loan_return(job.loan);
      break;
    case Act::Fail:
      status = gpuloan_loan_fail(job.loan, "chaos");
      break;
    case Act::Drop:
      gpuloan_loan_unref(std::exchange(job.loan, nullptr));
      break;
  }
  const bool over = status == GPULOAN_ERR_PEER_LOST || status == GPULOAN_ERR_CANCELLED;
  if (!over) expect_ok(status, "the end of a turn");
}

bool ChaosImporter::work() {
  const std::uint64_t now = now_ms();
  bool waits = false;
  if (dies_at_ms_ != 0 && now >= dies_at_ms_) die(nullptr);
  for (auto job = jobs_.begin(); job != jobs_.end();) {
    if (job->held && now >= job->due_ms) act(*job);
    waits = waits || job->held;
    if (job->loan != nullptr && now - job->since_ms > 2 * kHangMs) fail("hang: a loan of link " + std::to_string(job->link != nullptr ? job->link->number : 0) + " does not end here");
    job = job->loan == nullptr ? jobs_.erase(job) : std::next(job);
  }
  if (!finishing_ && jobs_.size() < 4 && random_.chance(2)) request();
  for (Link& link : links_) {
    if (!link.lost && !link.trouble.empty() && now > link.trouble_ms + kSettleMs) fail("a loan of a living exporter could not be acquired: " + link.trouble);
    if (!link.lost || link.peer == nullptr) continue;
    if (std::any_of(jobs_.begin(), jobs_.end(), [&](const Job& job) { return job.link == &link; })) continue;
    step("closes a lost peer");
    gpuloan_peer_close(std::exchange(link.peer, nullptr));
  }
  // What is uploaded is known to be over only here; without it the pinned buffers would grow.
  for (const unsigned index : {0U, 1U}) {
    if (jobs_.empty() && gpu_.idle(index)) gpu_.sync(index);
  }
  return waits;
}

// ---- Ends ---------------------------------------------------------------------------------------------------------

// GPU work that outlives this process, on a loan that is being written; without one, a child that sleeps.
void ChaosImporter::die(Job* job) {
  step("dies");
  pid_t child = -1;
  if (job != nullptr) {
    void* library = ::dlopen(gpu_.info().path, RTLD_NOW | RTLD_LOCAL);
    const auto orphan = reinterpret_cast<int (*)(std::uint64_t, std::uint64_t, std::uint32_t, unsigned)>(::dlsym(library, "gpuloan_sim_orphan_writer"));
    expect(orphan != nullptr, "a driver without orphans");
    child = orphan(job->view.pointer, job->view.bytes, 0xDEADBEEF, static_cast<unsigned>(child_ms_));
    expect(child > 0, "gpuloan_sim_orphan_writer");
    slot_.writers.fetch_add(1);
  } else {
    child = ::fork();
    if (child == 0) {
      const timespec time = {static_cast<time_t>(child_ms_ / 1000), static_cast<long>(child_ms_ % 1000 * 1'000'000)};
      ::nanosleep(&time, nullptr);
      ::_exit(0);
    }
  }
  slot_.orphans.fetch_add(1);
  ::kill(::getpid(), SIGKILL);
  std::abort(); // not reached
}

void ChaosImporter::finish() {
  const auto over = [&] {
    turn(1);
    static_cast<void>(work());
    return jobs_.empty();
  };
  if (!becomes(over, kHangMs)) fail("hang: " + std::to_string(jobs_.size()) + " loans do not end here");
  for (const unsigned index : {0U, 1U}) gpu_.sync(index);
}

} // namespace

void run_importer(const Life& life, Board& board, int control) { ChaosImporter(life, board, control).run(); }

} // namespace chaos
