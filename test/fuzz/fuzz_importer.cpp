// SPDX-License-Identifier: MIT
//
// An importer without a device and an exporter in the hands of the fuzzer: after a good handshake, or in the middle of one,
// it sends any records in any order, while the importer's caller requests, acquires and returns. Numbers are drawn from few,
// so that records meet. Whatever it does:
//
// - what the importer sends is well formed, and no loan is acknowledged, no chunk unmapped, no piece taken more often than
//   it was announced;
// - an outcome is set once; what a request got can be written, all of it;
// - once the exporter is gone and the caller let go, every loan has ended, and each that the caller has a name for said so
//   in one event;
// - a block that loans share has as many uses as it has users, at each moment that no loan lets go of one;
// - nothing is left of it: no import, no block, and after the context no descriptor.
#include "wire.hpp"

#include <base/reaper.hpp>
#include <loan/importer.hpp>

#include <algorithm>
#include <fcntl.h>
#include <map>
#include <poll.h>
#include <sys/mman.h>
#include <thread>

using namespace gpuloan;
using channel::Type;

namespace {

constexpr std::uint32_t kSlots = 4;
constexpr std::size_t kOperationsMax = 200, kRequestsMax = 12;
constexpr int kPatienceMs = 5000;

struct Borrowed {
  std::shared_ptr<loan::ImportLoan> loan;
  bool requested = false;
  bool ended = false;
  gpuloan_status outcome = GPULOAN_OK; // as it was seen first
  int events = 0;                      // LOAN_ENDED
};

// The exporter's part of the handshake, on a thread of its own: the library's caller waits in adopt().
class Shaker {
 public:
  Shaker(fuzz::Wire& wire, fuzz::Input& input) : wire_(wire), odd_(input.below(8)), thread_([this, &input] { run(input); }) {}
  ~Shaker() { thread_.join(); }
  Shaker(const Shaker&) = delete;
  Shaker& operator=(const Shaker&) = delete;

 private:
  void await(Type type) {
    pollfd ready = {wire_.fd(), POLLIN, 0};
    FUZZ_REQUIRE(::poll(&ready, 1, kPatienceMs) == 1);
    const auto arrived = wire_.receive();
    FUZZ_REQUIRE(arrived ? arrived->type() == type : wire_.hung_up());
  }
  void odd(fuzz::Input& input) { // a step that is none
    if (input.flag()) static_cast<void>(fuzz::send_any(wire_, input));
    else fuzz::send_rubbish(wire_, input);
    wire_.close();
  }
  void run(fuzz::Input& input) {
    await(Type::Hello);
    if (odd_ == 1) return odd(input);
    channel::Record welcome = fuzz::make(Type::Welcome);
    welcome.welcome.version = 1;
    welcome.welcome.slots = kSlots;
    wire_.send(welcome);
    if (odd_ == 2) return odd(input);
    const UniqueFd fd = fuzz::make_pages(odd_ == 3 ? 128 : kSlots * 128, false);
    channel::Record pages = fuzz::make(Type::Pages);
    pages.header.fd_count = 1;
    pages.pages.bytes = odd_ == 4 ? input.number<std::uint64_t>() : kSlots * 128;
    pages.pages.slots = odd_ == 4 ? input.number<std::uint32_t>() : kSlots;
    const int fds[] = {fd.get()};
    wire_.send(pages, {}, fds);
    await(Type::PagesMapped);
    if (odd_ == 5) return odd(input);
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
    FUZZ_REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, odd_ == 6 ? seals & ~(1 << input.below(5)) : seals) == 0);
    wire_.send(fuzz::make(Type::PagesSealed));
    await(Type::PagesChecked);
    if (wire_.hung_up()) wire_.close();
  }

  fuzz::Wire& wire_;
  const std::uint32_t odd_;
  std::thread thread_;
};

class Run {
 public:
  Run() {
    loan::ContextOptions options;
    options.role = GPULOAN_ROLE_IMPORTER;
    options.loop_thread = false; // the same input does the same, but for the thread that takes pieces
    auto made = loan::Importer::create(options, nullptr);
    FUZZ_REQUIRE(made.has_value());
    importer_ = std::move(*made);
  }

  void connect(fuzz::Input& input) {
    UniqueFd theirs;
    wire_ = fuzz::Wire::open(theirs);
    Result<std::shared_ptr<loan::ImporterPeer>> peer;
    {
      const Shaker shaker(wire_, input);
      peer = importer_->adopt(theirs.get(), kPatienceMs);
    }
    static_cast<void>(theirs.release());
    if (peer) {
      peer_ = *peer;
      return;
    }
    FUZZ_REQUIRE(!peer.error().text.empty());
    const bool refused = peer.error().text.starts_with("refused by the exporter"); // with any status it likes
    FUZZ_REQUIRE(refused || peer.error().status != GPULOAN_ERR_TIMEOUT);
  }

  void operate(fuzz::Input& input) {
    switch (input.below(24)) {
      case 0:
        fuzz::send_rubbish(wire_, input);
        break;
      case 1:
      case 2:
        announce(fuzz::send_any(wire_, input));
        break;
      case 3:
        send_chunk(input);
        break;
      case 4:
        send_foreign(input);
        break;
      case 5:
        send_piece(input);
        break;
      case 6:
        send_plain(input);
        break;
      case 7:
      case 8:
      case 9:
      case 10:
        send_export(input);
        break;
      case 11:
      case 12:
        send_turn(input);
        break;
      case 13:
        send_end(input);
        break;
      case 14:
        if (input.byte() % 4 == 0) wire_.close();
        break;
      case 15:
        request(input);
        break;
      case 16:
      case 17:
        acquire(input);
        break;
      case 18:
        if (Borrowed* loan = pick(input)) static_cast<void>(importer_->done(loan->loan, nullptr));
        break;
      case 19:
        give_back(input);
        break;
      case 20:
        if (Borrowed* loan = pick(input)) static_cast<void>(importer_->wait_end(*loan->loan, 0));
        break;
      default:
        break;
    }
    turn();
  }

  void finish() {
    for (int round = 0; round < 2000 && ending() != 0; ++round) {
      FUZZ_REQUIRE(importer_->dispatch(1).has_value());
      take_events();
    }
    FUZZ_REQUIRE(ending() == 0);
    look(); // the exporter is still there, unless it was lost before
    wire_.close();
    for (int round = 0; round < 2000 && lost_ != (peer_ ? 1 : 0); ++round) {
      FUZZ_REQUIRE(importer_->dispatch(1).has_value());
      take_events();
    }
    look(); // each of its loans knows by now
    for (int round = 0; round < 2000 && !over(); ++round) {
      for (const Borrowed& loan : loans_) static_cast<void>(importer_->give_back(loan.loan, GPULOAN_OK, ""));
      FUZZ_REQUIRE(importer_->dispatch(1).has_value());
      take_events();
    }
    look();
    for (const Borrowed& loan : loans_) FUZZ_REQUIRE(loan.ended && loan.events == 1);
    const gpuloan_stats stats = importer_->stats();
    FUZZ_REQUIRE(stats.peers == 0 && stats.loans_out == 0 && stats.chunks == 0 && stats.imported_bytes == 0 && blocks_closed());
    FUZZ_REQUIRE(lost_ == (peer_ ? 1 : 0));
    importer_->close();
    loans_.clear();
    peer_.reset();
    importer_.reset();
    FUZZ_REQUIRE(wait_disposed(10'000)); // what ended with its last name
  }

 private:
  [[nodiscard]] bool over() {
    look();
    const bool ended = std::all_of(loans_.begin(), loans_.end(), [](const Borrowed& loan) { return loan.ended && loan.events == 1; });
    const gpuloan_stats stats = importer_->stats();
    return ended && stats.loans_out == 0 && stats.chunks == 0 && stats.peers == 0 && blocks_closed() && lost_ == (peer_ ? 1 : 0);
  }
  [[nodiscard]] bool blocks_closed() {
    const loan::Context::Lock lock(importer_->mutex());
    return !peer_ || peer_->foreign.empty();
  }
  [[nodiscard]] std::size_t ending() {
    const loan::Context::Lock lock(importer_->mutex());
    return peer_ ? loans_ending() : 0;
  }
  void turn() {
    FUZZ_REQUIRE(importer_->dispatch(0).has_value());
    while (auto arrived = wire_.receive()) heard(*arrived);
    take_events();
    look();
  }

  // ---- The exporter
  void announce(const channel::Record& record) {
    switch (static_cast<Type>(record.header.type)) {
      case Type::Chunk:
      case Type::Foreign: // begins alike
        ++chunks_[record.chunk.chunk];
        break;
      case Type::Piece:
        ++pieces_;
        break;
      case Type::Export:
        ++exports_[record.export_.loan];
        break;
      default:
        break;
    }
  }
  void send_with_fd(channel::Record record, const UniqueFd& fd) {
    record.header.fd_count = 1;
    const int fds[] = {fd.get()};
    wire_.send(record, {}, fds);
  }
  void send_chunk(fuzz::Input& input) {
    const std::uint8_t bits = input.byte();
    channel::Record record = fuzz::make(Type::Chunk);
    record.chunk.chunk = input.byte() % 6U;
    record.chunk.bytes = (bits & 1U) != 0 ? 1U + input.byte() * 64U : 4096;
    if ((bits & 2U) != 0) record.chunk.bytes = input.number<std::uint64_t>();
    record.chunk.kind = (bits & 12U) != 0 ? 2 : bits >> 4U;
    record.chunk.access = bits >> 6U;
    ++chunks_[record.chunk.chunk];
    send_with_fd(record, fuzz::make_pages(bits % 5 == 4 ? 100 : 8192, bits % 7 != 6));
  }
  void send_foreign(fuzz::Input& input) {
    const std::uint8_t bits = input.byte();
    channel::Record record = fuzz::make(Type::Foreign);
    record.foreign.chunk = input.byte() % 6U;
    record.foreign.bytes = 4096U * (bits >> 6U);
    record.foreign.buffer = bits >> 4U & 3U;
    record.foreign.kind = bits & 3U;
    record.foreign.access = bits >> 2U & 3U;
    record.foreign.pieces = input.byte() % 4U;
    record.foreign.pool = input.byte() % 3U;
    ++chunks_[record.foreign.chunk];
    const std::vector<std::uint8_t> handle(input.byte() % 8 == 0 ? 63 : 64, 7);
    const bool has_handle = record.foreign.kind != 2;
    record.header.tail_bytes = static_cast<std::uint16_t>(has_handle ? handle.size() : 0);
    wire_.send(record, has_handle ? std::span<const std::uint8_t>(handle) : std::span<const std::uint8_t>());
  }
  void send_piece(fuzz::Input& input) {
    channel::Record record = fuzz::make(Type::Piece);
    record.piece.chunk = input.byte() % 6U;
    record.piece.bytes = 4096;
    record.piece.index = input.byte() % 4U;
    ++pieces_;
    send_with_fd(record, fuzz::make_pages(4096, false));
  }
  void send_plain(fuzz::Input& input) { // records about memory that need little
    const std::uint8_t which = input.byte();
    channel::Record record = fuzz::make(which % 4 == 0 ? Type::Tether : which % 4 == 1 ? Type::Pool : which % 4 == 2 ? Type::Recall : Type::Ring);
    if (record.header.type == static_cast<std::uint16_t>(Type::Recall)) {
      record.chunk.chunk = which / 4U % 6U;
      wire_.send(record);
      return;
    }
    record.pool.pool = which / 4U % 3U; // the first member of Ring, too
    send_with_fd(record, fuzz::make_pages(which % 32 == 31 ? 0 : 4096, false));
  }
  void send_export(fuzz::Input& input) {
    const std::uint8_t bits = input.byte(), more = input.byte();
    channel::Record record = fuzz::make(Type::Export);
    channel::Export& wire = record.export_;
    wire.loan = input.byte() % 6U;
    wire.chunk = (bits & 1U) != 0 ? input.byte() % 6U : 0;
    wire.bytes = (bits & 2U) != 0 ? input.byte() : 0;
    wire.offset = (bits & 4U) != 0 ? input.byte() : 0;
    if (bits == 0xFF) wire.bytes = input.number<std::uint64_t>();
    wire.request = (bits & 8U) != 0 ? input.byte() % 4U : 0;
    if (wire.request != 0 && wire.request <= sizes_.size() && (bits & 16U) != 0) wire.bytes = sizes_[wire.request - 1];
    wire.flags = bits >> 5U;
    wire.slot = more & 7U;
    wire.access = (more & 8U) != 0 ? 2 : more >> 6U;
    wire.rung = more >> 4U & 3U;
    wire.memory = more >> 5U & 3U;
    wire.gate = more >> 3U & 3U;
    wire.generation = 1;
    ++exports_[wire.loan];
    const std::string metadata = input.text(more >> 5U);
    record.header.tail_bytes = static_cast<std::uint16_t>(metadata.size());
    wire_.send(record, std::span(reinterpret_cast<const std::uint8_t*>(metadata.data()), metadata.size()));
  }
  void send_turn(fuzz::Input& input) {
    const std::uint8_t bits = input.byte();
    channel::Record record = fuzz::make(Type::Ready);
    record.turn.loan = bits % 6U;
    record.turn.slot = bits >> 4U & 3U;
    record.turn.generation = 1;
    record.turn.turn = (bits & 0xC0U) != 0 ? 1 + (bits >> 6U) : input.number<std::uint32_t>();
    store(record.turn.slot, std::uint64_t{1} << 32 | record.turn.turn);
    wire_.send(record);
  }
  void store(std::uint32_t slot, std::uint64_t value) { // as the exporter's CPU does; both sides are this process
    const loan::Context::Lock lock(importer_->mutex());
    if (peer_ && peer_->words) peer_->words.store(slot, gate::Word::Ready, value);
  }
  void send_end(fuzz::Input& input) {
    const std::uint8_t bits = input.byte();
    channel::Record record = fuzz::make(bits % 3 == 0 ? Type::Cancel : bits % 3 == 1 ? Type::Finish : Type::Denied);
    record.cancel.loan = bits / 3U % 6U; // the first member of DENIED, too
    record.cancel.status = GPULOAN_ERR_CANCELLED;
    if (bits % 2 != 0) record.cancel.status = static_cast<std::int8_t>(input.byte());
    wire_.send(record);
  }
  void heard(const fuzz::Arrived& arrived) {
    const channel::Record& record = arrived.record;
    switch (arrived.type()) {
      case Type::Request:
      case Type::Done:
      case Type::Bye:
        return;
      case Type::Ack:
        FUZZ_REQUIRE(++acks_[record.ack.loan] <= exports_[record.ack.loan]);
        FUZZ_REQUIRE(record.ack.slot < kSlots && record.ack.outcome <= 0);
        return;
      case Type::Unmapped:
        FUZZ_REQUIRE(++unmaps_[record.chunk.chunk] <= chunks_[record.chunk.chunk]);
        return;
      case Type::PiecesTaken:
        taken_ += record.pieces_taken.count;
        FUZZ_REQUIRE(taken_ <= pieces_);
        return;
      default:
        FUZZ_FAIL("a record that an importer without a device sends");
    }
  }

  // ---- The caller
  void request(fuzz::Input& input) {
    if (!peer_ || sizes_.size() >= kRequestsMax) return;
    loan::RequestOptions options;
    options.bytes = input.byte();
    options.memory = input.flag() ? GPULOAN_MEMORY_HOST : GPULOAN_MEMORY_DEVICE;
    auto loan = importer_->request(peer_, options);
    if (!loan) {
      FUZZ_REQUIRE(loan.error().status == GPULOAN_ERR_PEER_LOST);
      return;
    }
    sizes_.push_back(options.bytes);
    loans_.push_back({std::move(*loan), true});
  }
  void acquire(fuzz::Input& input) {
    Borrowed* borrowed = pick(input);
    if (borrowed == nullptr) return;
    const auto view = importer_->acquire(borrowed->loan, false, nullptr, 0);
    if (!view) return;
    const loan::ImportLoan& loan = *borrowed->loan;
    if (loan.bytes == 0) return;
    FUZZ_REQUIRE(view->host != nullptr);
    auto* bytes = static_cast<volatile unsigned char*>(view->host);
    if (borrowed->requested) FUZZ_REQUIRE(loan.access == GPULOAN_ACCESS_WRITE);
    for (const std::uint64_t at : {std::uint64_t{0}, loan.bytes - 1}) {
      const unsigned char old = bytes[at];
      if (loan.access == GPULOAN_ACCESS_WRITE) bytes[at] = static_cast<unsigned char>(old + 1);
    }
  }
  void give_back(fuzz::Input& input) {
    Borrowed* borrowed = pick(input);
    if (borrowed == nullptr) return;
    static_cast<void>(importer_->give_back(borrowed->loan, input.flag() ? GPULOAN_ERR_FAILED : GPULOAN_OK, "fuzz"));
  }
  [[nodiscard]] Borrowed* pick(fuzz::Input& input) { return loans_.empty() ? nullptr : &loans_[input.byte() % loans_.size()]; }

  void take_events() {
    while (true) {
      auto event = importer_->next_event(0);
      if (!event) return;
      if (event->type == GPULOAN_EVENT_LOAN_OFFERED) loans_.push_back({std::static_pointer_cast<loan::ImportLoan>(event->loan)});
      if (event->type == GPULOAN_EVENT_PEER_LOST) ++lost_;
      if (event->type != GPULOAN_EVENT_LOAN_ENDED) continue;
      const auto it = std::find_if(loans_.begin(), loans_.end(), [&](const Borrowed& loan) { return loan.loan == event->loan; });
      FUZZ_REQUIRE(it != loans_.end());
      ++it->events;
      FUZZ_REQUIRE(it->events == 1 && event->status == it->loan->outcome);
    }
  }
  void look() {
    const loan::Context::Lock lock(importer_->mutex());
    for (Borrowed& borrowed : loans_) {
      const loan::ImportLoan& loan = *borrowed.loan;
      FUZZ_REQUIRE(borrowed.outcome == GPULOAN_OK || loan.outcome == borrowed.outcome);
      FUZZ_REQUIRE(!borrowed.ended || (loan.ended && loan.outcome == borrowed.outcome));
      FUZZ_REQUIRE(loan.ended == (loan.state == loan::ImportState::Ended));
      if (loan.ended) FUZZ_REQUIRE(loan.import == nullptr && loan.host == nullptr);
      borrowed.outcome = loan.outcome;
      borrowed.ended = loan.ended;
    }
    if (!peer_) return;
    if (!peer_->lost) return look_at_blocks();
    for (const Borrowed& borrowed : loans_) FUZZ_REQUIRE(borrowed.ended || borrowed.loan->cancelled || borrowed.loan->let_go);
  }

  // Lock held. Loans that are taken out of the table of imports, and let go of their block on a thread of the library's.
  [[nodiscard]] std::size_t loans_ending() const {
    const auto ending = [](const auto& entry) { return entry.second->unmapping; };
    return static_cast<std::size_t>(std::count_if(peer_->loans.begin(), peer_->loans.end(), ending));
  }
  // A block has one use for each import of it that is in the table, and one more at most for each loan that is ending.
  void look_at_blocks() const {
    std::map<std::uint64_t, std::size_t> users;
    for (const auto& [id, import] : peer_->imports) {
      if (import->kind != loan::ImportKind::Legacy && import->kind != loan::ImportKind::Pool) continue;
      const auto block = peer_->foreign.find(import->buffer);
      FUZZ_REQUIRE(block != peer_->foreign.end() && block->second == import->foreign);
      ++users[import->buffer];
    }
    const std::size_t ending = loans_ending();
    for (const auto& [buffer, block] : peer_->foreign) {
      FUZZ_REQUIRE(block->uses >= users[buffer] && block->uses <= users[buffer] + ending);
      FUZZ_REQUIRE(block->uses != 0 || ending != 0);
    }
  }

  std::shared_ptr<loan::Importer> importer_;
  std::shared_ptr<loan::ImporterPeer> peer_;
  fuzz::Wire wire_;
  std::vector<Borrowed> loans_;
  std::vector<std::uint64_t> sizes_; // of request 1, 2 ...
  std::map<std::uint64_t, int> exports_, acks_, chunks_, unmaps_;
  std::uint64_t pieces_ = 0, taken_ = 0;
  int lost_ = 0;
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::DescriptorGuard guard;
  fuzz::Input input(data, size);
  Run run;
  run.connect(input);
  for (std::size_t count = 0; count < kOperationsMax && !input.empty(); ++count) run.operate(input);
  run.finish();
  return 0;
}
