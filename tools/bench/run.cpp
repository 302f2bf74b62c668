// SPDX-License-Identifier: MIT
#include "run.hpp"

#include "link.hpp"

#include <atomic>

namespace gpuloan::tool::bench {
namespace {

constexpr std::size_t kWordBytes = 4096;
constexpr std::uint64_t kPinnedBytes = 64 * kMiB; // a copy to pinned memory goes round in as much
constexpr std::uint64_t kPinnedPiece = 4 * kMiB;

} // namespace

Run::Run(const BenchOptions& options, Session& session)
    : options_(options),
      session_(session),
      deadline_(options.common.timeout_ms),
      cuda_(session.driver, options.common.device),
      calls_(session.driver) {
  start_worker();
}

void Run::start_worker() {
  Link link = bench::start_worker(options_);
  join(link, session_.context, deadline_);
  child_ = std::move(link.child);
  channel_ = std::move(link.channel);
  peer_ = std::move(link.peer);
  words_ = std::make_unique<BarePages>(calls_, BarePages::make(kWordBytes), kWordBytes);
  channel_->send({.op = Op::Words, .bytes = kWordBytes}, words_->fd());
  static_cast<void>(channel_->expect(Op::Words));
}

Run::Counts Run::counts(std::uint64_t bytes) const {
  const std::uint32_t turns = bytes <= 4 * kMiB ? 400 : bytes <= 256 * kMiB ? 60 : bytes <= 4 * kGiB ? 12 : 4;
  return options_.quick ? Counts{5, std::max(3U, turns / 10)} : Counts{15, turns};
}

std::vector<Comparison> Run::all(bool whole_device, const Progress& progress) {
  using Case = Comparison (Run::*)(std::uint64_t);
  struct Entry {
    const char* name;
    Case run;
    std::vector<std::uint64_t> sizes;
    bool whole_device = false;
    bool sized = true; // --size means it
  };
  const Entry entries[] = {
      {"turns", &Run::turns, {64 << 10, 2 * kMiB, 64 * kMiB, kGiB}},
      {"loans", &Run::loans, {64 << 10, 2 * kMiB, 64 * kMiB, kGiB}},
      {"offsets", &Run::offsets, {64 << 10, 64 * kMiB, kGiB}},
      {"copies", &Run::copies, {64 * kMiB, 4 * kGiB}},
      {"compute", &Run::compute, {compute_bytes()}},
      {"pool", &Run::pool, {session_.driver.simulated != 0 ? 64 * kMiB : kGiB}},
      {"whole", &Run::whole, {whole_bytes()}, true},
      {"fit", &Run::fit, {64 * kMiB}, true, false},
  };
  std::vector<Comparison> out;
  for (const Entry& entry : entries) {
    if (entry.whole_device != whole_device || !options_.wants(entry.name)) continue;
    const bool own = options_.sizes.empty() || !entry.sized;
    for (const std::uint64_t bytes : own ? entry.sizes : options_.sizes) {
      if (own && options_.quick && session_.driver.simulated != 0 && bytes > 64 * kMiB) continue; // seconds of this machine's memory
      progress(std::string(entry.name) + " " + std::to_string(bytes));
      out.push_back((this->*entry.run)(bytes));
    }
  }
  channel_->send({.op = Op::Bye});
  child_.wait(deadline_);
  return out;
}

Region Run::region(std::uint64_t bytes) {
  auto wish = init<gpuloan_region_options>();
  wish.bytes = bytes;
  wish.access = GPULOAN_ACCESS_WRITE;
  return peer_.create_region(wish);
}

Loan Run::lend(std::uint64_t pointer, std::uint64_t bytes, gpuloan_access access, bool keep_open, std::uint32_t rungs) {
  auto options = init<gpuloan_lend_options>();
  options.access = access;
  options.keep_open = keep_open ? 1 : 0;
  options.rungs = rungs;
  options.stream = GPULOAN_STREAM_CPU; // nothing of ours is queued: READY is free, as in the floors
  return peer_.lend(pointer, bytes, options);
}

void Run::drained() {
  channel_->send({.op = Op::Drain});
  while (session_.context.stats().chunks > 0) {
    check_interrupted();
    if (deadline_.passed()) throw Failure(ExitTimeout, "the arena did not give its memory back within " + deadline_.text());
    static_cast<void>(session_.context.next_event(Milliseconds(1))); // turns the caller's loop
  }
  static_cast<void>(channel_->expect(Op::Drain));
}

// A turn whose bytes did not arrive is not worth its microseconds.
void Run::check_filled(std::uint64_t pointer, std::uint64_t bytes, std::uint64_t value, const char* who) {
  for (const std::uint64_t offset : {std::uint64_t{0}, bytes / 8 * 4, bytes - 4}) {
    std::uint32_t word = 0;
    cuda_.copy_out(&word, pointer + offset, sizeof word);
    cuda_.synchronize();
    if (word == static_cast<std::uint32_t>(value)) continue;
    throw Failure(ExitLoanFailed, std::string(who) + " of " + std::to_string(bytes) + " bytes left " + std::to_string(word) + " at offset " +
                                        std::to_string(offset) + " instead of " + std::to_string(value));
  }
}

// ---- Floors -------------------------------------------------------------------------------------------------------

void Run::share_chunk(const BareChunk& chunk) {
  const Fd fd = chunk.share();
  channel_->send({.op = Op::Chunk, .bytes = chunk.bytes()}, fd.get());
  static_cast<void>(channel_->expect(Op::Chunk));
}

void Run::drop_chunk() {
  channel_->send({.op = Op::Drop});
  static_cast<void>(channel_->expect(Op::Drop));
}

std::vector<double> Run::bare_spin(std::uint32_t count, const BareChunk& chunk, std::uint64_t bytes, const std::function<void(std::uint64_t)>& post) {
  channel_->send({.op = Op::BareSpin, .count = count, .bytes = bytes, .value = ready_});
  std::vector<double> times;
  for (std::uint32_t turn = 0; turn < count; ++turn) {
    const std::uint64_t start = clock_ns();
    post(++ready_);
    spin_until(words_->word(kDoneWord), ready_, deadline_);
    times.push_back(since_us(start));
  }
  static_cast<void>(channel_->expect(Op::BareSpin));
  check_filled(chunk.pointer(), bytes, ready_, "the bare floor's last turn");
  return times;
}

std::vector<double> Run::bare_records(Op op, std::uint32_t count, std::uint64_t pointer, std::uint64_t bytes) {
  channel_->send({.op = op, .count = count, .bytes = bytes});
  std::vector<double> times;
  for (std::uint32_t turn = 0; turn < count; ++turn) {
    const std::uint64_t start = clock_ns();
    channel_->send({.op = op, .value = ++ready_});
    static_cast<void>(channel_->expect(op));
    times.push_back(since_us(start));
  }
  check_filled(pointer, bytes, ready_, "the bare floor's last turn");
  return times;
}

// ---- Comparisons --------------------------------------------------------------------------------------------------

std::vector<double> Run::loan_turns(std::uint32_t count, const Region& region, const std::function<void(Loan&)>& ready) {
  channel_->send({.op = Op::Turns, .count = count + 1, .bytes = region.bytes()});
  Loan loan = lend(region.pointer(), region.bytes(), GPULOAN_ACCESS_WRITE, true, 0);
  wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_done(slice); }); // the first turn brings the loan
  std::vector<double> times;
  for (std::uint32_t turn = 0; turn < count; ++turn) {
    const std::uint64_t start = clock_ns();
    ready(loan);
    wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_done(slice); });
    times.push_back(since_us(start));
  }
  wait_in_slices(deadline_, [&](Milliseconds slice) { loan.reclaim(slice); });
  const Message answer = channel_->expect(Op::Turns);
  check_filled(region.pointer(), region.bytes(), answer.value, "the last turn");
  return times;
}

Comparison Run::turns(std::uint64_t bytes) {
  Comparison out{.name = "turns", .floor = "control words, both spin", .bytes = bytes};
  const Counts counts = this->counts(bytes);
  const BareChunk chunk(calls_, options_.common.device, bytes);
  share_chunk(chunk);
  Region region = this->region(bytes);
  for (std::uint32_t block = 0; block <= counts.blocks; ++block) {
    auto floor = bare_spin(counts.turns, chunk, bytes, [this](std::uint64_t value) {
      std::atomic_ref(words_->word(kReadyWord)).store(value, std::memory_order_release);
    });
    auto times = loan_turns(counts.turns, region, [](Loan& loan) { loan.ready(GPULOAN_STREAM_CPU); });
    if (block > 0) out.add_block(std::move(floor), std::move(times)); // the first warms up
  }
  region.destroy();
  return out;
}

std::vector<double> Run::fresh_loans(std::uint32_t count, gpuloan_range range, std::uint64_t bytes, std::uint64_t step, std::uint32_t rungs) {
  channel_->send({.op = Op::Loans, .count = count, .bytes = bytes});
  std::vector<double> times;
  std::uint64_t offset = 0;
  for (std::uint32_t turn = 0; turn < count; ++turn) {
    offset = offset + step + bytes <= range.bytes ? offset + step : 0;
    const std::uint64_t start = clock_ns();
    Loan loan = lend(range.pointer + offset, bytes, GPULOAN_ACCESS_WRITE, false, rungs);
    wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
    times.push_back(since_us(start));
  }
  const Message answer = channel_->expect(Op::Loans);
  check_filled(range.pointer + offset, bytes, answer.value, "the last loan");
  return times;
}

Comparison Run::loans(std::uint64_t bytes) {
  Comparison out{.name = "loans", .floor = "a record each way, stream synchronised", .bytes = bytes};
  const Counts counts = this->counts(bytes);
  const BareChunk chunk(calls_, options_.common.device, bytes);
  share_chunk(chunk);
  Region region = this->region(bytes);
  for (std::uint32_t block = 0; block <= counts.blocks; ++block) {
    auto floor = bare_records(Op::BareSocket, counts.turns, chunk.pointer(), bytes);
    auto times = fresh_loans(counts.turns, {region.pointer(), region.bytes()}, bytes, 0);
    if (block > 0) out.add_block(std::move(floor), std::move(times));
  }
  region.destroy();
  return out;
}

Comparison Run::offsets(std::uint64_t bytes) {
  Comparison out{.name = "offsets", .floor = "loans of the same range again", .bytes = bytes};
  const Counts counts = this->counts(bytes);
  Region region = this->region(8 * bytes);
  for (std::uint32_t block = 0; block <= counts.blocks; ++block) {
    auto same = fresh_loans(counts.turns, {region.pointer(), region.bytes()}, bytes, 0);
    auto times = fresh_loans(counts.turns, {region.pointer(), region.bytes()}, bytes, bytes);
    if (block > 0) out.add_block(std::move(same), std::move(times));
  }
  region.destroy();
  return out;
}

Comparison Run::copies(std::uint64_t bytes) {
  Comparison out{.name = "copies", .floor = "device to pinned memory, once", .bytes = bytes, .rate = true};
  const std::uint32_t blocks = options_.quick ? 3 : 9;
  Region region = this->region(bytes);
  const BarePages pinned(calls_, BarePages::make(kPinnedBytes), kPinnedBytes);
  for (std::uint32_t block = 0; block <= blocks; ++block) {
    cuda_.fill32(region.pointer(), block + 1, bytes / 4);
    cuda_.synchronize();
    std::uint64_t start = clock_ns();
    for (std::uint64_t offset = 0; offset < bytes; offset += kPinnedPiece) {
      cuda_.copy_out(pinned.data() + offset % kPinnedBytes, region.pointer() + offset, std::min(kPinnedPiece, bytes - offset));
    }
    cuda_.synchronize();
    const double floor = since_us(start);
    channel_->send({.op = Op::Copies, .count = 1, .bytes = bytes, .value = block + 1});
    start = clock_ns();
    Loan loan = lend(region.pointer(), bytes, GPULOAN_ACCESS_READ, false, GPULOAN_RUNG_HOST);
    wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
    const double time = since_us(start);
    static_cast<void>(channel_->expect(Op::Copies)); // it looked at what came
    if (block > 0) out.add_block({floor}, {time});
  }
  region.destroy();
  return out;
}

} // namespace gpuloan::tool::bench
