// SPDX-License-Identifier: MIT
//
// The exporter's memory and its lending.
#include "exporter.hpp"

#include "../support/pattern.hpp"

#include <algorithm>

namespace chaos {
namespace exporter {
namespace {

constexpr std::uint32_t kAnybody = UINT32_MAX;
constexpr std::size_t kMemoriesMax = 24;

void on_release(void* user) { static_cast<Memory*>(user)->released.fetch_add(1); }

} // namespace

void ChaosExporter::create() {
  auto options = init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_EXPORTER;
  options.engine = random_.pick({GPULOAN_ENGINE_AUTO, GPULOAN_ENGINE_EPOLL, GPULOAN_ENGINE_IO_URING});
  options.idle_bytes = random_.chance(50) ? 4 << 20 : 0; // chunks are recalled now and then, or never
  window_ = 1 + random_.below(8);
  seed_ = random_.next() >> 24; // the pattern has room for so much
  create_context(options, "an exporter's context");
}

void ChaosExporter::on_note(const Note& note, Fd fd) {
  if (note.word == Word::Stop) stopping_ = true;
  if (note.word == Word::Link) {
    Link& link = links_.emplace_back();
    link.number = note.link;
    const std::string account = std::to_string(note.link);
    expect_ok(gpuloan_context_attach(context_, fd.get(), account.c_str()), "gpuloan_context_attach");
    static_cast<void>(fd.release());
  }
  if (note.word != Word::Close) return;
  const auto found = std::find_if(links_.begin(), links_.end(), [&](const Link& link) { return link.number == note.link; });
  if (found == links_.end() || found->peer == nullptr || found->lost) return;
  step("closes a peer");
  found->lost = true;
  gpuloan_peer_close(std::exchange(found->peer, nullptr));
}

void ChaosExporter::on_event(const gpuloan_event& event) {
  const auto of_peer = [&](const Link& link) { return link.peer == event.peer && event.peer != nullptr; };
  const auto of_loan = [&](const std::unique_ptr<Job>& job) { return job->loan == event.loan; };
  switch (event.type) {
    case GPULOAN_EVENT_PEER_READY: {
      auto info = init<gpuloan_peer_info>();
      expect_ok(gpuloan_peer_info_get(event.peer, &info), "gpuloan_peer_info_get");
      const auto number = static_cast<std::uint32_t>(std::stoul(info.account));
      const auto found = std::find_if(links_.begin(), links_.end(), [&](const Link& link) { return link.number == number; });
      expect(found != links_.end() && found->peer == nullptr, "PEER_READY of no link");
      found->peer = event.peer;
      found->pid = static_cast<std::uint32_t>(info.pid);
      return tell(Word::Ready, number);
    }
    case GPULOAN_EVENT_PEER_LOST: {
      const auto found = std::find_if(links_.begin(), links_.end(), of_peer);
      if (found == links_.end()) return; // closed by us
      expect(!found->lost, "a peer was lost twice");
      found->lost = true;
      return tell(Word::Lost, found->number, event.status, event.text);
    }
    case GPULOAN_EVENT_PEER_REFUSED:
      return; // it was struck in its handshake
    case GPULOAN_EVENT_REQUEST:
      return grant(event);
    case GPULOAN_EVENT_LOAN_DONE:
    case GPULOAN_EVENT_LOAN_ENDED: {
      const auto found = std::find_if(jobs_.begin(), jobs_.end(), of_loan);
      expect(found != jobs_.end(), "an event of no loan");
      if (event.type == GPULOAN_EVENT_LOAN_DONE) return turn_done(**found);
      ended(**found, event.status, event.text);
      jobs_.erase(found);
      return;
    }
    default:
      fail("event " + std::to_string(event.type) + " at an exporter");
  }
}

// ---- Memory -------------------------------------------------------------------------------------------------------

std::uint64_t ChaosExporter::size() {
  if (random_.chance(3)) return random_.below(2); // 0 too
  const std::uint64_t most = std::uint64_t{1} << (random_.chance(4) ? 22 : 6 + random_.below(11));
  return 1 + random_.below(most);
}

Memory* ChaosExporter::make_memory(Link& link, bool write) {
  constexpr Kind kinds[] = {Kind::Arena, Kind::Arena, Kind::Arena, Kind::ArenaHost, Kind::Block, Kind::Block, Kind::Pool};
  Memory& made = memory_.emplace_back();
  made.kind = random_.pick(kinds);
  made.bytes = size();
  if (made.own()) {
    made.bytes = std::max<std::uint64_t>(made.bytes, 1);
    if (made.kind == Kind::Pool) made.pointer = gpu_.alloc(made.bytes);
    else expect(gpu_.call.cuMemAlloc(&made.pointer, made.bytes) == 0, "cuMemAlloc");
  } else {
    made.link = &link;
    made.access = write || random_.chance(50) ? GPULOAN_ACCESS_WRITE : GPULOAN_ACCESS_READ;
    auto options = init<gpuloan_region_options>();
    options.bytes = made.bytes;
    options.access = made.access;
    options.memory = made.kind == Kind::ArenaHost ? GPULOAN_MEMORY_HOST : GPULOAN_MEMORY_DEVICE;
    const gpuloan_status status = gpuloan_region_create(link.peer, &options, &made.region);
    if (status != GPULOAN_OK) {
      expect_status(status, GPULOAN_ERR_PEER_LOST, "gpuloan_region_create"); // its event is under way
      memory_.pop_back();
      return nullptr;
    }
    made.pointer = gpuloan_region_pointer(made.region);
    made.host = gpuloan_region_host(made.region);
  }
  own_again(made);
  return &made;
}

Memory* ChaosExporter::take_memory(Link& link, bool write, bool one_turn) {
  std::vector<Memory*> fit;
  for (Memory& memory : memory_) {
    if (memory.spent || (memory.link != nullptr && memory.link != &link) || (write && memory.access == GPULOAN_ACCESS_READ)) continue;
    const bool once_more = !write && one_turn && memory.own() && memory.shared && memory.out < 3 && memory.released.load() + memory.out == memory.lent;
    if (memory.resting || once_more) fit.push_back(&memory);
  }
  if (fit.empty() || (memory_.size() < kMemoriesMax && random_.chance(30))) return make_memory(link, write);
  return fit[random_.below(fit.size())];
}

void ChaosExporter::own_again(Memory& memory) {
  if (memory.spent || memory.bytes == 0 || memory.kind == Kind::ArenaHost) return;
  claim(memory.pointer, memory.bytes, self(), 0, 0);
  memory.claimed = true;
}

void ChaosExporter::free_memory(Memory& memory) {
  step("frees memory");
  if (std::exchange(memory.claimed, false)) unclaim(memory.pointer, memory.bytes);
  if (memory.region != nullptr) expect_ok(gpuloan_region_destroy(memory.region), "gpuloan_region_destroy");
  else gpu_.free(memory.pointer);
}

// Takes back what the release functions gave, and frees some.
void ChaosExporter::collect() {
  for (auto memory = memory_.begin(); memory != memory_.end();) {
    expect(memory->released.load() <= memory->lent, "a release function was called twice");
    if (!memory->at_rest()) {
      ++memory;
      continue;
    }
    if (!std::exchange(memory->resting, true)) own_again(*memory);
    memory->shared = false;
    const bool lost = memory->link != nullptr && memory->link->lost;
    if (lost || memory->spent || finishing_ || random_.chance(memory_.size() > kMemoriesMax / 2 ? 10 : 1)) {
      free_memory(*memory);
      memory = memory_.erase(memory);
    } else {
      ++memory;
    }
  }
}

// ---- Lending ------------------------------------------------------------------------------------------------------

Order ChaosExporter::order() {
  Order made = {};
  seed_ += 8;
  made.seed = seed_;
  made.turns = random_.chance(75) ? 1 : 1 + static_cast<std::uint32_t>(random_.below(5));
  made.act_turn = 1 + static_cast<std::uint32_t>(random_.below(made.turns));
  made.act = random_.chance(90) ? Act::Done : random_.pick({Act::Return, Act::Fail, Act::Drop});
  made.delay_us = random_.chance(15) ? static_cast<std::uint32_t>(random_.below(3000)) : 0;
  made.hold_ms = random_.chance(4) ? static_cast<std::uint32_t>(random_.below(8)) : 0;
  made.stream = static_cast<std::uint32_t>(random_.below(2));
  return made;
}

gpuloan_lend_options ChaosExporter::options_for(const Job& job, bool granted) {
  auto options = init<gpuloan_lend_options>();
  options.access = job.write ? GPULOAN_ACCESS_WRITE : GPULOAN_ACCESS_READ;
  options.gate = random_.pick({GPULOAN_GATE_AUTO, GPULOAN_GATE_AUTO, GPULOAN_GATE_MEMOP, GPULOAN_GATE_EVENT, GPULOAN_GATE_HOST});
  options.memory = (granted || job.memory->kind == Kind::ArenaHost) || random_.chance(90) ? GPULOAN_MEMORY_DEVICE : GPULOAN_MEMORY_HOST;
  if (!granted && job.memory->kind == Kind::ArenaHost) options.memory = GPULOAN_MEMORY_HOST;
  options.keep_open = job.order.turns > 1 ? 1 : 0;
  options.stream = job.host != nullptr ? GPULOAN_STREAM_CPU : static_cast<void*>(stream(job.order.stream));
  options.metadata = &job.order;
  options.metadata_bytes = sizeof job.order;
  const std::uint32_t own = job.memory == nullptr || job.memory->kind == Kind::Arena ? GPULOAN_RUNG_VMM
                            : job.memory->kind == Kind::Pool                       ? GPULOAN_RUNG_POOL
                                                                                   : GPULOAN_RUNG_IPC;
  if (options.memory == GPULOAN_MEMORY_DEVICE) {
    const std::uint32_t choices[] = {0, own, own, GPULOAN_RUNG_HOST, GPULOAN_RUNG_VMM};
    options.rungs = random_.pick(choices);
    if (life_.thread && options.rungs != GPULOAN_RUNG_HOST) options.rungs &= GPULOAN_RUNG_VMM;
  }
  return options;
}

// Puts the bytes of the turn there. A write loan gets others, which the importer has to replace.
void ChaosExporter::fill(Job& job, bool wait) {
  const std::uint64_t seed = job.order.seed + job.turn - 1 + (job.write ? 1'000'000 : 0);
  if (job.host != nullptr) {
    write_pattern({static_cast<unsigned char*>(job.host), job.bytes}, seed);
    return;
  }
  gpu_.upload(job.pointer, job.bytes, seed, job.order.stream);
  if (wait) gpu_.sync(job.order.stream);
}

// For the turn that begins; `uploading`: this process's own work is still under way.
void ChaosExporter::rights(const Job& job, bool uploading) {
  Memory& memory = *job.memory;
  if (!memory.claimed) return;
  const std::uint32_t mine = uploading || job.copied ? self() : 0;
  if (job.copied) claim(memory.pointer, memory.bytes, self(), 0, job.memory->shared ? kAnybody : 0);
  else if (job.write) claim(memory.pointer, memory.bytes, job.link->pid, mine, 0);
  else claim(memory.pointer, memory.bytes, mine, 0, kAnybody);
}

void ChaosExporter::lend() {
  std::vector<Link*> open;
  for (Link& link : links_) {
    if (link.peer != nullptr && !link.lost) open.push_back(&link);
  }
  if (open.empty()) return;
  auto job = std::make_unique<Job>();
  job->link = open[random_.below(open.size())];
  job->write = random_.chance(50);
  job->order = order();
  job->memory = take_memory(*job->link, job->write, job->order.turns == 1);
  if (job->memory == nullptr) return;
  Memory& memory = *job->memory;
  const bool joins = memory.out > 0; // what others read already
  if (joins) job->order.turns = job->order.act_turn = 1;
  const std::uint64_t offset = memory.bytes > 64 && !joins && random_.chance(30) ? random_.below(memory.bytes / 2) : 0;
  job->pointer = memory.pointer != 0 ? memory.pointer + offset : 0;
  job->host = memory.host != nullptr ? static_cast<unsigned char*>(memory.host) + offset : nullptr;
  job->bytes = memory.bytes - offset;
  if (job->host != nullptr) job->pointer = reinterpret_cast<std::uint64_t>(job->host); // host regions go by either address
  const bool wait = random_.chance(50);
  if (joins) {
    job->order.act = Act::Done;
    for (const auto& other : jobs_) {
      if (other->memory != &memory) continue;
      job->order.seed = other->order.seed;
      job->order.stream = other->order.stream; // behind its upload
      job->pointer = other->pointer;
      job->bytes = other->bytes;
    }
  } else {
    step("fills memory");
    fill(*job, wait);
  }
  memory.shared = joins || (!job->write && job->order.turns == 1 && memory.own() && random_.chance(50));
  if (!joins && memory.claimed) { // by what rung is not known yet
    if (job->write) claim(memory.pointer, memory.bytes, self(), job->link->pid, 0);
    else claim(memory.pointer, memory.bytes, self(), 0, kAnybody);
  }
  offer(*job, options_for(*job, false));
  if (job->loan == nullptr) return;
  if (!joins && !memory.shared) rights(*job, !wait);
  if (random_.chance(3)) {
    step("cancels");
    const gpuloan_status status = gpuloan_loan_cancel(job->loan, "chaos");
    job->cancelled = status == GPULOAN_OK;
    if (!job->cancelled) expect_status(status, GPULOAN_ERR_STATE, "gpuloan_loan_cancel"); // it has ended already
  }
  out(std::move(job));
}

void ChaosExporter::offer(Job& job, const gpuloan_lend_options& wanted) {
  gpuloan_lend_options options = wanted;
  options.release = on_release;
  options.release_user = job.memory;
  step("lends");
  gpuloan_status status = gpuloan_lend(job.link->peer, job.pointer, job.bytes, &options, &job.loan);
  if (status == GPULOAN_ERR_NO_RUNG && options.rungs != 0) { // the one that was asked for cannot carry it: the best that can
    options.rungs = 0;
    status = gpuloan_lend(job.link->peer, job.pointer, job.bytes, &options, &job.loan);
  }
  if (status != GPULOAN_OK) {
    expect_status(status, GPULOAN_ERR_PEER_LOST, "gpuloan_lend"); // its event is under way
    gpu_.sync(job.order.stream);
    if (job.memory->out == 0) own_again(*job.memory);
    return;
  }
  ++job.memory->lent;
  ++job.memory->out;
  job.memory->resting = false;
  auto report = init<gpuloan_loan_report>();
  expect_ok(gpuloan_loan_report_get(job.loan, &report), "gpuloan_loan_report_get");
  job.copied = report.rung == GPULOAN_RUNG_HOST || (report.rung == GPULOAN_RUNG_VMM && job.memory->own());
}

void ChaosExporter::out(std::unique_ptr<Job> job) {
  auto report = init<gpuloan_loan_report>();
  expect_ok(gpuloan_loan_report_get(job->loan, &report), "gpuloan_loan_report_get");
  const int rung = report.rung == GPULOAN_RUNG_VMM ? 0 : report.rung == GPULOAN_RUNG_POOL ? 1 : report.rung == GPULOAN_RUNG_IPC ? 2 : 3;
  board_.rungs[rung].fetch_add(1, std::memory_order_relaxed);
  job->since_ms = now_ms();
  jobs_.push_back(std::move(job));
}

void ChaosExporter::grant(const gpuloan_event& event) {
  auto info = init<gpuloan_request_info>();
  expect_ok(gpuloan_request_info_get(event.request, &info), "gpuloan_request_info_get");
  const auto link = std::find_if(links_.begin(), links_.end(), [&](const Link& one) { return one.peer == info.peer; });
  const bool absurd = info.bytes > (std::uint64_t{64} << 20); // made by hostile hands
  if (stopping_ || absurd || link == links_.end() || random_.chance(15)) {
    step("denies");
    const gpuloan_status status = gpuloan_request_deny(event.request, "chaos");
    if (status != GPULOAN_OK) expect_status(status, GPULOAN_ERR_PEER_LOST, "gpuloan_request_deny");
    return;
  }
  auto job = std::make_unique<Job>();
  job->link = &*link;
  job->write = true;
  job->order = order();
  job->bytes = info.bytes;
  Memory& memory = memory_.emplace_back();
  job->memory = &memory;
  memory.link = &*link;
  memory.bytes = info.bytes;
  memory.kind = info.memory == GPULOAN_MEMORY_HOST ? Kind::ArenaHost : Kind::Arena;
  auto options = options_for(*job, true);
  options.memory = info.memory;
  options.stream = GPULOAN_STREAM_CPU;
  if (info.memory == GPULOAN_MEMORY_HOST) options.rungs = 0;
  options.release = on_release;
  options.release_user = &memory;
  step("grants");
  const gpuloan_status status = gpuloan_request_grant(event.request, &options, &memory.region, &job->loan);
  if (status != GPULOAN_OK) {
    expect_status(status, GPULOAN_ERR_PEER_LOST, "gpuloan_request_grant");
    static_cast<void>(gpuloan_request_deny(event.request, "lost"));
    memory_.pop_back();
    return;
  }
  memory.pointer = job->pointer = gpuloan_region_pointer(memory.region);
  memory.host = job->host = gpuloan_region_host(memory.region);
  memory.lent = memory.out = 1;
  memory.resting = false;
  memory.claimed = memory.kind == Kind::Arena && memory.bytes > 0;
  auto report = init<gpuloan_loan_report>();
  expect_ok(gpuloan_loan_report_get(job->loan, &report), "gpuloan_loan_report_get");
  job->copied = report.rung == GPULOAN_RUNG_HOST;
  rights(*job, false);
  out(std::move(job));
}

bool ChaosExporter::work() {
  collect();
  for (const auto& job : jobs_) {
    if (now_ms() - job->since_ms < kHangMs) continue;
    auto report = init<gpuloan_loan_report>();
    static_cast<void>(gpuloan_loan_report_get(job->loan, &report));
    fail("hang: loan " + std::to_string(report.id) + " of link " + std::to_string(job->link->number) + " is out since " + std::to_string(kHangMs) +
         " ms, turn " + std::to_string(job->turn) + " of " + std::to_string(job->order.turns) + ", " + gpuloan_rung_name(report.rung) + "/" +
         gpuloan_gate_name(report.gate) + (job->write ? ", write" : ", read") + (job->cancelled ? ", cancelled" : "") + ", " +
         std::to_string(report.turns_done) + " turns done, " + gpuloan_memory_state_name(report.memory_state));
  }
  for (Link& link : links_) {
    if (link.lost) drop(link);
  }
  if (stopping_ && jobs_.empty() && !std::exchange(drained_, true)) tell(Word::Drained);
  if (stopping_ || jobs_.size() >= window_) return false;
  lend();
  return jobs_.size() < window_ && !jobs_.empty();
}

} // namespace exporter

void run_exporter(const Life& life, Board& board, int control) { exporter::ChaosExporter(life, board, control).run(); }

} // namespace chaos
