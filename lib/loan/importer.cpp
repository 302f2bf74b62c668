// SPDX-License-Identifier: MIT
//
// The importer's connection: HELLO to PAGES_CHECKED, then what the exporter sends. A record that breaks the protocol
// loses the exporter; a loan that cannot be carried on this side is answered with an ACK that says why.
#include <loan/importer.hpp>

#include <base/log.hpp>
#include <base/reaper.hpp>

#include <algorithm>
#include <cstring>
#include <unistd.h>

namespace gpuloan::loan {
namespace {

constexpr std::uint32_t kDisposeMs = 1000; // for close(); what takes longer is left to the reaper
constexpr std::size_t kDevicesMax = 64;    // of a HELLO

// The device that we work on, then the others that we see, and whether it reaches their memory.
std::vector<channel::DeviceEntry> device_entries(const driver::Gpu* gpu) {
  std::vector<channel::DeviceEntry> entries;
  if (gpu == nullptr) return entries;
  const driver::Floors& floors = gpu->floors();
  const auto add = [&](const cuda::Uuid& uuid, std::uint32_t bits) {
    channel::DeviceEntry& entry = entries.emplace_back();
    std::memcpy(entry.uuid, uuid.bytes, sizeof entry.uuid);
    entry.floors = bits;
    entry.driver_version = gpu->driver().version();
  };
  add(floors.uuid, floors.bits | (floors.mps ? channel::kDeviceMps : 0U));
  for (const driver::Neighbour& other : floors.neighbours) {
    if (entries.size() < kDevicesMax) add(other.uuid, other.reachable ? channel::kDevicePeer : 0U);
  }
  return entries;
}

} // namespace

Result<std::shared_ptr<Importer>> Importer::create(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu) {
  auto boot = channel::read_boot_id();
  if (!boot) return forward(std::move(boot.error()));
  std::shared_ptr<Importer> importer(new Importer(options, std::move(gpu), *boot));
  GPULOAN_TRY(importer->start());
  return importer;
}

Importer::Importer(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu, const channel::BootId& boot)
    : Context(options, std::move(gpu)), boot_(boot), completion_(options.loop_thread, spins()), apart_(options.loop_thread, false), foreign_(true, false) {}

Importer::~Importer() { close(); }

void Importer::close() noexcept {
  bool watched = false;
  {
    Lock lock(mutex_);
    if (closed_) return;
    try {
      const Deadline deadline = Deadline::after_ms(kSeeOffMs);
      for (const auto& peer : std::vector(remembered_)) see_off(lock, *peer, deadline);
    } catch (const std::exception& error) { // what they would have said is lost
      log_turn(error);
    }
    closed_ = true;
    for (const auto& [tag, peer] : peers_) lose(peer, loss("the importer closed its context"));
    notify();
    watched = watch_works();
  }
  const bool quiet = completion_.stop() && watched; // first: they wait, a second at most, for work that uses the memory
  bool over = apart_.stop() && quiet;
  over = foreign_.stop() && over;
  stop_loop();
  Lock lock(mutex_);
  auto held = clear_handles(); // destroyed last, without the lock
  for (const auto& peer : remembered_) {
    for (const auto& [id, loan] : peer->loans) { // a ring may still copy out of them
      if (!loan->buffer) continue;
      try {
        peer->limbo.emplace_back(id, loan->buffer);
      } catch (const std::bad_alloc&) {
        abandon(std::move(loan->buffer));
      }
      loan->buffer.reset();
    }
    peer->loans.clear();
    peer->requests.clear();
    if (!over) { // left mapped, and tied: unmapping does not wait for running work (R22)
      abandon(std::move(peer->imports));
      abandon(std::move(peer->foreign));
      abandon(std::move(peer->pools));
      abandon(std::move(peer->tether));
      abandon(std::move(peer->tether_registration));
    }
    peer->release_memory(true);
    peer->socket.reset();
    peer->pidfd.reset();
  }
  remembered_.clear();
  peers_.clear();
  lock.unlock();
  held = {};
  wait_disposed(kDisposeMs);
}

namespace {

// What is left of a connection, destroyed by the reaper. A ring whose copies do not end is left to the process, with what
// they copy to.
struct Remains {
  std::vector<std::shared_ptr<ImportEvents>> events;
  std::map<std::uint64_t, std::shared_ptr<Import>> imports;
  gate::Words words;
  std::unique_ptr<memory::RingSink> from_exporter;
  std::unique_ptr<memory::RingSource> to_exporter;
  decltype(ImporterPeer::limbo) limbo;
  decltype(ImporterPeer::foreign) foreign;
  std::map<std::uint64_t, std::shared_ptr<ImportPool>> pools;
  Mapping tether;
  driver::HostRegistration tether_registration;

  Remains() = default;
  Remains(const Remains&) = delete;
  Remains& operator=(const Remains&) = delete;
  ~Remains() {
    const auto leave = [this](auto& end) {
      static_cast<void>(end.release());
      abandon(std::move(limbo));
    };
    if (!memory::drain_ring(from_exporter.get())) leave(from_exporter);
    if (!memory::drain_ring(to_exporter.get())) leave(to_exporter);
    imports.clear();
    foreign.clear();
    pools.clear();
    tether_registration = {}; // waits for all work of the context: nothing of ours touches the exporter's memory any more
    tether.reset();
  }
};

} // namespace

void ImporterPeer::release_memory(bool mapped) noexcept {
  try {
    auto remains = std::make_shared<Remains>();
    if (to_exporter) to_exporter->forget_all();
    remains->events = std::move(events);
    if (mapped) remains->imports = std::move(imports);
    remains->words = std::move(words);
    remains->from_exporter = std::move(from_exporter);
    remains->to_exporter = std::move(to_exporter);
    remains->limbo = std::move(limbo);
    if (mapped) {
      remains->foreign = std::move(foreign);
      remains->pools = std::move(pools);
      remains->tether = std::move(tether);
      remains->tether_registration = std::move(tether_registration);
    }
    events.clear();
    limbo.clear();
    if (mapped) imports.clear();
    dispose(std::move(remains));
  } catch (...) { // no memory: the members' own destructors do it
  }
}

// ---- Connecting ---------------------------------------------------------------------------------------------------

Result<std::shared_ptr<ImporterPeer>> Importer::connect(const char* path, const gpuloan_key* key, std::uint32_t timeout_ms) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  auto socket = channel::connect_to(path, deadline.at_ns());
  if (!socket) return forward(std::move(socket.error()));
  return handshake(std::move(*socket), key, deadline);
}

Result<std::shared_ptr<ImporterPeer>> Importer::adopt(int fd, std::uint32_t timeout_ms) {
  auto usable = channel::check_inherited(fd);
  if (!usable && usable.error().status == GPULOAN_ERR_INVALID) return forward(std::move(usable.error()));
  UniqueFd taken = UniqueFd::take(fd); // ours from here on, also where we have no use for it
  if (!usable) return forward(std::move(usable.error()));
  return handshake(std::move(taken), nullptr, Deadline::after_ms(timeout_ms));
}

Result<std::shared_ptr<ImporterPeer>> Importer::handshake(UniqueFd socket, const gpuloan_key* key, const Deadline& deadline) {
  auto peer = std::make_shared<ImporterPeer>(shared_from_this());
  channel::Record hello = channel::make_record(channel::Type::Hello);
  hello.hello.version_min = channel::kVersionMin;
  hello.hello.version_max = channel::kVersionMax;
  hello.hello.features = channel::FeatureBundles;
  std::memcpy(hello.hello.boot_id, boot_.data(), boot_.size());
  if (key != nullptr) {
    hello.hello.has_key = 1;
    std::memcpy(hello.hello.key, key->bytes, sizeof hello.hello.key);
  }
  const auto devices = device_entries(gpu_.get());
  hello.hello.device_count = static_cast<std::uint32_t>(devices.size());
  hello.hello.wants_device = gpu_ ? 1 : 0;
  GPULOAN_TRY(channel::enable_identity(socket.get()));
  Lock lock(mutex_);
  if (closed_) return fail(GPULOAN_ERR_PEER_LOST, "the context is closed");
  peer->socket = std::move(socket);
  remembered_.push_back(peer);
  peer->phase = Peer::Phase::Welcome;
  try {
    GPULOAN_TRY(add_peer(peer));
  } catch (...) { // nobody else knows of it: its socket is closed with it
    std::erase(remembered_, peer);
    throw;
  }
  send(*peer, hello, std::as_bytes(std::span(devices)));
  const bool over = wait(lock, deadline, false, [&] { return peer->lost || peer->phase == Peer::Phase::Ready; });
  if (over && !peer->lost) return peer;
  ::explicit_bzero(&hello, sizeof hello);
  Error why = peer->lost ? peer->loss : Error{GPULOAN_ERR_TIMEOUT, "the exporter did not complete the handshake in time"};
  lose(peer, why);
  forget_peer(*peer); // it may have been ready for a moment: no event names what nobody was given
  const auto loans = forget_loans(*peer);
  lock.unlock();
  return forward(std::move(why));
}

Result<void> Importer::shake(ImporterPeer& peer, channel::Received& received) {
  using channel::Type;
  using Phase = Peer::Phase;
  const Type type = received.type();
  if (peer.phase == Phase::Welcome) {
    auto welcome = channel::check_welcome(received);
    if (!welcome) return forward(std::move(welcome.error()));
    peer.version = welcome->version;
    peer.takes_bundles = (received.record->welcome.features & channel::FeatureBundles) != 0;
    peer.devices = std::move(welcome->devices);
    peer.floors.has_device = !peer.devices.empty();
    if (peer.floors.has_device) peer.floors.floors = peer.devices.front().floors;
    if (peer.floors.has_device && gpu_) {
      const auto is_theirs = [&](const cuda::Uuid& uuid) { return std::memcmp(peer.devices.front().uuid, uuid.bytes, sizeof uuid.bytes) == 0; };
      const auto& others = gpu_->floors().neighbours;
      peer.sees_device = is_theirs(gpu_->floors().uuid) || std::any_of(others.begin(), others.end(), [&](const auto& other) { return is_theirs(other.uuid); });
    }
    if (received.sender.known && received.sender.uid != ::geteuid()) {
      return fail(GPULOAN_ERR_UID, "the exporter runs as user " + std::to_string(received.sender.uid) + ", this process as user " + std::to_string(::geteuid()));
    }
    // Who speaks, not who made the socket: a pair's maker is not always who holds its other end.
    peer.pidfd = channel::peer_pidfd(received.sender);
    peer.pid = received.sender.pid;
    channel::disable_identity(peer.socket.get());
    watch_pidfd(peer);
    peer.phase = Phase::Mapped;
    return {};
  }
  if (peer.phase == Phase::Mapped && type == Type::Pages) {
    const channel::Pages& pages = received.record->pages;
    auto words = gate::Words::adopt(received.fds.take(0), pages.bytes, pages.slots);
    if (!words) return forward(std::move(words.error()));
    peer.words = std::move(*words);
    send(peer, channel::make_record(Type::PagesMapped));
    peer.phase = Phase::Sealed;
    return {};
  }
  if (peer.phase == Phase::Sealed && type == Type::PagesSealed) {
    GPULOAN_TRY(peer.words.check_seal());
    send(peer, channel::make_record(Type::PagesChecked));
    peer.phase = Phase::Ready;
    notify();
    return {};
  }
  return fail(GPULOAN_ERR_PROTOCOL, "a record came out of turn in the handshake");
}

// ---- Records ------------------------------------------------------------------------------------------------------

void Importer::on_record(const std::shared_ptr<Peer>& base, channel::Received& received) {
  const auto peer = std::static_pointer_cast<ImporterPeer>(base);
  Result<void> done = peer->phase == Peer::Phase::Ready ? handle(peer, received) : shake(*peer, received);
  if (!done) lose(peer, std::move(done.error()));
}

Result<void> Importer::handle(const std::shared_ptr<ImporterPeer>& peer, channel::Received& received) {
  using channel::Type;
  const channel::Record& record = *received.record;
  const auto loan_of = [&peer](std::uint64_t id) -> std::shared_ptr<ImportLoan> {
    const auto it = peer->loans.find(id);
    return it == peer->loans.end() ? nullptr : it->second;
  };
  Trash trash;
  switch (received.type()) {
    case Type::Bye:
    case Type::Refused:
      return fail(GPULOAN_ERR_PEER_LOST, "the exporter closed the connection" + (received.tail.empty() ? "" : ": " + channel::readable_text(received)));
    case Type::Chunk:
      return on_chunk(*peer, received);
    case Type::Recall:
      return on_recall(*peer, record.chunk.chunk);
    case Type::Tether:
      return on_tether(*peer, received);
    case Type::Foreign:
      return on_foreign(*peer, received);
    case Type::Pool:
      return on_pool(*peer, received);
    case Type::Piece:
      return on_piece(peer, received);
    case Type::Ring:
      return on_ring(*peer, received);
    case Type::EventHandle:
      return on_event_handle(*peer, record.event_handle);
    case Type::Export:
      return on_export(peer, received);
    case Type::Ready:
      on_ready(*peer, record.turn);
      return {};
    case Type::Cancel: // for a loan that we let go of already, it crossed our ACK
      if (const auto loan = loan_of(record.cancel.loan)) {
        cancel(*loan, outcome_from_wire(record.cancel.status), channel::readable_text(received), trash);
      }
      dispose(std::move(trash));
      return {};
    case Type::Finish:
      if (const auto loan = loan_of(record.cancel.loan)) {
        loan->finish = true;
        if (loan->state == ImportState::Idle && next_ready(*loan)) {
          begin_turn(*loan, loan->next_turn);
          request_tick();
        }
        if (loan->state == ImportState::Idle) end(*loan, trash);
        notify();
      }
      dispose(std::move(trash));
      return {};
    case Type::Denied: {
      const auto it = peer->requests.find(record.denied.request);
      if (it == peer->requests.end()) return fail(GPULOAN_ERR_PROTOCOL, "DENIED names no open request");
      const auto loan = it->second;
      const auto status = record.denied.status == GPULOAN_ERR_LIMIT ? GPULOAN_ERR_LIMIT : GPULOAN_ERR_DENIED;
      cancel(*loan, status, channel::readable_text(received), trash);
      return {};
    }
    case Type::RingFilled: {
      if (!peer->from_exporter) return peer->adopt_error.text.empty() ? fail(GPULOAN_ERR_PROTOCOL, "RING_FILLED without a ring") : Result<void>();
      const channel::RingFilled& wire = record.ring_filled;
      GPULOAN_TRY(peer->from_exporter->filled({wire.loan, wire.offset, wire.bytes, wire.turn, wire.slot}));
      pump(*peer);
      request_tick();
      return {};
    }
    case Type::RingDrained:
      if (!peer->to_exporter) return peer->adopt_error.text.empty() ? fail(GPULOAN_ERR_PROTOCOL, "RING_DRAINED without a ring") : Result<void>();
      peer->to_exporter->drained(record.ring_drained.slot);
      pump(*peer);
      request_tick();
      return {};
    default:
      return fail(GPULOAN_ERR_PROTOCOL, "record type " + std::to_string(record.header.type) + " is not an exporter's");
  }
}

Result<void> Importer::on_ring(ImporterPeer& peer, channel::Received& received) {
  const channel::Ring& wire = received.record->ring;
  const bool known = wire.to_importer != 0 ? peer.from_exporter != nullptr : peer.to_exporter != nullptr;
  if (known || !gpu_) return fail(GPULOAN_ERR_PROTOCOL, "RING came where none can be");
  auto ring = memory::HostRing::adopt(gpu_, received.fds.take(0), wire.slot_bytes, wire.slot_count);
  if (!ring) {
    if (ring.error().status == GPULOAN_ERR_PROTOCOL) return forward(std::move(ring.error()));
    // Loans that need it are answered with this.
    peer.adopt_error = {ring.error().status, "the ring of the host rung cannot be used here: " + ring.error().text + "; free what it names, then connect again"};
    return {};
  }
  if (wire.to_importer != 0) {
    peer.from_exporter = std::make_unique<memory::RingSink>(std::move(*ring), true);
  } else {
    peer.to_exporter = std::make_unique<memory::RingSource>(std::move(*ring));
  }
  return {};
}

Result<void> Importer::on_event_handle(ImporterPeer& peer, const channel::EventHandle& wire) {
  if (!gpu_ || wire.index != peer.events.size() || peer.events.size() >= 4096) return fail(GPULOAN_ERR_PROTOCOL, "EVENT_HANDLE out of order");
  auto pair = std::make_shared<ImportEvents>();
  auto ours = open_events(*pair, wire);
  if (!ours) GPULOAN_LOG(GPULOAN_LOG_WARNING, "interprocess events do not work here, the exporter is told: " + ours.error().text);
  peer.events.push_back(std::move(pair));
  channel::Record record = channel::make_record(channel::Type::EventHandle);
  record.event_handle.index = wire.index;
  if (ours) std::memcpy(record.event_handle.handle, ours->reserved, sizeof record.event_handle.handle); // else 0: there is none
  send(peer, record);
  return {};
}

Result<cuda::IpcEventHandle> Importer::open_events(ImportEvents& pair, const channel::EventHandle& wire) const {
  cuda::IpcEventHandle handle = {};
  std::memcpy(handle.reserved, wire.handle, sizeof handle.reserved);
  auto ready = driver::OwnedEvent::open_ipc(gpu_, handle);
  if (!ready) return forward(std::move(ready.error()));
  auto done = driver::OwnedEvent::create(gpu_, cuda::EventDisableTiming | cuda::EventInterprocess);
  if (!done) return forward(std::move(done.error()));
  auto ours = done->ipc_handle();
  if (!ours) return ours;
  pair.ready = std::move(*ready);
  pair.done = std::move(*done);
  return ours;
}

Result<void> Importer::on_export(const std::shared_ptr<ImporterPeer>& peer, const channel::Received& received) {
  const channel::Export& wire = received.record->export_;
  // 0 is what a request has for a loan before it is granted: an end of the one would take the other with it.
  if (wire.loan == 0 || peer->loans.contains(wire.loan) || wire.slot >= peer->words.slots()) return fail(GPULOAN_ERR_PROTOCOL, "EXPORT names a loan or slot that is in use");
  if (wire.gate == GPULOAN_GATE_EVENT && wire.event >= peer->events.size()) return fail(GPULOAN_ERR_PROTOCOL, "EXPORT names an event that was not announced");
  std::shared_ptr<Import> import;
  if (wire.chunk != 0) {
    const auto it = peer->imports.find(wire.chunk);
    if (it == peer->imports.end() || wire.offset > it->second->bytes || wire.bytes > it->second->bytes - wire.offset) {
      return fail(GPULOAN_ERR_PROTOCOL, "EXPORT does not lie in an announced chunk");
    }
    if (wire.access == GPULOAN_ACCESS_WRITE && it->second->access != GPULOAN_ACCESS_WRITE) return fail(GPULOAN_ERR_PROTOCOL, "EXPORT for write in a read chunk");
    import = it->second;
    if (import->single_use() && import->holds != 0) return fail(GPULOAN_ERR_PROTOCOL, "EXPORT names foreign memory of another loan");
  }
  std::shared_ptr<ImportLoan> loan;
  if (wire.request != 0) {
    const auto it = peer->requests.find(wire.request);
    if (it == peer->requests.end() || it->second->bytes != wire.bytes) return fail(GPULOAN_ERR_PROTOCOL, "EXPORT answers no open request");
    // A result is written, by the caller and not by the library's own proof of a rung.
    if (wire.access != GPULOAN_ACCESS_WRITE || (wire.flags & channel::ExportCanary) != 0) return fail(GPULOAN_ERR_PROTOCOL, "EXPORT answers a request with what no result can be written into");
    loan = it->second;
  } else {
    loan = std::make_shared<ImportLoan>(peer);
    ++loans_total_;
  }
  loan->id = wire.loan;
  loan->bytes = wire.bytes;
  loan->access = wire.access == GPULOAN_ACCESS_WRITE ? GPULOAN_ACCESS_WRITE : GPULOAN_ACCESS_READ;
  loan->memory = wire.memory == GPULOAN_MEMORY_HOST ? GPULOAN_MEMORY_HOST : GPULOAN_MEMORY_DEVICE;
  switch (wire.rung) {
    case GPULOAN_RUNG_VMM:
    case GPULOAN_RUNG_POOL:
    case GPULOAN_RUNG_IPC:
      loan->rung = static_cast<gpuloan_rung>(wire.rung);
      break;
    default:
      loan->rung = GPULOAN_RUNG_HOST;
  }
  loan->gate = wire.gate == GPULOAN_GATE_MEMOP ? GPULOAN_GATE_MEMOP : wire.gate == GPULOAN_GATE_EVENT ? GPULOAN_GATE_EVENT : GPULOAN_GATE_HOST;
  loan->carrier = import != nullptr || wire.bytes == 0 ? Carrier::Direct : Carrier::Ring;
  loan->slot = wire.slot;
  loan->generation = wire.generation;
  loan->event_index = wire.event;
  if (wire.gate == GPULOAN_GATE_EVENT) loan->events = peer->events[wire.event];
  loan->keep_open = (wire.flags & channel::ExportKeepOpen) != 0;
  loan->finish = !loan->keep_open;
  loan->canary_loan = (wire.flags & channel::ExportCanary) != 0;
  loan->canary = static_cast<gpuloan_canary>(std::min<std::uint32_t>(wire.canary, GPULOAN_CANARY_DEMOTED));
  loan->exposed_bytes = std::uint64_t{wire.exposed_kib} << 10;
  loan->step_ns[GPULOAN_STEP_EXPORT] = wire.export_ns;
  loan->step_ns[GPULOAN_STEP_READY] = wire.ready_ns;
  loan->metadata.assign(received.tail.begin(), received.tail.end());
  peer->loans.emplace(loan->id, loan); // from here on it is cancelled with the peer, should there be no memory for the rest
  peer->requests.erase(wire.request);
  loan->import = import;
  loan->offset = wire.offset;
  loan->turn = 1;
  loan->ready_posted = (wire.flags & channel::ExportReady) != 0;
  loan->state = step(ImportState::Requested, ImportEvent::Export).next;
  if (import != nullptr) ++import->holds;

  Trash trash;
  if (loan->carrier == Carrier::Ring) {
    if (auto buffer = prepare_buffer(*loan); !buffer) {
      cancel(*loan, buffer.error().status, buffer.error().text, trash);
      dispose(std::move(trash));
      return {};
    }
  }
  if (loan->pair() != nullptr && !loan->pair()->done) { // it crossed our refusal
    cancel(*loan, GPULOAN_ERR_UNSUPPORTED, "interprocess events do not work on the importer's side", trash);
    dispose(std::move(trash));
    return {};
  }
  if (loan->let_go) {
    cancel(*loan, GPULOAN_ERR_RETURNED, "returned before it was granted", trash);
    dispose(std::move(trash));
    return {};
  }
  if (loan->canary_loan) {
    completion_.run([self = std::static_pointer_cast<Importer>(shared_from_this()), loan] { self->answer_canary(loan); });
  } else if (wire.request == 0) {
    hold(loan->handle, loan); // the reference that the event brings to the caller
    push_event({GPULOAN_EVENT_LOAN_OFFERED, GPULOAN_OK, peer, loan, nullptr, ""});
  }
  notify();
  request_tick();
  return {};
}

void Importer::on_ready(ImporterPeer& peer, const channel::Turn& turn) {
  const auto it = peer.loans.find(turn.loan);
  if (it == peer.loans.end()) return; // it crossed our ACK
  ImportLoan& loan = *it->second;
  if (loan.ready_posted && turn.turn <= loan.turn) return; // its word was seen before the record
  if (loan.state == ImportState::Offered && turn.turn == loan.turn) { // turn 1, posted after EXPORT
    loan.ready_posted = true;
    loan.step_ns[GPULOAN_STEP_READY] = turn.at_ns;
  } else if (loan.state == ImportState::Idle) {
    loan.step_ns[GPULOAN_STEP_READY] = turn.at_ns;
    begin_turn(loan, turn.turn);
  } else { // the exporter saw our DONE before we did
    loan.next_turn = turn.turn;
    loan.step_ns[GPULOAN_STEP_READY] = turn.at_ns;
  }
  notify();
  request_tick();
}

// ---- Loss, ticks --------------------------------------------------------------------------------------------------

// The ACK of a loan that was let go of follows our GPU work on it, and so does what DONE stands for: the end of the socket would
// overtake the one with its reason, and say of the other that it never came. Not without end: the work may be stuck. Polls, as what ends
// on another thread does not wake a loop of the caller's.
void Importer::see_off(Lock& lock, Peer& base, const Deadline& deadline) {
  const auto& peer = static_cast<const ImporterPeer&>(base);
  const auto is_leaving = [](const auto& entry) { return entry.second->state == ImportState::Letting || entry.second->state == ImportState::Finishing; };
  static_cast<void>(wait(lock, deadline, true, [&] { return peer.lost || (peer.outbox.empty() && std::none_of(peer.loans.begin(), peer.loans.end(), is_leaving)); }));
}

void Importer::on_peer_lost(const std::shared_ptr<Peer>& base) {
  auto& peer = static_cast<ImporterPeer&>(*base);
  Trash trash;
  std::vector<std::shared_ptr<ImportLoan>> loans;
  for (const auto& [id, loan] : peer.loans) loans.push_back(loan);
  for (const auto& [id, loan] : peer.requests) loans.push_back(loan);
  for (const auto& loan : loans) cancel(*loan, GPULOAN_ERR_PEER_LOST, peer.loss.text, trash);
  for (const auto& [id, import] : std::map(peer.imports)) {
    if (import->holds == 0) drop_import(peer, import);
  }
  const bool told = peer.phase == Peer::Phase::Ready && !closed_ && !peer.closed; // not of one whose handle is gone
  if (told) push_event({GPULOAN_EVENT_PEER_LOST, peer.loss.status, base, nullptr, nullptr, peer.loss.text});
  dispose(std::move(trash));
}

std::uint64_t Importer::tick() {
  bool busy = false;
  for (const auto& base : std::vector(remembered_)) {
    ImporterPeer& peer = *base;
    pump(peer);
    Trash trash;
    settle_cancelled(peer, trash);
    busy |= settle_works(peer, trash);
    dispose(std::move(trash));
    busy |= (peer.from_exporter && peer.from_exporter->busy()) || (peer.to_exporter && peer.to_exporter->busy());
    for (const auto& [id, loan] : peer.loans) {
      busy |= loan->cancelled && loan->work;
      if (loan->gpu_wait && gate::reached(peer.words.load(loan->slot, gate::Word::Ready), loan->word())) release_wait(*loan);
      busy |= loan->gpu_wait.has_value();
      if (loan->state != ImportState::Offered || loan->ready_reported || loan->canary_loan) continue;
      auto passed = turn_passed(*loan);
      if (!passed || *passed) { // an error shows in acquire
        loan->ready_reported = true;
        push_event({GPULOAN_EVENT_LOAN_READY, GPULOAN_OK, base, loan, nullptr, ""});
      } else {
        busy |= loan->ready_posted;
      }
    }
    if (peer.lost && peer.loans.empty() && peer.limbo.empty() && !busy) std::erase(remembered_, base);
  }
  busy |= !options_.loop_thread && (completion_.pending() || apart_.pending());
  if (!busy) {
    tick_ns_ = kTickFirstNs;
    return kNever;
  }
  const std::uint64_t wait = tick_ns_;
  tick_ns_ = next_tick(tick_ns_);
  return wait;
}

void Importer::fill_stats(gpuloan_stats& stats) const {
  for (const auto& remembered : remembered_) {
    const ImporterPeer& peer = *remembered;
    stats.loans_out += peer.loans.size();
    for (const auto& [id, import] : peer.imports) {
      ++stats.chunks;
      if (import->mapped) stats.imported_bytes += import->bytes;
    }
  }
}

gpuloan_peer_info Importer::peer_info(ImporterPeer& peer) {
  const Lock lock(mutex_);
  gpuloan_peer_info info = {};
  info.size = sizeof info;
  info.pid = peer.pid;
  info.pidfd = peer.pidfd ? 1 : 0;
  info.lost = peer.lost ? 1 : 0;
  info.protocol = peer.version;
  info.has_device = peer.sees_device ? 1 : 0;
  info.loans_out = peer.loans.size();
  return info;
}

} // namespace gpuloan::loan
