// SPDX-License-Identifier: MIT
//
// Exporter: the lending side. It owns the memory, the ledger, and per peer an arena, control words and rings.
//
//   accept.cpp        who connects, up to the end of the handshake
//   exporter.cpp      what they send, and the tick
//   regions.cpp       the arena's memory, as the caller holds it
//   lend.cpp          a loan's way out, in the order of its steps, and what the caller can do with it
//   place.cpp         where its bytes lie, and which way they take
//   prepare.cpp       what its rung and gate need first
//   foreign.cpp       the same for memory that is not the arena's: what is exported, and handed over
//   announce.cpp      READY and EXPORT
//   settle.cpp        a loan's way back: DONE, ACK, RELEASE
//   gone.cpp          what a lost peer leaves behind: retired chunks, quarantined memory, and the proof that it is gone
//   requests.cpp      results that a peer asks for
//   canary.cpp        the proof of a way to a peer before its first loan
//   exporter_end.cpp  the end of the context, and of a connection
#pragma once

#include <loan/completion.hpp>
#include <loan/ledger.hpp>
#include <loan/loan.hpp>
#include <loan/tether.hpp>
#include <loan/trial.hpp>
#include <memory/arena.hpp>
#include <memory/device_buffer.hpp>

#include <unordered_map>

namespace gpuloan::loan {

class Exporter;
class ExporterPeer;
class ExportLoan;

// An arena region as the caller holds it.
class RegionHandle {
 public:
  std::shared_ptr<Exporter> exporter;
  std::shared_ptr<ExporterPeer> peer;
  std::shared_ptr<memory::Arena> arena;
  memory::Region* region = nullptr; // null once the context was closed under it
  Handle handle;
};

class Request {
 public:
  std::shared_ptr<Exporter> exporter;
  std::shared_ptr<ExporterPeer> peer;
  Handle handle;
  std::uint64_t id = 0;
  std::uint64_t bytes = 0;
  std::uint64_t alignment = 0;
  gpuloan_memory memory = GPULOAN_MEMORY_DEVICE;
  bool onward = false;
  bool answered = false;
  std::vector<std::byte> metadata;
};

struct LendOptions {
  gpuloan_access access = GPULOAN_ACCESS_READ;
  gpuloan_policy policy = GPULOAN_POLICY_BEST;
  std::uint32_t rungs = 0;
  gpuloan_gate gate = GPULOAN_GATE_AUTO;
  gpuloan_memory memory = GPULOAN_MEMORY_DEVICE;
  bool keep_open = false;
  bool exclusive = false; // another peer's region: that one unmaps it first
  cuda::Stream stream = nullptr;
  std::span<const std::byte> metadata;
  std::function<void()> release; // called once the memory is ours alone again; not when lend() fails
  // The library's own.
  std::uint64_t request = 0;
  bool canary = false;
  const memory::PointerInfo* known = nullptr; // memory that the driver need not be asked about
};

// A caller's release function: its last reference calls it.
class ReleaseCall {
 public:
  explicit ReleaseCall(std::function<void()> call) : call_(std::move(call)) {}
  ReleaseCall(const ReleaseCall&) = delete;
  ReleaseCall& operator=(const ReleaseCall&) = delete;
  ~ReleaseCall() {
    if (call_) call_();
  }
  void disarm() noexcept { call_ = nullptr; }
  // Whoever drops it, it is not called before go(); needs no memory, since a call for which there is none must not come early.
  void stay(std::shared_ptr<ReleaseCall> self) noexcept { self_ = std::move(self); }
  void go() noexcept { const auto last = std::move(self_); }

 private:
  std::function<void()> call_;
  std::shared_ptr<ReleaseCall> self_;
};

// Chunks of the caller's VMM memory on their way to an importer.
struct PieceFeed {
  std::shared_ptr<ExportLoan> loan;
  std::shared_ptr<const std::vector<driver::VmmHandle>> pieces;
  std::uint64_t chunk = 0;
  std::size_t next = 0;
};

// The block of a canary: a region of the arena, or memory beside it.
struct CanaryMemory {
  memory::Region* region = nullptr;
  std::shared_ptr<memory::DeviceBuffer> buffer;
  std::uint64_t pointer = 0; // of host pages the host address
};

// The proof of one way to one peer (canary.cpp).
struct Canary {
  gpuloan_canary verdict = GPULOAN_CANARY_NOT_ATTEMPTED;
  std::string text;     // why it was demoted
  bool running = false; // from its sending until all of it has come back
  bool waited = false;  // a caller waited in vain: the next ones do not
  std::array<std::shared_ptr<ExportLoan>, kCanaryShapes.size()> loans; // null: not sent, or judged
  CanaryMemory memory;
  std::pair<gpuloan_status, std::string> spent; // of the last battery that proved nothing
  [[nodiscard]] bool out() const noexcept;
  [[nodiscard]] bool ended() const noexcept;
  [[nodiscard]] std::vector<ShapeEnd> ends() const;
  [[nodiscard]] std::pair<gpuloan_status, std::string> trouble() const;
  // Unanswered is what a caller has waited for in vain; for one that is under way prove() waits.
  [[nodiscard]] RungProof proof() const noexcept { return {verdict, running && waited, verdict == GPULOAN_CANARY_DEMOTED ? text.c_str() : ""}; }
};

struct EventPair {
  driver::OwnedEvent ready; // ours
  driver::OwnedEvent done;  // the importer's, opened
  bool in_use = false;
};

class ExporterPeer : public Peer {
 public:
  using Peer::Peer;
  static constexpr std::size_t kEventPairsMax = 256;
  static constexpr std::size_t kRequestsMax = 1024;

  std::shared_ptr<memory::Account> account_ref;
  std::shared_ptr<memory::Arena> arena;
  unsigned char key[GPULOAN_KEY_BYTES] = {};
  bool key_claimed = false, needs_key = true;
  bool refused = false; // said so to the peer and in an event
  std::uint64_t connected_ns = 0; // later by the time that we did not look in
  SideFloors floors;
  bool same_process = false;
  bool same_device = false;
  bool peer_access = false; // it works on another device, which reaches the memory of ours
  std::string apart;        // why it can map none of our device's memory

  AdmissionInput last_input; // loans that follow each other are alike: the answer and its words are made once
  std::optional<Admission> last_admission;

  std::vector<std::uint32_t> free_slots, generations;
  // Slots whose last READY is still on its way, with the event behind it. A slot of a lost peer is not used again.
  std::vector<std::pair<std::uint32_t, driver::OwnedEvent>> late_slots;
  bool memory_released = false; // words, rings, events and streams went to the reaper
  std::unordered_map<std::uint64_t, std::shared_ptr<ExportLoan>> loans; // out, by id
  std::size_t polled_loans = 0; // of them
  std::uint64_t next_loan = 1;
  std::uint64_t foreign_chunks = 0; // numbers given so far
  static constexpr std::uint32_t kPiecesMax = 64; // descriptors that are not closed at the importer yet
  std::deque<PieceFeed> feeds;
  std::uint32_t piece_credit = kPiecesMax;
  bool feeding = false;
  std::map<cuda::Pool, std::uint64_t> pools; // that were made known, by number
  std::size_t requests = 0; // not answered
  bool dead = false;          // its pidfd fired
  // The page that its processes keep mapped as long as they may touch lent memory (S17); we never map it.
  std::shared_ptr<const Tether> tether; // also of a try that is under way when the context ends
  bool untethered = false; // sealed: nobody maps the page any more
  bool sealing = false;    // a try is under way
  std::uint64_t seal_at_ns = 0, seal_pause_ns = 0;
  bool sweeping = false;      // freed bytes wait for streams
  bool loss_reported = false; // PEER_LOST was pushed
  bool copies_broken = false; // the driver failed a copy of ours: the rings are not used again
  Error copies_error;         // then
  std::vector<std::weak_ptr<ExportLoan>> retired; // ended with the peer, their regions may still live
  std::vector<std::shared_ptr<ReleaseCall>> released; // at the end of the context, behind our own copies
  std::vector<std::shared_ptr<ExportLoan>> quarantined; // likewise, their memory waits for the proof

  std::mutex prepare_mutex; // making words, rings, events and the copy stream: driver calls without the context's lock
  std::vector<std::unique_ptr<EventPair>> events;
  driver::OwnedStream copy_stream;
  std::unique_ptr<memory::UnpinnedCopies> unpinned; // from staging pages that the driver would not pin
  std::string words_refusal;                        // why the control words cannot be pinned
  std::string events_refusal;                       // why interprocess events do not work with it
  bool events_waited = false;                       // somebody waited for the first pair's answer in vain
  bool events_proven = false;                       // each side has opened one of the other's
  driver::OwnedStream canary_stream;
  // Of ipc canaries: cuMemFree would stand behind all work of the caller's, and let nothing else begin (S10).
  std::vector<std::shared_ptr<memory::DeviceBuffer>> blocks;
  std::vector<driver::OwnedStream> ring_streams; // of rings that are gone; the arena still asks them

  std::array<Canary, kTrials> canaries;
  [[nodiscard]] Canary& canary_of(Trial trial) noexcept { return canaries[static_cast<std::size_t>(trial)]; }
  [[nodiscard]] const Canary& canary_of(Trial trial) const noexcept { return canaries[static_cast<std::size_t>(trial)]; }
  [[nodiscard]] gpuloan_canary host_canary() const noexcept; // of all ways of the host rung

  ~ExporterPeer() override { release_memory(true); }
  // Gives words, rings, events and streams, and at the end the arena, to the reaper: some of them can only be given back
  // by calls that wait for the whole CUDA context.
  void release_memory(bool with_arena) noexcept;
};

class ExportLoan : public Loan {
 public:
  using Loan::Loan;
  ExportState state = ExportState::Preparing;
  std::uint64_t pointer = 0;
  std::shared_ptr<memory::Arena> arena;
  memory::Region* region = nullptr;  // the arena region it lies in, or null
  memory::Region* staging = nullptr; // Carrier::Segment, Stage
  memory::PointerInfo foreign;       // of memory that is not the arena's, as it was when it was lent
  std::shared_ptr<ExporterPeer> owner; // whose arena has the region, where it is another peer's
  memory::Region* owned = nullptr;
  cuda::IpcMemHandle legacy = {};    // rung ipc
  cuda::PoolPointer pool_pointer = {}; // rung pool
  std::uint64_t pool = 0;              // its number
  std::shared_ptr<const std::vector<driver::VmmHandle>> pieces; // rung vmm: they keep the memory, also in quarantine
  std::shared_ptr<ReleaseCall> release_call;
  cuda::Stream stream = nullptr;     // of the present turn
  std::uint32_t recorded_turn = 0;   // DONE record seen
  driver::OwnedEvent ready_written; // behind a READY that the device writes
  bool polled = false; // the tick has to look how far it is; else a record tells
  bool gate_passed = false;
  driver::OwnedEvent landed; // staged, write: behind the copy from the staging region
  std::shared_ptr<const memory::UnpinnedCopy> unpinned_landing; // or this, where the staging pages are not pinned
  bool landing = false;
  bool posting = false; // ready() is at work without the lock: nothing ends the loan until it is through
  driver::OwnedEvent reading; // staged, read: behind the copy into the staging region
  bool acked = false;
  bool settling = false; // the peer is lost; ends once our own copies are over
  bool finish_sent = false;
  EventPair* event = nullptr;

  [[nodiscard]] ExporterPeer& exporter_peer() const noexcept { return static_cast<ExporterPeer&>(*peer); }
  [[nodiscard]] gate::Post ready_post() const noexcept {
    return {peer->words, slot, gate::Word::Ready, word(), gate, event != nullptr ? &event->ready : nullptr};
  }
  [[nodiscard]] gate::Post done_post() const noexcept {
    return {peer->words, slot, gate::Word::Done, word(), gate, event != nullptr && event->done ? &event->done : nullptr};
  }
  [[nodiscard]] bool staged() const noexcept { return carrier == Carrier::Segment || carrier == Carrier::Stage; }
  // The importer maps memory that is not ours to retire.
  [[nodiscard]] bool shares_foreign() const noexcept { return foreign.bytes != 0 && carrier == Carrier::Direct; }
  [[nodiscard]] gpuloan_memory_state memory_state() const noexcept override;
};

class Exporter : public Context {
 public:
  [[nodiscard]] static Result<std::shared_ptr<Exporter>> create(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu);
  ~Exporter() override;
  void close() noexcept override;

  [[nodiscard]] Result<gpuloan_key> invite(std::string_view account);
  [[nodiscard]] Result<void> listen(const char* path);
  [[nodiscard]] Result<void> attach(int fd, std::string_view account); // takes fd on success

  // Held for the caller.
  [[nodiscard]] Result<std::shared_ptr<RegionHandle>> create_region(const std::shared_ptr<ExporterPeer>& peer, const memory::RegionSpec& spec);
  [[nodiscard]] Result<void> destroy_region(RegionHandle& region);
  [[nodiscard]] Result<void> used_on(RegionHandle& region, cuda::Stream stream);

  [[nodiscard]] Result<std::shared_ptr<ExportLoan>> lend(const std::shared_ptr<ExporterPeer>& peer, std::uint64_t pointer,
                                                         std::uint64_t bytes, const LendOptions& options);
  struct Lent {
    std::vector<std::shared_ptr<ExportLoan>> loans; // of the first ranges
    std::optional<Error> refusal;                   // of the next one
  };
  // The same for many ranges: their records leave together. Ends at the first range that cannot be lent.
  [[nodiscard]] Lent lend_many(const std::shared_ptr<ExporterPeer>& peer, std::span<const gpuloan_range> ranges, const LendOptions& options);
  [[nodiscard]] Result<void> ready(const std::shared_ptr<ExportLoan>& loan, cuda::Stream stream);
  [[nodiscard]] Result<void> cancel(const std::shared_ptr<ExportLoan>& loan, std::string_view reason);
  [[nodiscard]] Result<void> reclaim(const std::shared_ptr<ExportLoan>& loan, std::uint32_t timeout_ms);
  [[nodiscard]] Result<void> wait_done(const std::shared_ptr<ExportLoan>& loan, std::uint32_t timeout_ms);

  struct Grant {
    std::shared_ptr<RegionHandle> region;
    std::shared_ptr<ExportLoan> loan;
  };
  [[nodiscard]] Result<Grant> grant(Request& request, LendOptions options);
  [[nodiscard]] Result<std::shared_ptr<ExportLoan>> grant_with(Request& request, std::uint64_t pointer, LendOptions options);
  [[nodiscard]] Result<void> deny(Request& request, std::string_view reason);

 private:
  Exporter(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu, const channel::BootId& boot);

  // accept.cpp; lock held
  void on_listener() override;
  void watch_listener();
  void adopt_peer(const std::shared_ptr<ExporterPeer>& peer);
  [[nodiscard]] Result<void> shake(const std::shared_ptr<Peer>& peer, channel::Received& received) override;
  [[nodiscard]] Result<void> on_hello(const std::shared_ptr<ExporterPeer>& peer, channel::Received& received);
  void match_device(ExporterPeer& peer);
  void welcome(const std::shared_ptr<ExporterPeer>& peer);
  void refuse(const std::shared_ptr<ExporterPeer>& peer, Error why);

  // exporter.cpp
  [[nodiscard]] Result<void> handle(const std::shared_ptr<Peer>& peer, channel::Received& received) override;
  void on_peer_lost(const std::shared_ptr<Peer>& peer) override;
  void on_peer_dead(const std::shared_ptr<Peer>& peer) override;
  [[nodiscard]] bool awaits_death(const Peer& peer) const override;
  [[nodiscard]] std::uint64_t tick() override;
  void after_turn() override;
  void fill_stats(gpuloan_stats& stats) const override;
  void fill_peer_info(const Peer& peer, gpuloan_peer_info& info) const override;
  [[nodiscard]] Result<void> on_request(const std::shared_ptr<ExporterPeer>& peer, const channel::Received& received);
  [[nodiscard]] Result<void> on_done(ExporterPeer& peer, const channel::Turn& turn);
  [[nodiscard]] Result<void> on_ack(ExporterPeer& peer, const channel::Received& received);
  void poll(ExportLoan& loan);
  [[nodiscard]] Result<void> on_event_handle(ExporterPeer& peer, const channel::EventHandle& handle);
  [[nodiscard]] ExportLoan* find_loan(ExporterPeer& peer, std::uint64_t id, std::uint32_t slot, std::uint32_t generation) const;

  // lend.cpp; no lock
  struct Prepared {
    std::shared_ptr<ExportLoan> loan;
    bool ready = false; // its READY was posted
  };
  struct Place;
  [[nodiscard]] Result<Prepared> prepare_loan(const std::shared_ptr<ExporterPeer>& peer, std::uint64_t pointer, std::uint64_t bytes, const LendOptions& options);
  [[nodiscard]] Result<std::shared_ptr<ExportLoan>> enter(const std::shared_ptr<ExporterPeer>& peer, const Place& place, std::uint64_t pointer,
                                                          std::uint64_t bytes, const LendOptions& options, const Admission& admission);
  void abandon(const std::shared_ptr<ExportLoan>& loan, const Error& why); // lend failed

  // place.cpp; no lock
  struct Place { // where the bytes lie
    Origin origin = Origin::Nothing;
    memory::Region* region = nullptr;
    memory::PointerInfo foreign; // Foreign, OtherArena
    bool alone = false;          // OtherArena
    std::shared_ptr<ExporterPeer> owner; // OtherArena
    memory::Region* owned = nullptr;
    std::string writers;         // OtherArena: who may still write it
  };
  [[nodiscard]] Result<Place> locate(ExporterPeer& peer, std::uint64_t pointer, std::uint64_t bytes, const LendOptions& options);
  [[nodiscard]] Result<void> make_exclusive(Place& place);
  [[nodiscard]] Result<Admission> admit_to(ExporterPeer& peer, const Place& place, std::uint64_t bytes, const LendOptions& options);
  [[nodiscard]] std::uint64_t free_bytes(ExporterPeer& peer);
  [[nodiscard]] static Trial trial_of_loan(const Place& place, const Admission& admission, const LendOptions& options) noexcept;
  [[nodiscard]] bool needs_proof(ExporterPeer& peer, Trial trial, std::uint64_t bytes, const LendOptions& options);

  // prepare.cpp; no lock unless said
  [[nodiscard]] Result<void> prepare(ExportLoan& loan, const LendOptions& options);
  [[nodiscard]] Result<void> prepare_event(ExportLoan& loan, const LendOptions& options);
  [[nodiscard]] Result<cuda::IpcEventHandle> make_event(EventPair& pair) const;
  [[nodiscard]] Result<void> prepare_ring(ExporterPeer& peer, bool to_importer);
  [[nodiscard]] Result<void> prepare_stream(driver::OwnedStream& stream);
  [[nodiscard]] Result<void> prepare_words(ExportLoan& loan, const LendOptions& options);
  void note_unpinned(ExportLoan& loan) const;
  [[nodiscard]] Result<GateChoice> gate_for(const ExporterPeer& peer, const LendOptions& options) const; // lock held
  [[nodiscard]] Result<void> choose_again(ExportLoan& loan, const LendOptions& options) const;           // lock held

  // foreign.cpp
  [[nodiscard]] Result<void> prepare_foreign(ExportLoan& loan);
  [[nodiscard]] Result<void> prepare_pool(ExportLoan& loan);
  void announce_foreign(ExportLoan& loan, channel::Export& wire); // lock held
  void feed_pieces(const std::shared_ptr<ExporterPeer>& peer);    // lock held; goes on without it
  [[nodiscard]] bool feed_piece(ExporterPeer& peer);              // no lock

  // announce.cpp; lock held unless said
  [[nodiscard]] Result<bool> post_turn(ExportLoan& loan, cuda::Stream stream); // no lock; true: READY was posted
  [[nodiscard]] Result<void> announce(ExportLoan& loan, const LendOptions& options, bool ready);
  [[nodiscard]] Result<void> announce_memory(ExportLoan& loan, channel::Export& wire);
  void start_turn(ExportLoan& loan);
  void announce_ready(ExportLoan& loan);

  // settle.cpp; lock held
  [[nodiscard]] static bool due(const ExportLoan& loan) noexcept; // advance() would get somewhere; no driver call
  void advance(ExportLoan& loan); // whatever is due: DONE, and the end once it is safe
  void advance_turn(ExportLoan& loan);
  [[nodiscard]] Result<bool> landed(ExportLoan& loan);
  void turn_done(ExportLoan& loan);
  void fail_loan(ExportLoan& loan, gpuloan_status status, std::string text);
  void free_slot(ExporterPeer& peer, ExportLoan& loan, bool clean);
  void finish(ExportLoan& loan, ExportEvent event);
  void pump(ExporterPeer& peer);
  void fail_rings(ExporterPeer& peer);
  void recall_idle(ExporterPeer& peer);
  [[nodiscard]] bool copies_pending(ExportLoan& loan);

  // gone.cpp; lock held
  void settle_lost(ExportLoan& loan);
  void settle_peer(const std::shared_ptr<ExporterPeer>& peer);
  void release(ExportLoan& loan); // the memory is ours alone again
  void seek_proof(const std::shared_ptr<ExporterPeer>& peer);
  void try_seal(const std::shared_ptr<ExporterPeer>& peer, const Tether& tether); // no lock
  void settle_gone(ExporterPeer& peer);
  void report_lost(ExporterPeer& peer);
  [[nodiscard]] const char* unprovable(const ExporterPeer& peer) const noexcept;

  // canary.cpp
  [[nodiscard]] Result<void> prove(const std::shared_ptr<ExporterPeer>& peer, Trial trial, cuda::Pool pool);
  [[nodiscard]] Result<void> send_canary(const std::shared_ptr<ExporterPeer>& peer, Trial trial, cuda::Pool pool);
  [[nodiscard]] Result<void> lend_canary(const std::shared_ptr<ExporterPeer>& peer, Trial trial);             // no lock
  [[nodiscard]] Result<void> make_canary_memory(ExporterPeer& peer, Trial trial, cuda::Pool pool);           // no lock
  [[nodiscard]] Result<void> move_block(ExporterPeer& peer, const CanaryMemory& memory, std::span<std::byte> block, bool in); // no lock
  void judge_canary(Lock& lock, ExporterPeer& peer, Trial trial); // lock held, and dropped for the driver's part
  void demote(ExporterPeer& peer, Trial trial, const std::string& why); // lock held
  [[nodiscard]] static bool silent(ExporterPeer& peer);                 // lock held
  void judge_late_canaries(const std::shared_ptr<ExporterPeer>& peer);

  const channel::BootId boot_;
  channel::KeyRing keys_;
  memory::Accounts accounts_;
  Ledger ledger_;
  UniqueFd listener_;
  std::string listen_path_; // as given
  channel::SocketFile socket_file_;
  std::uint64_t ticked_ns_ = 0;
  std::uint64_t listener_back_ns_ = 0; // when a listener that had to be put aside comes back
  std::vector<std::weak_ptr<RegionHandle>> regions_;
  std::vector<std::shared_ptr<ExporterPeer>> remembered_; // every peer whose arena or copies still count
  std::vector<std::pair<std::shared_ptr<memory::Arena>, memory::Region*>> finished_staging_; // to be destroyed without the lock
  std::vector<std::shared_ptr<ExportLoan>> due_; // tick()'s
  static constexpr std::size_t kPoolPointersMax = 4096;
  std::map<std::uint64_t, cuda::PoolPointer> pool_pointers_; // by buffer: making one costs 0.45 us per MiB, every time (P4)
  std::uint64_t pool_exported_bytes_ = 0;
  Completion apart_{true, false};    // makes descriptors of pieces, tries to seal tethers
  Completion releases_{true, false}; // runs release functions, which may take as long as they like
  std::uint64_t active_until_ns_ = 0;
};

} // namespace gpuloan::loan
