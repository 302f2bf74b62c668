// SPDX-License-Identifier: MIT
//
// An exporter without a device and a peer in the hands of the fuzzer: the peer sends any records in any order, scribbles in
// the control words and hangs up when it likes, while the exporter's caller lends, cancels and grants. Whatever it does:
//
// - what the exporter sends is well formed; after REFUSED nothing comes; EXPORT names each loan once;
// - the peer is ready only after the handshake's four steps, lost or refused at most once;
// - an outcome is set once, and no loan is a success whose turn was not done;
// - once the peer is gone every loan has ended, and nothing is left of it but what rule 5 keeps;
// - after the context no descriptor is left.
#include "wire.hpp"

#include <base/reaper.hpp>
#include <loan/exporter.hpp>

#include <map>
#include <set>
#include <sys/mman.h>
#include <unistd.h>

using namespace gpuloan;
using channel::Type;

namespace {

constexpr std::uint32_t kSlots = 8;
constexpr std::size_t kOperationsMax = 200, kLoansMax = 24, kRegionsMax = 6;

struct Lent {
  std::shared_ptr<loan::ExportLoan> loan;
  gpuloan_status outcome = GPULOAN_OK; // as it was seen first
  bool ended = false;
};

class Run {
 public:
  Run() {
    loan::ContextOptions options;
    options.loop_thread = false; // the same input does the same
    options.slots = kSlots;
    options.canary_timeout_ms = 5; // the input does not answer it most of the time
    auto made = loan::Exporter::create(options, nullptr);
    FUZZ_REQUIRE(made.has_value());
    exporter_ = std::move(*made);
    UniqueFd theirs;
    wire_ = fuzz::Wire::open(theirs);
    FUZZ_REQUIRE(exporter_->attach(theirs.get(), "fuzz").has_value());
    static_cast<void>(theirs.release());
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  ~Run() {
    if (words_ != nullptr) ::munmap(words_, kSlots * 128);
  }

  void operate(fuzz::Input& input) {
    switch (input.below(20)) {
      case 0:
        fuzz::send_rubbish(wire_, input);
        break;
      case 1:
      case 2:
        static_cast<void>(fuzz::send_any(wire_, input));
        break;
      case 3:
      case 4:
        shake();
        break;
      case 5:
        answer(input, Type::Ack);
        break;
      case 6:
        answer(input, Type::Done);
        break;
      case 7:
        scribble(input);
        break;
      case 8:
        request(input);
        break;
      case 9:
        if (input.byte() % 4 == 0) wire_.close();
        break;
      case 10:
      case 11:
        lend(input);
        break;
      case 12:
        if (Lent* lent = pick(input)) static_cast<void>(exporter_->ready(lent->loan, nullptr));
        break;
      case 13:
        if (Lent* lent = pick(input)) static_cast<void>(exporter_->cancel(lent->loan, "fuzz"));
        break;
      case 14:
        if (Lent* lent = pick(input)) static_cast<void>(exporter_->reclaim(lent->loan, 0));
        break;
      case 15:
        settle_request(input);
        break;
      case 16:
        make_region(input);
        break;
      case 17:
        drop_region(input);
        break;
      default:
        break;
    }
    turn();
  }

  void finish() {
    wire_.close();
    for (int round = 0; round < 2000 && !over(); ++round) {
      FUZZ_REQUIRE(exporter_->dispatch(1).has_value());
      take_events();
    }
    look();
    for (const Lent& lent : lent_) FUZZ_REQUIRE(lent.ended);
    const gpuloan_stats stats = exporter_->stats();
    FUZZ_REQUIRE(stats.peers == 0 && stats.loans_out == 0);
    FUZZ_REQUIRE(stats.quarantined_bytes == 0); // there is no memory of the caller's own without a device
    FUZZ_REQUIRE(ready_ <= 1 && lost_ == ready_ && refused_ <= 1 && (ready_ == 0 || refused_ == 0));
    for (const auto& region : regions_) FUZZ_REQUIRE(exporter_->destroy_region(*region).has_value()); // nothing of it is lent
    // The memory of a canary that was out when the peer went is destroyed outside the loop's turn.
    for (int round = 0; round < 2000 && exporter_->stats().live_bytes != 0; ++round) FUZZ_REQUIRE(exporter_->dispatch(1).has_value());
    FUZZ_REQUIRE(exporter_->stats().live_bytes == 0);
    requests_.clear();
    regions_.clear();
    exporter_->close();
    lent_.clear();
    peer_.reset();
    exporter_.reset();
    FUZZ_REQUIRE(wait_disposed(10'000)); // what ended with its last name
  }

 private:
  [[nodiscard]] bool over() {
    if (exporter_->stats().peers != 0 || exporter_->stats().loans_out != 0) return false;
    return ready_ == lost_ && (ready_ != 0 || refused_ != 0);
  }
  void turn() {
    FUZZ_REQUIRE(exporter_->dispatch(0).has_value());
    while (auto arrived = wire_.receive()) heard(*arrived);
    take_events();
    look();
  }

  // ---- The peer
  void heard(fuzz::Arrived& arrived) {
    FUZZ_REQUIRE(!last_word_);
    ++count_[arrived.type()];
    switch (arrived.type()) {
      case Type::Welcome:
        FUZZ_REQUIRE(count_[Type::Welcome] == 1 && arrived.record.welcome.slots == kSlots);
        return;
      case Type::Pages:
        FUZZ_REQUIRE(count_[Type::Pages] == 1 && arrived.record.pages.bytes == kSlots * 128);
        map_words(arrived.fds[0].get());
        return;
      case Type::PagesSealed:
        FUZZ_REQUIRE(count_[Type::PagesSealed] == 1 && count_[Type::Pages] == 1);
        return;
      case Type::Tether:
        FUZZ_REQUIRE(count_[Type::Tether] == 1 && count_[Type::PagesSealed] == 1);
        return;
      case Type::Refused:
        FUZZ_REQUIRE(count_[Type::Welcome] == 0 || count_[Type::Tether] == 0);
        FUZZ_REQUIRE(arrived.record.notice.status < 0 && !arrived.tail.empty());
        last_word_ = true;
        return;
      case Type::Export:
        FUZZ_REQUIRE(count_[Type::Tether] == 1 && arrived.record.export_.slot < kSlots);
        FUZZ_REQUIRE(exports_.emplace(arrived.record.export_.loan, arrived.record.export_).second);
        return;
      case Type::Ready:
      case Type::Cancel:
      case Type::Finish:
        FUZZ_REQUIRE(exports_.contains(arrived.record.turn.loan)); // the first member of each
        return;
      case Type::Chunk:
      case Type::Recall:
      case Type::Denied:
      case Type::Bye:
        FUZZ_REQUIRE(count_[Type::Tether] == 1);
        return;
      default:
        FUZZ_FAIL("a record that an exporter without a device sends");
    }
  }
  void map_words(int fd) {
    void* at = ::mmap(nullptr, kSlots * 128, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return; // sealed already: the peer said that it had mapped them before it did
    words_ = static_cast<std::uint64_t*>(at);
  }
  void shake() { // the next proper step
    if (count_[Type::Welcome] == 0) wire_.send(fuzz::make_hello());
    else wire_.send(fuzz::make(count_[Type::PagesSealed] == 0 ? Type::PagesMapped : Type::PagesChecked));
  }
  void answer(fuzz::Input& input, Type type) { // of a loan that was exported, with some of it wrong at times
    if (exports_.empty()) return;
    const auto& wire = std::next(exports_.begin(), static_cast<std::ptrdiff_t>(input.byte() % exports_.size()))->second;
    channel::Record record = fuzz::make(type);
    const std::uint8_t bits = input.byte();
    const std::uint32_t generation = wire.generation + ((bits & 0xF0U) == 0x10U ? 1U : 0U);
    std::string tail;
    if (type == Type::Ack) {
      record.ack.loan = wire.loan, record.ack.slot = wire.slot, record.ack.generation = generation;
      record.ack.outcome = (bits & 1U) != 0 ? static_cast<std::int8_t>(input.byte()) : 0;
      record.ack.turns_done = bits >> 1U & 7U;
      if (record.ack.outcome != 0) tail = input.text(input.byte());
    } else {
      record.turn.loan = wire.loan, record.turn.slot = wire.slot, record.turn.generation = generation;
      record.turn.turn = bits & 3U;
      record.turn.at_ns = input.byte();
      if ((bits & 4U) != 0 && words_ != nullptr) words_[wire.slot * 8 + 1] = std::uint64_t{wire.generation} << 32 | record.turn.turn;
    }
    record.header.tail_bytes = static_cast<std::uint16_t>(tail.size());
    wire_.send(record, std::span(reinterpret_cast<const std::uint8_t*>(tail.data()), tail.size()));
  }
  void scribble(fuzz::Input& input) {
    const std::size_t at = input.byte();
    const auto value = input.number<std::uint64_t>();
    if (words_ != nullptr) words_[at % (kSlots * 8)] = value;
  }
  void request(fuzz::Input& input) {
    channel::Record record = fuzz::make(Type::Request);
    record.request.request = input.byte();
    record.request.bytes = (input.flag() ? input.number<std::uint64_t>() : input.byte());
    record.request.alignment = input.flag() ? input.byte() : 0;
    record.request.memory = input.byte() % 3U;
    record.request.onward = input.byte() % 2U;
    wire_.send(record);
  }

  // ---- The caller
  void lend(fuzz::Input& input) {
    if (!peer_ || lent_.size() >= kLoansMax) return;
    loan::LendOptions options;
    const std::uint8_t bits = input.byte();
    options.rungs = exporter_->options().rungs;
    options.access = (bits & 1U) != 0 ? GPULOAN_ACCESS_WRITE : GPULOAN_ACCESS_READ;
    options.keep_open = (bits & 2U) != 0;
    options.memory = (bits & 4U) != 0 ? GPULOAN_MEMORY_HOST : GPULOAN_MEMORY_DEVICE;
    options.release = [] {};
    std::uint64_t pointer = 0, bytes = 0;
    if (!regions_.empty() && (bits & 8U) != 0) {
      const auto& region = *regions_[input.byte() % regions_.size()]->region;
      bytes = std::min<std::uint64_t>(input.byte(), region.bytes());
      pointer = reinterpret_cast<std::uint64_t>(region.host());
    }
    keep(exporter_->lend(peer_, pointer, bytes, options));
  }
  void keep(Result<std::shared_ptr<loan::ExportLoan>> loan) {
    if (loan) lent_.push_back({std::move(*loan)});
    else FUZZ_REQUIRE(!loan.error().text.empty());
  }
  void make_region(fuzz::Input& input) {
    if (!peer_ || regions_.size() >= kRegionsMax) return;
    memory::RegionSpec spec;
    spec.bytes = 1U + input.byte() * 64U;
    spec.access = input.flag() ? GPULOAN_ACCESS_WRITE : GPULOAN_ACCESS_READ;
    spec.memory = GPULOAN_MEMORY_HOST;
    if (auto region = exporter_->create_region(peer_, spec)) regions_.push_back(std::move(*region));
  }
  void drop_region(fuzz::Input& input) {
    if (regions_.empty()) return;
    const auto it = regions_.begin() + static_cast<std::ptrdiff_t>(input.byte() % regions_.size());
    if (exporter_->destroy_region(**it)) regions_.erase(it);
  }
  void settle_request(fuzz::Input& input) {
    if (requests_.empty()) return;
    const std::shared_ptr<loan::Request> request = requests_.back();
    requests_.pop_back();
    if (input.flag() || request->bytes > 65536 || lent_.size() >= kLoansMax) {
      FUZZ_REQUIRE(exporter_->deny(*request, "fuzz").has_value());
    } else {
      loan::LendOptions options;
      options.rungs = exporter_->options().rungs;
      auto grant = exporter_->grant(*request, options);
      if (!grant) {
        FUZZ_REQUIRE(exporter_->deny(*request, "it cannot be had").has_value());
        return;
      }
      regions_.push_back(std::move(grant->region));
      lent_.push_back({std::move(grant->loan)});
    }
    FUZZ_REQUIRE(!exporter_->deny(*request, "again").has_value());
  }
  [[nodiscard]] Lent* pick(fuzz::Input& input) { return lent_.empty() ? nullptr : &lent_[input.byte() % lent_.size()]; }

  // ---- What the caller sees
  void take_events() {
    while (true) {
      auto event = exporter_->next_event(0);
      if (!event) return;
      ready_ += event->type == GPULOAN_EVENT_PEER_READY ? 1 : 0;
      lost_ += event->type == GPULOAN_EVENT_PEER_LOST ? 1 : 0;
      refused_ += event->type == GPULOAN_EVENT_PEER_REFUSED ? 1 : 0;
      if (event->type == GPULOAN_EVENT_PEER_READY) {
        FUZZ_REQUIRE(count_[Type::Tether] == 1 || wire_.fd() < 0 || wire_.hung_up());
        peer_ = std::static_pointer_cast<loan::ExporterPeer>(event->peer);
      }
      if (event->type == GPULOAN_EVENT_REQUEST) requests_.push_back(event->request);
      if (event->type == GPULOAN_EVENT_PEER_LOST) look_ended();
    }
  }
  void look_ended() { // PEER_LOST says that all loans have ended
    const loan::Context::Lock lock(exporter_->mutex());
    for (const Lent& lent : lent_) FUZZ_REQUIRE(lent.loan->ended);
  }
  void look() {
    const loan::Context::Lock lock(exporter_->mutex());
    for (Lent& lent : lent_) {
      const loan::ExportLoan& loan = *lent.loan;
      FUZZ_REQUIRE(lent.outcome == GPULOAN_OK || loan.outcome == lent.outcome); // set once
      FUZZ_REQUIRE(!lent.ended || (loan.ended && loan.outcome == lent.outcome));
      FUZZ_REQUIRE(loan.ended == loan::ended(loan.state));
      FUZZ_REQUIRE(loan.turns_done <= loan.turn);
      if (loan.ended && loan.outcome == GPULOAN_OK) FUZZ_REQUIRE(loan.turns_done == loan.turn);
      if (loan.outcome != GPULOAN_OK) FUZZ_REQUIRE(!loan.outcome_text.empty() || loan.outcome != GPULOAN_ERR_CANCELLED);
      lent.outcome = loan.outcome;
      lent.ended = loan.ended;
    }
  }

  std::shared_ptr<loan::Exporter> exporter_;
  std::shared_ptr<loan::ExporterPeer> peer_;
  fuzz::Wire wire_;
  std::uint64_t* words_ = nullptr;
  bool last_word_ = false;
  std::map<Type, int> count_;
  std::map<std::uint64_t, channel::Export> exports_;
  std::vector<Lent> lent_;
  std::vector<std::shared_ptr<loan::RegionHandle>> regions_;
  std::vector<std::shared_ptr<loan::Request>> requests_;
  int ready_ = 0, lost_ = 0, refused_ = 0;
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::DescriptorGuard guard;
  fuzz::Input input(data, size);
  Run run;
  for (std::size_t count = 0; count < kOperationsMax && !input.empty(); ++count) run.operate(input);
  run.finish();
  return 0;
}
