// SPDX-License-Identifier: MIT
//
// Importer: the borrowing side. It maps the exporter's chunks, counts its holds on them, and lets go in order.
//
//   connect.cpp       the connection, up to the end of the handshake
//   importer.cpp      what the exporter sends, and the tick
//   borrow.cpp        a loan's turns: acquire, return, and the end
//   work.cpp          the caller's work of a turn: done, and until it is over
//   imports.cpp       memory that came, and its mappings
//   answer.cpp        requests, and the answer to a canary
//   importer_end.cpp  the end of the context, and of a connection
#pragma once

#include <driver/standing.hpp>
#include <loan/completion.hpp>
#include <loan/loan.hpp>
#include <memory/device_buffer.hpp>

#include <unordered_map>

namespace gpuloan::loan {

// A pool of the exporter's, opened when the first allocation of it is.
struct ImportPool {
  std::mutex mutex;
  UniqueFd fd; // until it is opened
  driver::ImportedPool pool;
};

// Foreign memory as it is mapped here; a block with a legacy handle, or of a pool, is shared by
// all loans of it.
struct ForeignMapping {
  explicit ForeignMapping(std::shared_ptr<ImportPool> of) noexcept : pool(std::move(of)) {}
  std::uint32_t uses = 0; // imports that have it; the context's lock guards it
  std::mutex mutex;       // opening and closing, one after the other: the driver does not count a pool's pointer (P6)
  driver::IpcMapping legacy;
  std::vector<driver::VmmHandle> pieces;
  driver::VmmRange range;
  const std::shared_ptr<ImportPool> pool; // outlives what is mapped of it
  driver::PoolMapping allocation;
};

enum class ImportKind : std::uint8_t { Vmm, HostPages, Legacy, Pieces, Pool };

// Memory of the exporter's that was made known. A chunk of its arena is mapped at the first loan that needs it and then kept
// (that is why a loan costs nothing); foreign memory serves one loan and is unmapped before that one's ACK.
struct Import {
  std::uint64_t id = 0;
  std::uint64_t bytes = 0;
  ImportKind kind = ImportKind::Vmm;
  gpuloan_access access = GPULOAN_ACCESS_READ;
  std::uint32_t holds = 0; // loans in it that have not let go
  bool recalled = false;
  // The rest is made without the context's lock, under this one: mapping and registering take the driver's time.
  std::mutex mutex;
  std::atomic<bool> mapped{false};
  UniqueFd fd; // until it is mapped
  driver::VmmHandle handle;
  driver::VmmMapping writable, read_only; // two aliases (V9); access is never flipped in place
  Mapping host;
  driver::HostRegistration registration; // before `host` goes
  cuda::IpcMemHandle legacy_handle = {};
  cuda::PoolPointer pool_pointer = {};
  std::uint64_t buffer = 0; // Legacy, Pool: its key in the peer's table of mappings; any number
  std::shared_ptr<ForeignMapping> foreign; // reset when it is unmapped
  std::size_t missing = 0; // pieces that did not come yet
  [[nodiscard]] bool single_use() const noexcept { return kind != ImportKind::Vmm && kind != ImportKind::HostPages; }
};

struct ImportEvents {
  driver::OwnedEvent ready; // the exporter's, opened
  driver::OwnedEvent done;  // ours
};

class ImportLoan;

class ImporterPeer : public Peer {
 public:
  using Peer::Peer;
  // All that is registered or mapped goes to the reaper: some of it can only be given back by calls that wait for the whole
  // CUDA context. `mapped`: imports too.
  ~ImporterPeer() override { release_memory(true); }
  void release_memory(bool mapped) noexcept;
  static constexpr std::size_t kImportsMax = 65536;
  std::map<std::uint64_t, std::shared_ptr<Import>> imports;
  std::map<std::uint64_t, std::shared_ptr<ForeignMapping>> foreign; // by buffer, those with uses
  std::map<std::uint64_t, std::shared_ptr<ImportPool>> pools;
  Mapping tether; // never unmapped before everything else of the exporter's is
  driver::HostRegistration tether_registration;
  std::mutex tether_mutex;
  std::unordered_map<std::uint64_t, std::shared_ptr<ImportLoan>> loans;    // by the exporter's id
  std::unordered_map<std::uint64_t, std::shared_ptr<ImportLoan>> requests; // by our number, not answered
  std::uint64_t next_request = 1;
  std::vector<std::shared_ptr<ImportEvents>> events;
  Error adopt_error; // of a ring that could not be adopted; no text: none
  std::string words_refusal; // why the control words cannot be pinned here; words_mutex guards it
  Error refusal;           // of REFUSED
  SideFloors floors;       // the exporter's
  // Buffers of loans that ended while the ring still copied into them.
  std::vector<std::pair<std::uint64_t, std::shared_ptr<memory::DeviceBuffer>>> limbo;
};

class ImportLoan : public Loan {
 public:
  using Loan::Loan;
  ImportState state = ImportState::Requested;
  std::uint64_t request = 0; // our number, 0 for a loan that was offered
  std::shared_ptr<Import> import;
  std::uint64_t offset = 0;
  std::shared_ptr<memory::DeviceBuffer> buffer; // Carrier::Ring
  std::uint64_t pointer = 0;
  std::byte* host = nullptr;
  bool ready_posted = false;   // the exporter's record for `turn` came
  bool ready_reported = false; // LOAN_READY was pushed
  std::uint32_t next_turn = 0; // a READY record that came before our own completion was seen
  bool finish = false;         // no turn follows the present one
  bool let_go = false;         // the caller returned it before it was granted
  bool cancelled = false;
  bool posting = false;   // a caller is in done(), without the lock
  bool busy = false;      // the stream of the last turn had work when that was done
  std::optional<driver::StreamWait> gpu_wait; // a stream waits for READY on the device
  std::shared_ptr<driver::OwnedEvent> behind; // behind the caller's work of the turn that was done, until that is over
  std::shared_ptr<driver::OwnedEvent> spare;  // behind's of the turn before, to be recorded again
  bool behind_watched = false;                // the completion thread sleeps on it
  std::uint64_t behind_ns = 0;                // since when
  std::uint64_t following = 0;                // a DONE that the device writes behind `behind`, until it was seen; 0: none
  std::uint64_t look_ns = 0, over_ns = 0;     // of such a turn: not to be looked at before, and since when its work is over
  bool caller_looks = false;                  // somebody spun for the next turn when the last one's work ended; a hint, the exporter can write it
  std::shared_ptr<ImportEvents> events; // event gate
  driver::OwnedEvent work; // Carrier::Ring, write: behind the caller's work of the turn that was done
  std::vector<cuda::Stream> streams; // named by used_on
  bool unmapping = false; // its end is under way
  [[nodiscard]] ImporterPeer& importer_peer() const noexcept { return static_cast<ImporterPeer&>(*peer); }
  [[nodiscard]] ImportEvents* pair() const noexcept {
    return gate == GPULOAN_GATE_EVENT ? events.get() : nullptr;
  }
  [[nodiscard]] gate::Post ready_post() const noexcept {
    return {peer->words, slot, gate::Word::Ready, word(), gate, pair() != nullptr ? &pair()->ready : nullptr};
  }
  // Turns that follow each other closely, whose caller looks for the end of their work itself. For them the event is a plain one in front of
  // DONE: the exporter then waits for nothing but the work, and the device has nothing left to do behind DONE (docs/benchmarks.md).
  [[nodiscard]] bool goes_ahead(bool loop_thread) const noexcept {
    return keep_open && carrier == Carrier::Direct && gate == GPULOAN_GATE_MEMOP && (caller_looks || !loop_thread);
  }
  // Nothing of this side's will be written into the slot any more.
  [[nodiscard]] bool done_landed() noexcept {
    if (following != 0 && (!peer->words || gate::reached(peer->words.load(slot, gate::Word::Done), following))) following = 0;
    return following == 0;
  }
  static constexpr std::uint32_t kAskedAgain = 8; // turns
  [[nodiscard]] gate::Post done_post() const noexcept {
    // Without pinned control words only the CPU writes them; a word that has the value passes under every gate.
    const gpuloan_gate by = gate == GPULOAN_GATE_MEMOP && !peer->words.registered() ? GPULOAN_GATE_HOST : gate;
    const bool likely_busy = busy && turn % kAskedAgain != 0; // asking takes as long as half a short fill
    return {peer->words, slot, gate::Word::Done, word(), by, pair() != nullptr ? &pair()->done : nullptr, likely_busy};
  }
};

struct RequestOptions {
  std::uint64_t bytes = 0;
  std::uint64_t alignment = 0;
  gpuloan_memory memory = GPULOAN_MEMORY_DEVICE;
  bool onward = false;
  std::span<const std::byte> metadata;
};

struct View {
  std::uint64_t pointer = 0;
  void* host = nullptr;
  std::uint32_t turn = 0;
};

class Importer : public Context {
 public:
  [[nodiscard]] static Result<std::shared_ptr<Importer>> create(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu);
  ~Importer() override;
  void close() noexcept override;

  [[nodiscard]] Result<std::shared_ptr<ImporterPeer>> connect(const char* path, const gpuloan_key* key, std::uint32_t timeout_ms);
  [[nodiscard]] Result<std::shared_ptr<ImporterPeer>> adopt(int fd, std::uint32_t timeout_ms); // takes fd unless INVALID

  [[nodiscard]] Result<std::shared_ptr<ImportLoan>> request(const std::shared_ptr<ImporterPeer>& peer, const RequestOptions& options);
  // With `on_stream`, `stream` waits for READY on the device instead of this call on the host.
  [[nodiscard]] Result<View> acquire(const std::shared_ptr<ImportLoan>& loan, bool on_stream, cuda::Stream stream, std::uint32_t timeout_ms);
  [[nodiscard]] Result<void> used_on(const std::shared_ptr<ImportLoan>& loan, cuda::Stream stream);
  [[nodiscard]] Result<void> done(const std::shared_ptr<ImportLoan>& loan, cuda::Stream stream);
  // The same for many, one after the other: what they have to say leaves together. Ends at the first that is refused; `count`: those
  // before it.
  [[nodiscard]] Result<void> done_many(std::span<const std::shared_ptr<ImportLoan>> loans, cuda::Stream stream, std::uint32_t& count);
  // status OK: an ordinary return; FAILED: with the reason why the work failed.
  [[nodiscard]] Result<void> give_back(const std::shared_ptr<ImportLoan>& loan, gpuloan_status status, std::string_view reason);
  [[nodiscard]] Result<void> wait_done(const std::shared_ptr<ImportLoan>& loan, std::uint32_t timeout_ms);

 private:
  Importer(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu, const channel::BootId& boot);
  using Trash = std::vector<std::shared_ptr<void>>; // destroyed without the lock

  // connect.cpp
  [[nodiscard]] Result<std::shared_ptr<ImporterPeer>> handshake(UniqueFd socket, const gpuloan_key* key, const Deadline& deadline);
  [[nodiscard]] Result<void> shake(const std::shared_ptr<Peer>& peer, channel::Received& received) override; // lock held

  // importer.cpp
  [[nodiscard]] Result<void> handle(const std::shared_ptr<Peer>& peer, channel::Received& received) override;
  void on_peer_lost(const std::shared_ptr<Peer>& peer) override;
  void see_off(Lock& lock, Peer& peer, const Deadline& deadline) override; // importer_end.cpp
  [[nodiscard]] std::uint64_t tick() override;
  void after_turn() override {
    static_cast<void>(completion_.poll());
    static_cast<void>(apart_.poll());
    static_cast<void>(foreign_.poll());
  }
  void fill_stats(gpuloan_stats& stats) const override;
  void fill_peer_info(const Peer& peer, gpuloan_peer_info& info) const override;
  [[nodiscard]] Result<void> on_export(const std::shared_ptr<ImporterPeer>& peer, const channel::Received& received);
  [[nodiscard]] Result<void> on_event_handle(ImporterPeer& peer, const channel::EventHandle& handle);
  [[nodiscard]] Result<cuda::IpcEventHandle> open_events(ImportEvents& pair, const channel::EventHandle& wire) const;
  [[nodiscard]] Result<void> on_ring(ImporterPeer& peer, channel::Received& received);
  void on_ready(ImporterPeer& peer, const channel::Turn& turn);
  void pump(ImporterPeer& peer);

  // imports.cpp; lock held unless said
  [[nodiscard]] Result<void> on_chunk(ImporterPeer& peer, channel::Received& received);
  [[nodiscard]] Result<void> on_recall(ImporterPeer& peer, std::uint64_t chunk);
  [[nodiscard]] Result<void> on_tether(ImporterPeer& peer, channel::Received& received);
  [[nodiscard]] Result<void> on_pool(ImporterPeer& peer, channel::Received& received);
  [[nodiscard]] Result<void> on_foreign(ImporterPeer& peer, channel::Received& received);
  struct Address {
    std::uint64_t pointer = 0;
    std::byte* host = nullptr;
  };
  [[nodiscard]] Result<Address> map(ImporterPeer& peer, Import& import, gpuloan_access access); // no lock
  [[nodiscard]] Result<void> tie(ImporterPeer& peer);
  [[nodiscard]] Result<void> on_piece(const std::shared_ptr<ImporterPeer>& peer, channel::Received& received);
  void take_piece(const std::shared_ptr<ImporterPeer>& peer, const std::shared_ptr<Import>& import, const channel::Piece& piece, UniqueFd fd); // no lock
  [[nodiscard]] Result<Address> map_foreign(Import& import);
  void unmap(ImporterPeer& peer, Import& import); // no lock; foreign memory
  [[nodiscard]] Result<void> map_device(Import& import, gpuloan_access access);
  [[nodiscard]] Result<void> map_host(Import& import);
  void drop_import(ImporterPeer& peer, std::shared_ptr<Import> import);
  [[nodiscard]] Result<void> prepare_buffer(ImportLoan& loan);

  // borrow.cpp; lock held unless said
  [[nodiscard]] Result<bool> turn_passed(ImportLoan& loan);
  [[nodiscard]] bool next_ready(ImportLoan& loan);
  [[nodiscard]] Result<void> import_memory(Lock& lock, const std::shared_ptr<ImportLoan>& loan); // drops the lock meanwhile
  [[nodiscard]] Result<void> acquirable(const ImportLoan& loan) const;
  void begin_turn(ImportLoan& loan, std::uint32_t turn);
  void complete(ImportLoan& loan, Trash& trash);
  void end(ImportLoan& loan, Trash& trash);
  void acknowledge(ImportLoan& loan);
  void cancel(ImportLoan& loan, gpuloan_status status, std::string text, Trash& trash);
  void release_wait(ImportLoan& loan);
  void store_release(ImportLoan& loan);
  void settle_cancelled(ImporterPeer& peer, Trash& trash);
  void sync_then_complete(const std::shared_ptr<ImportLoan>& loan); // no lock; waits for all work of the context
  void dispose(Trash trash);

  // work.cpp; lock held unless said
  struct Posted { // DONE of a turn, on its way
    std::shared_ptr<ImportLoan> loan;
    std::shared_ptr<driver::OwnedEvent> behind;
    bool passed = false;
    std::uint64_t following = 0;
  };
  [[nodiscard]] Result<Posted> begin_done(const std::shared_ptr<ImportLoan>& loan, cuda::Stream stream); // no lock
  [[nodiscard]] Result<void> settle_done(Posted& posted, Trash& trash);
  [[nodiscard]] Result<bool> post_done(Posted& posted, cuda::Stream stream); // no lock; what Posted::passed is
  void pin_words(ImportLoan& loan); // no lock
  void look_at_work(ImportLoan& loan, Trash& trash);
  void watch_work(const std::shared_ptr<ImportLoan>& loan);
  [[nodiscard]] bool watch_works() noexcept; // all; false: no memory
  [[nodiscard]] bool settle_works(ImporterPeer& peer, Trash& trash); // true: some go on
  void on_complete(ImportLoan& loan, Result<void> result, Trash& trash);

  // answer.cpp
  void answer_canary(const std::shared_ptr<ImportLoan>& loan); // no lock
  [[nodiscard]] Result<void> work_canary(const std::shared_ptr<ImportLoan>& loan, const View& view);

  const channel::BootId boot_;
  std::vector<std::shared_ptr<ImporterPeer>> remembered_; // every peer whose loans or copies are not over
  Patience work_patience_; // caller-driven: with the completion of our own work
  Completion completion_;
  Completion apart_; // waits for all work of the context, for which neither the other loans nor a caller who turns the loop may wait
  Completion foreign_; // takes pieces, and closes foreign memory, which waits for all work of the context; then the ACK
};

} // namespace gpuloan::loan
