// SPDX-License-Identifier: MIT
#include <loan/context.hpp>
#include <loan/loan.hpp>

#include <base/log.hpp>
#include <base/thread.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <new>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

namespace gpuloan::loan {
namespace {

constexpr std::uint64_t kLongestWaitNs = 1'000'000'000;
constexpr std::uint64_t kLoopSpinNs = 50'000;
constexpr int kQuickWaits = 2; // before the loop spins
constexpr std::uint64_t kTickShare = 19; // at most a twentieth of the loop's time goes into looking
constexpr std::uint64_t kTickPauseMaxNs = 50'000'000; // it took long because others had the CPU, then
constexpr std::uint64_t kRetryNs = 10'000'000; // of a turn that had no memory
constexpr std::uint64_t kPidfdBit = 1; // a peer's tag is even; the tag of its pidfd is the next odd number

void log_turn(const std::exception& error) noexcept {
  try {
    GPULOAN_LOG(GPULOAN_LOG_ERROR, std::string("a turn of the loop failed: ") + error.what());
  } catch (...) { // no memory for the line either
  }
  std::this_thread::sleep_for(std::chrono::nanoseconds(kRetryNs));
}

} // namespace

bool may_spin() noexcept {
  static const bool several = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    return ::sched_getaffinity(0, sizeof set, &set) != 0 || CPU_COUNT(&set) > 1;
  }();
  return several;
}

Context::Context(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu) : options_(options), gpu_(std::move(gpu)) {}

Context::~Context() = default;

// ---- The loop -----------------------------------------------------------------------------------------------------

Result<void> Context::start() {
  if (options_.loop_thread) {
    event_fd_ = UniqueFd::take(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!event_fd_) return fail_errno("eventfd", errno);
  }
  const bool ring_allowed = options_.loop_thread && options_.role == GPULOAN_ROLE_EXPORTER;
  const auto make = [this, ring_allowed]() -> Result<void> {
    auto choice = loop::make_engine(ring_allowed ? options_.engine : GPULOAN_ENGINE_EPOLL, ring_allowed);
    if (!choice) return forward(std::move(choice.error()));
    engine_ = std::move(choice->engine);
    engine_kind_ = engine_->kind();
    engine_reason_ = ring_allowed ? choice->reason
                                  : (options_.role == GPULOAN_ROLE_IMPORTER ? "an importer keeps its sockets out of io_uring"
                                                                            : "a caller-driven loop has a descriptor to poll");
    return {};
  };
  if (!options_.loop_thread) {
    GPULOAN_TRY(make());
    poll_fd_ = engine_->poll_fd();
    return {};
  }
  std::promise<Result<void>> made;
  auto future = made.get_future();
  loop_thread_ = start_thread("gpuloan-loop", [this, &made, make] { // an io_uring belongs to the thread that makes it
    Result<void> result;
    try {
      result = make();
    } catch (const std::bad_alloc&) {
      result = std::unexpected(out_of_memory());
    }
    const bool ok = result.has_value();
    loop_id_ = std::this_thread::get_id();
    made.set_value(std::move(result));
    if (ok) loop_main();
  });
  Result<void> result = future.get();
  if (!result) loop_thread_.join();
  return result;
}

void Context::loop_main() {
  while (!stopping_) {
    try {
      run_once(kLongestWaitNs);
    } catch (const std::exception& error) { // out of memory: what was due is looked at again in the next turn
      log_turn(error);
    }
  }
  try {
    run_tasks();
  } catch (const std::exception& error) {
    log_turn(error);
  }
  const Lock lock(mutex_); // others look at it to wake it
  engine_.reset();
}

void Context::run_once(std::uint64_t limit_ns) {
  std::uint64_t timeout = limit_ns;
  {
    const Lock lock(mutex_);
    if (!tasks_.empty() || next_task_ < running_.size() || leaving_) timeout = 0;
    if (timeout != 0 && tick_at_ns_ != kNever) {
      const std::uint64_t now = now_ns();
      timeout = std::min(timeout, tick_at_ns_ > now ? tick_at_ns_ - now : 0);
    }
    if (hot_until_ns_ != 0 && now_ns() < hot_until_ns_) timeout = 0;
    sleeping_ = timeout > kTickMaxNs;
    turn_messages_ = 0;
    turn_others_ = timeout == 0 && limit_ns != 0;
  }
  const auto waited = wait_in_engine(timeout);
  if (std::exchange(notify_later_, false)) changed_.notify_all();
  if (!waited) {
    GPULOAN_LOG(GPULOAN_LOG_ERROR, "the loop cannot wait: " + waited.error().text);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  sleeping_ = false;
  run_tasks();
  after_turn();
  const Lock lock(mutex_);
  if (leaving_) {
    take_out_lost();
    turn_others_ = true;
  }
  if (closed_) return;
  // A turn that brought an exporter records, and them alone, has done what there was to do.
  if (options_.role == GPULOAN_ROLE_EXPORTER && turn_messages_ > 0 && !turn_others_ && now_ns() < tick_at_ns_) return;
  if (std::exchange(any_stalled_, false)) {
    for (const auto& [tag, peer] : peers_) {
      if (std::exchange(peer->stalled, false) && !peer->lost) flush(peer);
    }
  }
  tick_at_ns_ = now_ns() + kTickMaxNs; // should the tick have no memory
  const std::uint64_t wanted = std::min(timed_tick(), any_stalled_ ? kTickMaxNs : kNever);
  tick_at_ns_ = wanted == kNever ? kNever : now_ns() + wanted;
}

// A peer that answers one record at once is spun for: sleeping and waking takes longer than its answer. Where many come together, or none
// for a while, the CPU is of more use to others.
Result<bool> Context::wait_in_engine(std::uint64_t timeout_ns) {
  struct Waiting {
    std::atomic<std::thread::id>& id;
    explicit Waiting(std::atomic<std::thread::id>& who) : id(who) { id = std::this_thread::get_id(); }
    ~Waiting() { id = std::thread::id(); }
  } const waiting(waiting_id_);
  if (timeout_ns == 0) return engine_->wait(0, *this);
  const std::uint64_t start = now_ns(), until = start + std::min(timeout_ns, kLoopSpinNs);
  Result<bool> came = false;
  if (quick_waits_ >= kQuickWaits && spins()) {
    do {
      came = engine_->wait(0, *this);
    } while (came && !*came && now_ns() < until);
  }
  if (came && !*came) came = engine_->wait(timeout_ns, *this);
  const bool cut_short = came && !*came && timeout_ns < kLoopSpinNs; // by the next tick: that says nothing
  if (turn_messages_ > 1 || (now_ns() >= until && !cut_short)) quick_waits_ = 0;
  else if (turn_messages_ == 1) quick_waits_ = std::min(quick_waits_ + 1, kQuickWaits);
  return came;
}

// A tick looks at everything that is out, so with thousands of loans it takes its time: what is left for the others stays
// several times that.
std::uint64_t Context::timed_tick() {
  const std::uint64_t start = now_ns();
  if (start < tick_not_before_ns_) return tick_not_before_ns_ - start;
  const std::uint64_t wanted = tick();
  const std::uint64_t end = now_ns();
  const std::uint64_t pause = end - start > kTickFirstNs / 2 ? std::min((end - start) * kTickShare, kTickPauseMaxNs) : 0;
  tick_not_before_ns_ = end + pause;
  return std::max(wanted, pause);
}

void Context::run_tasks() {
  if (next_task_ >= running_.size()) {
    const Lock lock(mutex_);
    running_.swap(tasks_);
    turn_others_ |= !running_.empty();
  }
  for (; next_task_ < running_.size(); ++next_task_) running_[next_task_]();
  running_.clear();
  next_task_ = 0;
}

void Context::turn_loop(Lock& lock, std::uint64_t limit_ns) {
  if (std::unique_lock turn(turn_mutex_, std::try_to_lock); turn) {
    struct Turning { // ends with the lock held, whatever the turn throws
      Lock& lock;
      std::thread::id& id;
      Turning(Lock& held, std::thread::id& who) : lock(held), id(who) {
        id = std::this_thread::get_id();
        lock.unlock();
      }
      ~Turning() {
        lock.lock();
        id = {};
      }
    };
    {
      const Turning turning(lock, turning_);
      run_once(limit_ns);
    }
    changed_.notify_all(); // who waits for the turn may take it
  } else {
    changed_.wait_for(lock, std::chrono::nanoseconds(std::min(limit_ns, kTickMaxNs)));
  }
}

void Context::post(std::function<void()> task) {
  tasks_.push_back(std::move(task));
  if (engine_ && !in_turn()) engine_->wake();
}

void Context::request_tick() {
  tick_ns_ = kTickFirstNs;
  tick_at_ns_ = std::min(tick_at_ns_, now_ns() + kTickFirstNs);
  if (sleeping_ && engine_ && !in_turn()) engine_->wake();
}

void Context::stop_loop() noexcept {
  stopping_ = true;
  if (loop_thread_.joinable()) {
    {
      const Lock lock(mutex_);
      if (engine_) engine_->wake();
    }
    loop_thread_.join();
  } else if (engine_) {
    const std::lock_guard turn(turn_mutex_);
    try {
      run_tasks();
    } catch (const std::exception& error) {
      log_turn(error);
    }
    engine_.reset();
  }
}

Result<void> Context::dispatch(std::uint32_t timeout_ms) {
  if (options_.loop_thread) return fail(GPULOAN_ERR_STATE, "this context has a loop thread: gpuloan_context_dispatch is for GPULOAN_LOOP_CALLER");
  Lock lock(mutex_);
  turn_loop(lock, std::uint64_t{timeout_ms} * 1'000'000U);
  return {};
}

// ---- Peers --------------------------------------------------------------------------------------------------------

std::shared_ptr<Peer> Context::find_peer(std::uint64_t tag) {
  const auto it = peers_.find(tag & ~kPidfdBit);
  return it == peers_.end() ? nullptr : it->second;
}

Result<void> Context::add_peer(const std::shared_ptr<Peer>& peer) {
  peer->tag = next_tag_;
  next_tag_ += 2;
  const auto known = peers_.emplace(peer->tag, peer).first;
  auto enter = [this, peer] {
    const Lock lock(mutex_);
    if (peer->lost) return;
    if (auto added = engine_->add_socket(peer->socket.get(), peer->tag); !added) {
      lose(peer, std::move(added.error()));
      return;
    }
    peer->in_loop = true;
  };
  try {
    post(std::move(enter));
  } catch (...) {
    peers_.erase(known);
    throw;
  }
  return {};
}

void Context::watch_pidfd(Peer& peer) {
  if (!peer.pidfd) return;
  if (auto added = engine_->add_readable(peer.pidfd.get(), peer.tag | kPidfdBit); !added) {
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "cannot watch a peer's pidfd: " + added.error().text);
    return;
  }
  peer.pidfd_in_loop = true;
}

Error Context::loss(const char* why) noexcept {
  Error error{GPULOAN_ERR_PEER_LOST, ""};
  try {
    error.text = why;
  } catch (const std::bad_alloc&) {
  }
  return error;
}

// Does not throw: settle_loss(), and leaving the loop, are tried again by the loop.
void Context::lose(const std::shared_ptr<Peer>& peer, Error why) {
  if (peer->lost) return;
  peer->lost = true;
  peer->loss = std::move(why);
  peer->outbox.clear();
  if (peer->socket) ::shutdown(peer->socket.get(), SHUT_RDWR);
  leaving_ = true;
  if (engine_ && !on_loop_thread()) engine_->wake();
  try {
    settle_loss(peer);
  } catch (const std::bad_alloc&) {
  }
}

void Context::settle_loss(const std::shared_ptr<Peer>& peer) {
  GPULOAN_LOG(GPULOAN_LOG_INFO, "peer lost: " + peer->loss.text);
  on_peer_lost(peer);
  peer->loss_settled = true;
  notify();
}

void Context::take_out_lost() {
  for (auto it = peers_.begin(); it != peers_.end();) {
    const std::shared_ptr<Peer> peer = it->second;
    if (peer->lost && !peer->loss_settled) settle_loss(peer);
    if (!peer->lost || peer->taken_out) {
      ++it;
      continue;
    }
    if (peer->in_loop) engine_->remove(peer->socket.get());
    peer->in_loop = false;
    peer->socket.reset();
    peer->taken_out = true;
    if (peer->pidfd_in_loop && !awaits_death(*peer)) {
      engine_->remove(peer->pidfd.get());
      peer->pidfd_in_loop = false;
    }
    it = peer->pidfd_in_loop ? std::next(it) : peers_.erase(it);
  }
  leaving_ = std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) { return entry.second->lost && !entry.second->taken_out; });
}

void Context::no_memory_for(std::uint64_t tag) {
  const Lock lock(mutex_);
  if (const std::shared_ptr<Peer> peer = find_peer(tag); peer != nullptr) lose(peer, out_of_memory());
}

void Context::close_peer(const std::shared_ptr<Peer>& peer) noexcept {
  std::shared_ptr<void> last;
  Lock lock(mutex_);
  if (!closed_) {
    try {
      see_off(lock, *peer, Deadline::after_ms(kSeeOffMs));
    } catch (const std::exception& error) {
      log_turn(error);
    }
  }
  if (!closed_) {
    if (!peer->lost && peer->phase == Peer::Phase::Ready) {
      channel::Record bye = channel::make_record(channel::Type::Bye);
      bye.notice.status = GPULOAN_OK;
      try {
        send(*peer, bye);
      } catch (const std::bad_alloc&) { // the end of the socket says it too
      }
    }
    lose(peer, loss("the connection was closed on this side"));
    forget_peer(*peer);
  }
  peer->closed = true;
  last = drop(peer->handle);
}

// ---- Sending ------------------------------------------------------------------------------------------------------

bool Context::send(Peer& peer, channel::Record record, std::span<const std::byte> tail, std::vector<UniqueFd> fds) try {
  if (peer.lost) return false;
  if (peer.version != 0) channel::set_version(record, peer.version);
  if (bundled_ == &peer) {
    if (fds.empty() && bundle_.add(record, tail)) return true;
    send_bundle();
    if (fds.empty() && bundle_.add(record, tail)) return true;
    if (peer.lost) return false;
  }
  if (peer.outbox.empty() && fds.empty()) { // without a copy
    switch (channel::send_record(peer.socket.get(), record, tail)) {
      case channel::SendResult::Sent:
        return true;
      case channel::SendResult::Lost:
        ::shutdown(peer.socket.get(), SHUT_RDWR); // as in send_now
        return false;
      case channel::SendResult::Full:
        break;
    }
  }
  const std::size_t count = fds.size();
  return send_now(peer, channel::message_of(record, tail, count), std::move(fds));
} catch (const std::bad_alloc&) { // a record that is not sent may be waited for
  lose(peer.shared_from_this(), out_of_memory());
  return false;
}

bool Context::send_now(Peer& peer, std::span<const std::byte> message, std::vector<UniqueFd> fds) {
  if (peer.outbox.empty()) {
    std::vector<int> raw;
    for (const UniqueFd& fd : fds) raw.push_back(fd.get());
    switch (channel::send_message(peer.socket.get(), message, raw)) {
      case channel::SendResult::Sent:
        return true;
      case channel::SendResult::Lost: // the loop sees the end of the socket, after what the peer still sent
        ::shutdown(peer.socket.get(), SHUT_RDWR); // where the other end lives, a gap in what it is told would go unnoticed
        return false;
      case channel::SendResult::Full:
        break;
    }
  }
  const auto it = peers_.find(peer.tag);
  if (it == peers_.end()) return false;
  if (peer.outbox.size() >= Peer::kOutboxMax) {
    lose(it->second, Error{GPULOAN_ERR_PROTOCOL, "the peer does not read: " + std::to_string(Peer::kOutboxMax) + " messages wait for it"});
    return false;
  }
  peer.outbox.push_back({{message.begin(), message.end()}, std::move(fds)});
  if (peer.outbox.size() == 1) {
    post([this, self = it->second] {
      const Lock lock(mutex_);
      if (self->in_loop) static_cast<void>(engine_->want_writable(self->socket.get()));
    });
  }
  return true;
}

void Context::send_bundle() {
  if (bundle_.bytes().empty()) return;
  if (!bundled_->lost) send_now(*bundled_, bundle_.bytes(), {});
  bundle_.clear();
}

void Context::end_bundle() noexcept {
  try {
    if (bundled_ != nullptr) send_bundle();
  } catch (const std::bad_alloc&) { // a gap in what it is told would go unnoticed
    bundle_.clear();
    if (!bundled_->lost) ::shutdown(bundled_->socket.get(), SHUT_RDWR);
  }
  bundled_ = nullptr;
}

void Context::send_text(Peer& peer, channel::Record record, std::string_view text) {
  text = text.substr(0, GPULOAN_TEXT_MAX - 1);
  send(peer, record, std::as_bytes(std::span(text.data(), text.size())));
}

void Context::flush(const std::shared_ptr<Peer>& peer) {
  while (!peer->outbox.empty()) {
    Outgoing& first = peer->outbox.front();
    std::vector<int> raw;
    for (const UniqueFd& fd : first.fds) raw.push_back(fd.get());
    const channel::SendResult result = channel::send_message(peer->socket.get(), first.message, raw);
    if (result == channel::SendResult::Full) {
      // With descriptors it may be the user's limit of descriptors in flight: the socket would be writable all along.
      if (first.fds.empty()) static_cast<void>(engine_->want_writable(peer->socket.get()));
      else any_stalled_ = peer->stalled = true;
      return;
    }
    if (result == channel::SendResult::Lost) ::shutdown(peer->socket.get(), SHUT_RDWR); // as above
    peer->outbox.pop_front();
  }
}

// ---- What the engine calls ----------------------------------------------------------------------------------------

void Context::on_message(std::uint64_t tag, const loop::Message& message) {
  try {
    auto received = channel::decode(message); // takes the descriptors, whatever comes next
    const Lock lock(mutex_);
    ++turn_messages_;
    const std::shared_ptr<Peer> peer = find_peer(tag);
    if (peer == nullptr || peer->lost) return;
    if (!received) {
      lose(peer, std::move(received.error()));
      return;
    }
    if (!received->rest.empty() && (!peer->takes_bundles || peer->phase != Peer::Phase::Ready)) {
      lose(peer, Error{GPULOAN_ERR_PROTOCOL, "several records in one message, in the handshake or without the feature"});
      return;
    }
    if (!received->rest.empty()) ++turn_messages_;
    const Bundling answers(*this, *peer);
    for (;;) {
      on_record(peer, *received);
      if (received->rest.empty() || peer->lost) return;
      received = channel::decode_next(received->rest);
      if (received) continue;
      lose(peer, std::move(received.error()));
      return;
    }
  } catch (const std::bad_alloc&) {
    no_memory_for(tag);
  }
}

void Context::on_closed(std::uint64_t tag, int error) {
  try {
    const Lock lock(mutex_);
    turn_others_ = true;
    const std::shared_ptr<Peer> peer = find_peer(tag);
    if (peer == nullptr || peer->lost) return;
    lose(peer, Error{GPULOAN_ERR_PEER_LOST, error == 0 ? "the peer closed its socket or died" : errno_text("the peer's socket", error)});
  } catch (const std::bad_alloc&) {
    no_memory_for(tag);
  }
}

void Context::on_readable(std::uint64_t tag) {
  const Lock lock(mutex_);
  turn_others_ = true;
  if (tag == kListenerTag) {
    on_listener();
    return;
  }
  const std::shared_ptr<Peer> peer = find_peer(tag);
  if (peer == nullptr) return;
  on_peer_dead(peer);
  // What it sent before it died still counts, and the end of its socket comes after that. A socket that a grandchild keeps
  // open never ends, so the peer is lost here at the latest.
  if (!peer->lost) {
    post([this, peer] {
      if (peer->in_loop) static_cast<void>(engine_->drain(peer->socket.get(), *this));
      const Lock inner(mutex_);
      lose(peer, Error{GPULOAN_ERR_PEER_LOST, "the peer's process is gone"});
    });
  }
  engine_->remove(peer->pidfd.get()); // last: where there was no memory, it fires again
  peer->pidfd_in_loop = false;
  if (peer->taken_out) peers_.erase(peer->tag);
}

void Context::on_writable(std::uint64_t tag) {
  try {
    const Lock lock(mutex_);
    turn_others_ = true;
    if (const std::shared_ptr<Peer> peer = find_peer(tag); peer != nullptr && !peer->lost) flush(peer);
  } catch (const std::bad_alloc&) {
    no_memory_for(tag);
  }
}

// ---- Stats --------------------------------------------------------------------------------------------------------

gpuloan_stats Context::stats() {
  const Lock lock(mutex_);
  gpuloan_stats stats = {};
  stats.size = sizeof stats;
  stats.engine = engine_kind_;
  stats.loans_total = loans_total_;
  stats.loans_failed = loans_failed_;
  stats.copied_bytes = copied_bytes_;
  stats.gpu_waits = gpu_waits_;
  for (const auto& [tag, peer] : peers_) stats.peers += !peer->lost && peer->phase == Peer::Phase::Ready ? 1U : 0U;
  engine_reason_.copy(stats.engine_reason, GPULOAN_TEXT_MAX - 1);
  const std::string driver = gpu_ ? gpu_->driver().describe() : "no driver: host memory only";
  driver.copy(stats.driver_text, GPULOAN_TEXT_MAX - 1);
  fill_stats(stats);
  return stats;
}

} // namespace gpuloan::loan
