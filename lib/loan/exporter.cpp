// SPDX-License-Identifier: MIT
//
// Connections: HELLO and its checks, WELCOME, the control pages' four steps, then requests and the importer's answers. A
// peer that breaks the protocol is dropped; nothing it sends makes the exporter wait, fail or grow without bound.
#include <loan/exporter.hpp>

#include <base/log.hpp>
#include <base/reaper.hpp>

#include <algorithm>
#include <cstring>
#include <unistd.h>

namespace gpuloan::loan {
namespace {

constexpr std::uint64_t kHandshakeNs = 10'000'000'000; // a connection that has not finished by then is closed
constexpr std::uint32_t kDisposeMs = 1000; // for close(); what takes longer is left to the reaper
constexpr std::size_t kHandshakesMax = 256; // at once; more are closed unheard
constexpr std::uint64_t kListenerPauseNs = 100'000'000;
constexpr std::uint64_t kLingerNs = 50'000'000; // the loop keeps ticking this long after the last loan

template <typename Object>
void erase_one(std::vector<Object>& list, const Object& object) {
  if (const auto it = std::find(list.begin(), list.end(), object); it != list.end()) list.erase(it);
}

std::vector<channel::DeviceEntry> device_entries(const driver::Gpu* gpu) {
  if (gpu == nullptr) return {};
  channel::DeviceEntry entry = {};
  std::memcpy(entry.uuid, gpu->floors().uuid.bytes, sizeof entry.uuid);
  entry.floors = gpu->floors().bits | (gpu->floors().mps ? channel::kDeviceMps : 0U);
  entry.driver_version = gpu->driver().version();
  return {entry};
}

} // namespace

gpuloan_memory_state ExportLoan::memory_state() const noexcept {
  switch (state) {
    case ExportState::Released:
      return GPULOAN_MEMORY_RELEASED;
    case ExportState::Retired:
      return GPULOAN_MEMORY_RETIRED;
    case ExportState::Surrendered:
      return GPULOAN_MEMORY_SURRENDERED;
    case ExportState::Quarantined:
      return GPULOAN_MEMORY_QUARANTINED;
    default:
      return GPULOAN_MEMORY_HELD;
  }
}

Result<std::shared_ptr<Exporter>> Exporter::create(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu) {
  auto boot = channel::read_boot_id();
  if (!boot) return forward(std::move(boot.error()));
  std::shared_ptr<Exporter> exporter(new Exporter(options, std::move(gpu), *boot));
  GPULOAN_TRY(exporter->start());
  return exporter;
}

Exporter::Exporter(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu, const channel::BootId& boot)
    : Context(options, std::move(gpu)), boot_(boot), accounts_(options.account_bytes) {}

Exporter::~Exporter() { close(); }

namespace {

// Of a loan in quarantine. Our own handles to its memory go first: behind the release function it is the caller's to free.
struct Kept {
  std::shared_ptr<ReleaseCall> release_call;
  std::shared_ptr<const std::vector<driver::VmmHandle>> pieces;
};

void keep_quarantined(std::vector<std::shared_ptr<ExportLoan>> loans, UniqueFd pidfd, const std::shared_ptr<const Tether>& tether) noexcept {
  for (const auto& loan : loans) {
    if (loan->release_call) loan->release_call->stay(loan->release_call);
  }
  try {
    std::vector<Kept> kept;
    for (const auto& loan : loans) kept.push_back({std::exchange(loan->release_call, nullptr), std::exchange(loan->pieces, nullptr)});
    if (kept.empty()) return;
    keep_until_gone(std::move(pidfd), tether, [kept = std::move(kept)]() mutable {
      for (Kept& each : kept) {
        each.pieces.reset();
        if (each.release_call) each.release_call->go();
      }
    });
  } catch (const std::bad_alloc&) { // then they are never called
  }
}

} // namespace

void Exporter::close() noexcept {
  {
    const Lock lock(mutex_);
    if (closed_) return;
    closed_ = true;
    for (const auto& [tag, peer] : peers_) lose(peer, loss("the exporter closed its context"));
    notify();
  }
  stop_loop();
  after_turn();
  Lock lock(mutex_);
  auto held = clear_handles(); // destroyed last, without the lock
  socket_file_.remove(); // before the socket goes, which keeps the file's inode from being used again
  socket_file_ = {};
  listener_.reset();
  for (const auto& weak : regions_) {
    const auto region = weak.lock();
    if (!region) continue;
    if (region->region != nullptr) region->arena->destroy(std::exchange(region->region, nullptr));
    region->arena.reset();
  }
  regions_.clear();
  for (const auto& peer : remembered_) {
    for (const auto& [id, loan] : peer->loans) {
      loan->arena.reset();
      loan->reading = {};
      loan->landed = {};
      auto call = std::exchange(loan->release_call, nullptr);
      if (!call) continue;
      call->stay(call);
      try {
        peer->released.push_back(std::move(call)); // behind our own last copies
      } catch (const std::bad_alloc&) { // then it is never called
      }
    }
    peer->loans.clear();
    peer->feeds.clear();
    for (Canary& canary : peer->canaries) canary.loans = {};
    auto quarantined = std::exchange(peer->quarantined, {});
    peer->release_memory(true);
    peer->socket.reset();
    keep_quarantined(std::move(quarantined), std::move(peer->pidfd), peer->tether);
    peer->pidfd.reset();
  }
  remembered_.clear();
  peers_.clear();
  lock.unlock();
  held = {};
  static_cast<void>(apart_.stop());
  static_cast<void>(releases_.stop());
  wait_disposed(kDisposeMs);
}

namespace {

// What is left of a connection, destroyed by the reaper in this order: our own copies end, the arena asks the streams that
// used it, then rings, words, events and streams go.
struct Remains {
  driver::OwnedStream copy_stream, canary_stream;
  std::vector<driver::OwnedStream> ring_streams;
  std::vector<std::unique_ptr<EventPair>> events;
  std::vector<std::pair<std::uint32_t, driver::OwnedEvent>> late_slots;
  gate::Words words;
  std::unique_ptr<memory::RingSource> to_importer;
  std::unique_ptr<memory::RingSink> from_importer;
  std::unique_ptr<memory::UnpinnedCopies> unpinned;
  std::shared_ptr<memory::Arena> arena;
  std::vector<std::shared_ptr<ReleaseCall>> released;
  decltype(ExporterPeer::blocks) blocks;

  Remains() = default;
  Remains(const Remains&) = delete;
  Remains& operator=(const Remains&) = delete;
  ~Remains() {
    const auto leave = [this](auto& end) { // to the process, with what it copies
      static_cast<void>(end.release());
      abandon(std::move(arena));
      abandon(std::move(released));
    };
    if (!memory::drain_ring(to_importer.get())) leave(to_importer);
    if (!memory::drain_ring(from_importer.get())) leave(from_importer);
    if (unpinned && !unpinned->drain()) leave(unpinned);
    arena.reset();
    for (const auto& call : released) call->go();
    released.clear();
  }
};

} // namespace

void ExporterPeer::release_memory(bool with_arena) noexcept {
  try {
    auto remains = std::make_shared<Remains>();
    if (to_importer) to_importer->forget_all();
    if (with_arena) {
      remains->copy_stream = std::move(copy_stream);
      remains->canary_stream = std::move(canary_stream);
      remains->ring_streams = std::move(ring_streams);
    } else { // the regions that live on remember which streams used them
      if (to_importer) ring_streams.push_back(to_importer->ring().take_stream());
      if (from_importer) ring_streams.push_back(from_importer->ring().take_stream());
    }
    remains->events = std::move(events);
    remains->late_slots = std::move(late_slots);
    remains->words = std::move(words);
    remains->to_importer = std::move(to_importer);
    remains->from_importer = std::move(from_importer);
    remains->unpinned = std::move(unpinned);
    remains->released = std::move(released);
    remains->blocks = std::move(blocks);
    if (with_arena) remains->arena = std::move(arena);
    events.clear();
    late_slots.clear();
    memory_released = true;
    dispose(std::move(remains));
  } catch (...) { // no memory: the members' own destructors do it, in their order
  }
}

// ---- Connecting ---------------------------------------------------------------------------------------------------

Result<gpuloan_key> Exporter::invite(std::string_view account) {
  const Lock lock(mutex_);
  return keys_.mint(account);
}

Result<void> Exporter::listen(const char* path) {
  const Lock lock(mutex_);
  if (listener_) return fail(GPULOAN_ERR_STATE, "this context listens already, at " + listen_path_);
  auto listener = channel::listen_at(path);
  if (!listener) return forward(std::move(listener.error()));
  listener_ = std::move(listener->socket);
  socket_file_ = std::move(listener->file);
  listen_path_ = path;
  post([this] {
    const Lock inner(mutex_);
    if (!closed_) watch_listener();
  });
  return {};
}

Result<void> Exporter::attach(int fd, std::string_view account) {
  GPULOAN_TRY(channel::check_inherited(fd));
  if (account.size() >= sizeof gpuloan_peer_info{}.account) return fail(GPULOAN_ERR_INVALID, "the account name is longer than 63 bytes");
  const Lock lock(mutex_);
  GPULOAN_TRY(channel::enable_identity(fd));
  auto peer = std::make_shared<ExporterPeer>(shared_from_this());
  peer->needs_key = false;
  peer->account = account;
  peer->socket = UniqueFd::take(fd);
  try {
    adopt_peer(peer);
  } catch (...) {
    static_cast<void>(peer->socket.release()); // the caller's again
    throw;
  }
  return {};
}

void Exporter::adopt_peer(const std::shared_ptr<ExporterPeer>& peer) {
  peer->connected_ns = now_ns();
  remembered_.push_back(peer);
  try {
    static_cast<void>(add_peer(peer));
  } catch (...) {
    remembered_.pop_back();
    throw;
  }
  request_tick();
}

void Exporter::on_listener() {
  const auto shaking = std::count_if(peers_.begin(), peers_.end(), [](const auto& entry) {
    return !entry.second->lost && entry.second->phase != Peer::Phase::Ready;
  });
  std::size_t room = kHandshakesMax - std::min<std::size_t>(kHandshakesMax, static_cast<std::size_t>(shaking));
  while (true) {
    auto socket = channel::accept_one(listener_.get());
    if (!socket) { // out of descriptors, most likely: look away for a while instead of spinning
      GPULOAN_LOG(GPULOAN_LOG_WARNING, "cannot accept a connection: " + socket.error().text);
      engine_->remove(listener_.get());
      listener_back_ns_ = now_ns() + kListenerPauseNs;
      return;
    }
    if (!*socket) return;
    if (room == 0) continue; // closes it
    --room;
    if (!channel::enable_identity(socket->get())) continue;
    auto peer = std::make_shared<ExporterPeer>(shared_from_this());
    peer->socket = std::move(*socket);
    adopt_peer(peer);
  }
}

void Exporter::watch_listener() {
  listener_back_ns_ = 0;
  if (auto added = engine_->add_readable(listener_.get(), kListenerTag); !added) {
    GPULOAN_LOG(GPULOAN_LOG_ERROR, "cannot watch the listening socket: " + added.error().text);
  }
}

void Exporter::refuse(const std::shared_ptr<ExporterPeer>& peer, Error why) {
  channel::Record record = channel::make_record(channel::Type::Refused);
  record.notice.status = why.status;
  send_text(*peer, record, why.text);
  push_event({GPULOAN_EVENT_PEER_REFUSED, why.status, nullptr, nullptr, nullptr, why.text});
  peer->refused = true;
  lose(peer, std::move(why));
}

// By UUID: which device each side works on, and whether the importer's driver lets the one reach the other.
void Exporter::match_device(ExporterPeer& peer) {
  const driver::Floors& ours = gpu_->floors();
  const auto is_ours = [&](const channel::DeviceEntry& entry) { return std::memcmp(entry.uuid, ours.uuid.bytes, sizeof entry.uuid) == 0; };
  const auto found = std::find_if(peer.devices.begin(), peer.devices.end(), is_ours);
  peer.sees_device = found != peer.devices.end();
  peer.same_device = found == peer.devices.begin();
  peer.peer_access = peer.sees_device && !peer.same_device && (found->floors & channel::kDevicePeer) != 0;
  peer.apart = "the importer works on another device, " +
               std::string(peer.sees_device ? "which has no peer access to this one: " : "and this one is not visible to it: ") + ours.uuid_text();
}

Result<void> Exporter::on_hello(const std::shared_ptr<ExporterPeer>& peer, channel::Received& received) {
  auto hello = channel::check_hello(received, ::geteuid(), boot_);
  if (!hello) return forward(std::move(hello.error()));
  if (peer->needs_key) {
    if (!hello->has_key) return fail(GPULOAN_ERR_KEY, "a connection to a path needs a key (gpuloan_context_invite)");
    std::memcpy(peer->key, received.record->hello.key, sizeof peer->key); // wiped when it is spent or given back
    auto account = keys_.claim(peer->key);
    if (!account) return forward(std::move(account.error()));
    peer->key_claimed = true;
    peer->account = std::move(*account);
  }
  peer->version = hello->version;
  peer->takes_bundles = (received.record->hello.features & channel::FeatureBundles) != 0;
  peer->devices = std::move(hello->devices);
  peer->floors.has_device = hello->wants_device && !peer->devices.empty();
  if (peer->floors.has_device) {
    peer->floors.floors = peer->devices.front().floors;
    if (gpu_) match_device(*peer);
  }
  peer->pid = received.sender.pid;
  peer->same_process = peer->pid == ::getpid();
  peer->pidfd = channel::peer_pidfd(received.sender);
  channel::disable_identity(peer->socket.get());
  watch_pidfd(*peer);
  return {};
}

void Exporter::welcome(const std::shared_ptr<ExporterPeer>& peer) {
  auto words = gate::Words::create(options_.slots);
  auto fd = words ? UniqueFd::dup(words->fd()) : Result<UniqueFd>(forward(std::move(words.error())));
  auto tether = Tether::create();
  if (!fd || !tether) {
    refuse(peer, std::move(fd ? tether.error() : fd.error()));
    return;
  }
  peer->words = std::move(*words);
  peer->tether = std::make_shared<const Tether>(std::move(*tether));
  peer->account_ref = accounts_.get(peer->account);
  peer->arena = std::make_shared<memory::Arena>(gpu_, peer->account_ref, options_.idle_bytes);
  peer->generations.assign(options_.slots, 0);
  for (std::uint32_t slot = options_.slots; slot > 0; --slot) peer->free_slots.push_back(slot - 1);

  const auto devices = device_entries(gpu_.get());
  channel::Record record = channel::make_record(channel::Type::Welcome);
  record.welcome.version = peer->version;
  record.welcome.features = peer->takes_bundles ? std::uint32_t{channel::FeatureBundles} : 0;
  record.welcome.device_count = static_cast<std::uint32_t>(devices.size());
  record.welcome.slots = options_.slots;
  if (!send(*peer, record, std::as_bytes(std::span(devices)))) return; // gone before WELCOME: its loss gives the key back
  if (peer->key_claimed) keys_.spend(peer->key);
  peer->key_claimed = false;
  ::explicit_bzero(peer->key, sizeof peer->key);

  record = channel::make_record(channel::Type::Pages);
  record.pages.bytes = peer->words.bytes();
  record.pages.slots = options_.slots;
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(*fd));
  send(*peer, record, {}, std::move(fds));
  peer->phase = Peer::Phase::Mapped;
}

// ---- Records ------------------------------------------------------------------------------------------------------

void Exporter::on_record(const std::shared_ptr<Peer>& base, channel::Received& received) {
  const auto peer = std::static_pointer_cast<ExporterPeer>(base);
  if (peer->phase == Peer::Phase::Hello) {
    if (received.type() != channel::Type::Hello) {
      refuse(peer, Error{GPULOAN_ERR_PROTOCOL, "the first record was no HELLO"});
    } else if (auto hello = on_hello(peer, received); !hello) {
      refuse(peer, std::move(hello.error()));
    } else {
      welcome(peer);
    }
    return;
  }
  if (auto handled = handle(peer, received); !handled) lose(peer, std::move(handled.error()));
}

Result<void> Exporter::handle(const std::shared_ptr<ExporterPeer>& peer, channel::Received& received) {
  using channel::Type;
  const channel::Record& record = *received.record;
  const Type type = received.type();
  if (type == Type::Bye) return fail(GPULOAN_ERR_PEER_LOST, "the peer closed the connection");
  if (peer->phase == Peer::Phase::Mapped && type == Type::PagesMapped) {
    GPULOAN_TRY(peer->words.seal());
    if (!send(*peer, channel::make_record(Type::PagesSealed))) return {}; // lost, or the loop will see that it is
    peer->phase = Peer::Phase::Checked;
    return {};
  }
  if (peer->phase == Peer::Phase::Checked && type == Type::PagesChecked) {
    auto fd = peer->tether->for_peer();
    if (!fd) return forward(std::move(fd.error()));
    std::vector<UniqueFd> fds;
    fds.push_back(std::move(*fd));
    if (!send(*peer, channel::make_record(Type::Tether), {}, std::move(fds))) return {};
    peer->phase = Peer::Phase::Ready;
    push_event({GPULOAN_EVENT_PEER_READY, GPULOAN_OK, peer, nullptr, nullptr, ""});
    return {};
  }
  if (peer->phase != Peer::Phase::Ready) return fail(GPULOAN_ERR_PROTOCOL, "a record came out of turn in the handshake");
  switch (type) {
    case Type::Request:
      return on_request(peer, received);
    case Type::Done:
      return on_done(*peer, record.turn);
    case Type::Ack:
      return on_ack(*peer, received);
    case Type::EventHandle:
      return on_event_handle(*peer, record.event_handle);
    case Type::Unmapped:
      if (!peer->arena->unmapped(record.chunk.chunk)) return fail(GPULOAN_ERR_PROTOCOL, "UNMAPPED names a chunk that was not recalled");
      notify();
      return {};
    case Type::PiecesTaken:
      peer->piece_credit = std::min(ExporterPeer::kPiecesMax, peer->piece_credit + std::min(record.pieces_taken.count, ExporterPeer::kPiecesMax));
      feed_pieces(peer);
      return {};
    case Type::RingFilled:
      if (!peer->from_importer) return fail(GPULOAN_ERR_PROTOCOL, "RING_FILLED without a ring");
      GPULOAN_TRY(peer->from_importer->filled({record.ring_filled.loan, record.ring_filled.offset, record.ring_filled.bytes,
                                               record.ring_filled.turn, record.ring_filled.slot}));
      pump(*peer);
      request_tick();
      return {};
    case Type::RingDrained:
      if (!peer->to_importer) return fail(GPULOAN_ERR_PROTOCOL, "RING_DRAINED without a ring");
      peer->to_importer->drained(record.ring_drained.slot);
      pump(*peer);
      request_tick();
      return {};
    default:
      return fail(GPULOAN_ERR_PROTOCOL, "record type " + std::to_string(record.header.type) + " is not an importer's");
  }
}

ExportLoan* Exporter::find_loan(ExporterPeer& peer, std::uint64_t id, std::uint32_t slot, std::uint32_t generation) const {
  const auto it = peer.loans.find(id);
  if (it == peer.loans.end() || it->second->slot != slot || it->second->generation != generation) return nullptr;
  return it->second.get();
}

Result<void> Exporter::on_event_handle(ExporterPeer& peer, const channel::EventHandle& wire) {
  if (!gpu_ || wire.index >= peer.events.size() || peer.events[wire.index]->done) {
    return fail(GPULOAN_ERR_PROTOCOL, "EVENT_HANDLE names no event pair that waits for one");
  }
  cuda::IpcEventHandle handle = {};
  std::memcpy(handle.reserved, wire.handle, sizeof handle.reserved);
  const bool refused = std::all_of(std::begin(wire.handle), std::end(wire.handle), [](auto byte) { return byte == 0; });
  auto event = driver::OwnedEvent::open_ipc(gpu_, handle);
  if (!event && !peer.events_proven) {
    if (peer.events_refusal.empty()) peer.events_refusal = refused ? "the importer's driver refuses them" : event.error().text;
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "the event gate is off with this peer: " + peer.events_refusal);
    notify();
    return {};
  }
  if (!event) { // its maker may be dead already; what it sent after this still counts, and an ACK needs no event
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "a DONE event cannot be opened, its loans are done with their ACK: " + event.error().text);
    return {};
  }
  peer.events[wire.index]->done = std::move(*event);
  peer.events_proven = true;
  notify();
  for (const auto& [id, loan] : std::unordered_map(peer.loans)) advance(*loan);
  return {};
}

Result<void> Exporter::on_done(ExporterPeer& peer, const channel::Turn& turn) {
  ExportLoan* found = find_loan(peer, turn.loan, turn.slot, turn.generation);
  const auto loan = found != nullptr ? std::static_pointer_cast<ExportLoan>(found->shared_from_this()) : nullptr;
  if (loan == nullptr || turn.turn == 0 || turn.turn > loan->turn) return fail(GPULOAN_ERR_PROTOCOL, "DONE names no turn that is out");
  loan->recorded_turn = std::max(loan->recorded_turn, turn.turn);
  if (turn.at_ns != 0 && turn.turn == loan->turn) loan->step_ns[GPULOAN_STEP_DONE] = turn.at_ns;
  advance(*loan);
  if (loan->state == ExportState::Out) poll(*loan); // recorded, not complete
  return {};
}

// From now on to its end the tick looks how far it is.
void Exporter::poll(ExportLoan& loan) {
  if (!std::exchange(loan.polled, true)) ++loan.exporter_peer().polled_loans;
  request_tick();
}

Result<void> Exporter::on_ack(ExporterPeer& peer, const channel::Received& received) {
  const channel::Ack& ack = received.record->ack;
  ExportLoan* found = find_loan(peer, ack.loan, ack.slot, ack.generation);
  if (found == nullptr || found->acked || found->state == ExportState::Preparing) return fail(GPULOAN_ERR_PROTOCOL, "ACK names no loan that is out");
  const auto loan = std::static_pointer_cast<ExportLoan>(found->shared_from_this());
  loan->acked = true;
  if (peer.to_importer) peer.to_importer->forget(loan->id); // nothing more of it is sent
  loan->step_ns[GPULOAN_STEP_IMPORT] = ack.import_ns;
  loan->step_ns[GPULOAN_STEP_WRITE] = ack.write_ns;
  loan->step_ns[GPULOAN_STEP_DONE] = ack.done_ns;
  loan->step_ns[GPULOAN_STEP_UNIMPORT] = ack.unimport_ns;
  loan->step_ns[GPULOAN_STEP_ACK] = ack.ack_ns;
  if (ack.outcome != GPULOAN_OK) {
    gpuloan_status outcome = outcome_from_wire(ack.outcome);
    if (outcome == GPULOAN_ERR_CANCELLED) outcome = GPULOAN_ERR_FAILED; // cancelling is for this side, and has set the outcome then
    std::string why = channel::readable_text(received);
    fail_loan(*loan, outcome, why.empty() ? "the importer gave no reason" : std::move(why));
  } else if (loan->state == ExportState::Out && ack.turns_done != loan->turn) {
    fail_loan(*loan, GPULOAN_ERR_RETURNED, "the importer returned the loan without finishing its turn");
  } else if (loan->state == ExportState::Out) {
    loan->gate_passed = true; // ACK implies DONE; our own copies may still be on their way
  }
  advance(*loan);
  if (!loan->ended) poll(*loan);
  return {};
}

// ---- Ticks, numbers -----------------------------------------------------------------------------------------------

std::uint64_t Exporter::tick() {
  bool busy = false, sweeping = false;
  std::uint64_t proof_ns = kNever; // when to ask again for a proof
  const auto peers = remembered_;
  for (const auto& peer : peers) {
    if (!peer->lost && peer->phase != Peer::Phase::Ready && now_ns() - peer->connected_ns > kHandshakeNs) {
      refuse(peer, Error{GPULOAN_ERR_TIMEOUT, "the handshake was not complete after 10 s"});
    }
    pump(*peer);
    std::erase_if(peer->late_slots, [&](const auto& late) {
      const auto written = late.second.query();
      if (written && !*written) return false;
      peer->free_slots.push_back(late.first);
      return true;
    });
    sweeping |= !peer->late_slots.empty();
    if (peer->lost) settle_peer(peer);
    if (peer->polled_loans > 0 || peer->lost) {
      for (const auto& [id, loan] : peer->loans) {
        if (due(*loan)) due_.push_back(loan);
        busy |= (loan->polled && loan->state == ExportState::Out) || loan->settling || loan->acked;
      }
    }
    std::ranges::sort(due_, {}, [](const auto& loan) { return loan->id; }); // what was done at once is told in the order of lending
    for (const auto& loan : due_) advance(*loan); // may end it, and others if the peer is lost over it
    due_.clear();
    judge_late_canaries(peer);
    seek_proof(peer);
    if (peer->lost && peer->dead && !peer->untethered && awaits_death(*peer)) proof_ns = std::min(proof_ns, std::max(peer->seal_at_ns, now_ns() + kTickMaxNs));
    busy |= peer->copying();
    if (peer->arena && peer->arena->sweep()) sweeping = peer->sweeping = true;
    else if (std::exchange(peer->sweeping, false) && !peer->lost) recall_idle(*peer);
    const bool counted = peer->arena && (peer->arena->stats().chunks > 0 || peer->arena->stats().surrendered_bytes > 0);
    if (peer->memory_released && !counted && peer->quarantined.empty()) erase_one(remembered_, peer);
  }
  const std::uint64_t now = now_ns();
  if (busy) {
    active_until_ns_ = now + kLingerNs;
    const std::uint64_t wait = tick_ns_;
    tick_ns_ = next_tick(tick_ns_);
    return wait;
  }
  tick_ns_ = kTickFirstNs;
  if (listener_back_ns_ != 0 && now >= listener_back_ns_) watch_listener();
  const bool shaking = std::any_of(remembered_.begin(), remembered_.end(), [](const auto& peer) { return peer->phase != Peer::Phase::Ready && !peer->lost; });
  if (sweeping || now < active_until_ns_) return kTickMaxNs;
  if (proof_ns != kNever) return proof_ns - now;
  if (listener_back_ns_ != 0) return kListenerPauseNs;
  return shaking ? 1'000'000'000 : kNever;
}

void Exporter::fill_stats(gpuloan_stats& stats) const {
  stats.pool_exported_bytes = pool_exported_bytes_;
  for (const auto& peer : remembered_) {
    stats.loans_out += peer->loans.size();
    for (const auto& loan : peer->quarantined) stats.quarantined_bytes += loan->bytes;
    if (!peer->arena) continue;
    const memory::ArenaStats arena = peer->arena->stats();
    stats.chunks += arena.chunks;
    stats.live_bytes += arena.live_bytes;
    stats.idle_bytes += arena.idle_bytes;
    stats.retired_bytes += arena.retired_bytes;
    stats.surrendered_bytes += arena.surrendered_bytes;
  }
}

gpuloan_peer_info Exporter::peer_info(ExporterPeer& peer) {
  const Lock lock(mutex_);
  gpuloan_peer_info info = {};
  info.size = sizeof info;
  info.pid = peer.pid;
  info.lost = peer.lost ? 1 : 0;
  info.protocol = peer.version;
  info.has_device = peer.sees_device ? 1 : 0;
  info.vmm_canary = peer.canary_of(Trial::Vmm).verdict;
  info.foreign_vmm_canary = peer.canary_of(Trial::ForeignVmm).verdict;
  info.pool_canary = peer.canary_of(Trial::Pool).verdict;
  info.ipc_canary = peer.canary_of(Trial::Ipc).verdict;
  info.host_canary = peer.host_canary();
  std::string text; // of each way that was demoted
  for (std::size_t index = 0; index < kTrials; ++index) {
    if (peer.canaries[index].verdict != GPULOAN_CANARY_DEMOTED) continue;
    text += (text.empty() ? "" : "; ") + std::string(name_of(static_cast<Trial>(index))) + ": " + peer.canaries[index].text;
  }
  text.copy(info.canary_text, sizeof info.canary_text - 1);
  info.pidfd = peer.pidfd ? 1 : 0;
  info.loans_out = peer.loans.size();
  peer.account.copy(info.account, sizeof info.account - 1);
  return info;
}

} // namespace gpuloan::loan
