// SPDX-License-Identifier: MIT
//
// Context: what both sides have in common: the loop that drives the connections, the lock, the queue of events, the
// device, and the ways to wait.
//
//   loop.cpp     who turns the loop, how long it waits, and ticks
//   context.cpp  peers: they come, what they send is received, and they are lost or closed
//   send.cpp     records on their way out
//   rings.cpp    the host rung's rings, as far as both ends do the same
//   events.cpp   what the caller is told, and the names that it has for peers, loans and regions
//
// Threads. With a loop thread, that thread makes, uses and destroys the engine; callers' threads enter through the lock
// and send on the sockets themselves. Without one, whichever thread is in dispatch() or in a waiting call turns the
// loop, one at a time. `mutex_` guards everything below it, and the peers and loans; no driver call that can block on a
// caller's stream is made while it is held. Work for the engine is posted as tasks, which run on the loop without the lock.
#pragma once

#include <base/clock.hpp>
#include <base/fork.hpp>
#include <channel/handshake.hpp>
#include <driver/handles.hpp>
#include <loan/patience.hpp>
#include <loan/peer.hpp>
#include <loop/engine.hpp>
#include <memory/import_limit.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

namespace gpuloan::loan {

class Loan;
class Request;

struct ContextOptions {
  gpuloan_role role = GPULOAN_ROLE_EXPORTER;
  bool loop_thread = true;
  bool spin = true; // before a wait sleeps
  gpuloan_engine engine = GPULOAN_ENGINE_AUTO;
  std::uint32_t rungs = GPULOAN_RUNG_VMM | GPULOAN_RUNG_IPC | GPULOAN_RUNG_HOST;
  gpuloan_gate gate = GPULOAN_GATE_AUTO;
  std::uint32_t gpu_wait_limit = 4;
  std::uint32_t slots = 16384;
  std::uint32_t canary_timeout_ms = 2000;
  std::uint64_t idle_bytes = std::uint64_t{1} << 30;
  std::uint64_t account_bytes = 0;
  memory::ImportLimit pool_import_limit;
};

struct Event {
  gpuloan_event_type type = GPULOAN_EVENT_NONE;
  gpuloan_status status = GPULOAN_OK;
  std::shared_ptr<Peer> peer;
  std::shared_ptr<Loan> loan;
  std::shared_ptr<Request> request;
  std::string text;
};

inline constexpr std::uint64_t kTickFirstNs = 50'000; // of polling words that a GPU writes
inline constexpr std::uint64_t kTickMaxNs = 1'000'000;
inline constexpr std::uint64_t kNever = UINT64_MAX;
inline constexpr std::uint32_t kSeeOffMs = 1000;  // of a connection that this side closes
inline constexpr std::uint32_t kDisposeMs = 1000; // for close(); what takes longer is left to the reaper
// A quarter more each time: what is polled is seen after at most a quarter more than it took.
[[nodiscard]] constexpr std::uint64_t next_tick(std::uint64_t ns) noexcept { return std::min(ns + ns / 4, kTickMaxNs); }

class Context : public std::enable_shared_from_this<Context>, protected loop::Handler {
 public:
  using Lock = std::unique_lock<std::mutex>;

  virtual ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  [[nodiscard]] Result<void> start(); // makes the engine, starts the thread
  virtual void close() noexcept = 0;  // ends everything; idempotent
  [[nodiscard]] int fd() noexcept;
  [[nodiscard]] Result<void> dispatch(std::uint32_t timeout_ms);
  [[nodiscard]] Result<Event> next_event(std::uint32_t timeout_ms);
  void put_back(Event event); // one that could not be handed to the caller
  [[nodiscard]] Result<void> wait_end(const Loan& loan, std::uint32_t timeout_ms);
  [[nodiscard]] gpuloan_stats stats();
  [[nodiscard]] gpuloan_peer_info peer_info(const Peer& peer);
  [[nodiscard]] const ContextOptions& options() const noexcept { return options_; }
  [[nodiscard]] const std::shared_ptr<driver::Gpu>& gpu() const noexcept { return gpu_; }
  void close_peer(const std::shared_ptr<Peer>& peer) noexcept;
  // Lock held. A reference of the caller's; the last drop returns the object, to be destroyed without the lock.
  void hold(Handle& handle, std::shared_ptr<void> self) noexcept;
  [[nodiscard]] std::shared_ptr<void> drop(Handle& handle) noexcept;
  // Lock held. The caller dropped its last reference: events that name the loan are not delivered any more.
  void forget_events(Loan& loan) noexcept;
  [[nodiscard]] std::mutex& mutex() noexcept { return mutex_; }
  [[nodiscard]] bool forked() const noexcept { return fork_generation_ != fork_generation(); }

 protected:
  Context(const ContextOptions& options, std::shared_ptr<driver::Gpu> gpu);

  // Waits until `done()` (called with the lock) or the deadline; false on the latter. `polls`: done() looks at words
  // that a GPU writes, which wakes nobody.
  template <typename Done>
  [[nodiscard]] bool wait(Lock& lock, const Deadline& deadline, bool polls, Done done);
  // The same for a word of the loan's: spins first, and lets the other side know, so that it need not send a record.
  template <typename AnyLoan, typename Done>
  [[nodiscard]] bool wait_turn(Lock& lock, const Deadline& deadline, AnyLoan& loan, gate::Word word, Done done);

  void notify() noexcept; // lock held; of a change that somebody may wait for. What one wait of the loop brought is told at its end
  void post(std::function<void()> task); // lock held; the task runs on the loop, without the lock
  void push_event(Event event);          // lock held
  void push_ended(const std::shared_ptr<Loan>& loan) noexcept; // lock held; LOAN_ENDED, or the loss of the peer where there is no memory
  // Lock held. Sends now or, where the socket is full, later and in order; false when the other end is gone. A peer that
  // does not read is dropped.
  bool send(Peer& peer, channel::Record record, std::span<const std::byte> tail = {}, std::vector<UniqueFd> fds = {});
  // Lock held, from here to its end: what is sent to this peer meanwhile leaves in as few messages as it takes. Nothing waits in it when
  // the lock is dropped.
  class Bundling {
   public:
    Bundling(Context& context, Peer& peer) noexcept : context_(context) { context.bundled_ = peer.takes_bundles ? &peer : nullptr; }
    Bundling(const Bundling&) = delete;
    Bundling& operator=(const Bundling&) = delete;
    ~Bundling() { context_.end_bundle(); }

   private:
    Context& context_;
  };
  void send_text(Peer& peer, channel::Record record, std::string_view text);
  void send_turn(const Loan& loan, channel::Type type, std::uint64_t at_ns); // READY or DONE
  // Lock held, as for the next one. Moves the copies of the rings along, and tells the other end.
  [[nodiscard]] Result<void> move_rings(Peer& peer, memory::RingSource::Progress& source, memory::RingSink::Progress& sink);
  // RING_FILLED or RING_DRAINED came. `refused`: there may be no such ring on this side.
  [[nodiscard]] Result<void> on_ring_moved(Peer& peer, const channel::Record& record, bool refused);
  // Lock held. Takes the peer out of the loop and closes its socket; on_peer_lost follows at once.
  void lose(const std::shared_ptr<Peer>& peer, Error why);
  [[nodiscard]] static Error loss(const char* why) noexcept; // PEER_LOST; without the text where there is no memory for it
  [[nodiscard]] Result<void> add_peer(const std::shared_ptr<Peer>& peer); // lock held; into the loop, as a task
  void forget_peer(Peer& peer) noexcept; // lock held; its caller has no name for it (any more), so no event names it
  // Lock held. The same for its loans, which their events alone name; the objects are to be destroyed without the lock.
  [[nodiscard]] std::vector<std::shared_ptr<void>> forget_loans(const Peer& peer);
  void watch_pidfd(Peer& peer);
  // For the handshake: the device that we work on, then others that we see, and whether it reaches their memory.
  [[nodiscard]] std::vector<channel::DeviceEntry> device_entries(std::size_t max) const;
  // Lock held; the loop looks again soon. Later where who is concerned most likely looks itself meanwhile: the loop's turns are in its way.
  void request_tick(std::uint64_t first_ns = kTickFirstNs);
  void stop_loop() noexcept;         // no callback runs afterwards
  static void log_turn(const std::exception& error) noexcept; // of a turn that had no memory; pauses
  // Lock held. Events and handles end with the context; the objects are to be destroyed without the lock.
  struct EndAll {
    void operator()(Handle* first) const noexcept;
  };
  struct Cleared {
    std::unique_ptr<Handle, EndAll> handles; // the first of them
    std::vector<std::function<void()>> tasks; // posted after the loop ended; they name peers
  };
  [[nodiscard]] Cleared clear_handles() noexcept;
  [[nodiscard]] bool spins() const noexcept { return options_.spin && may_spin(); }
  [[nodiscard]] bool on_loop_thread() const noexcept { return std::this_thread::get_id() == loop_id_.load(); }
  // Whoever is called back from the wait of the loop: what it asks for is looked at in the same turn, and wakes nobody.
  [[nodiscard]] bool in_turn() const noexcept { return on_loop_thread() || std::this_thread::get_id() == waiting_id_.load(); }

  // Lock held, on the loop.
  // A record in the handshake, and after it. An Error: it broke the protocol, and the peer is lost with it.
  [[nodiscard]] virtual Result<void> shake(const std::shared_ptr<Peer>& peer, channel::Received& received) = 0;
  [[nodiscard]] virtual Result<void> handle(const std::shared_ptr<Peer>& peer, channel::Received& received) = 0;
  virtual void on_peer_lost(const std::shared_ptr<Peer>& peer) = 0;
  virtual void see_off(Lock&, Peer&, const Deadline&) {} // lock held, and dropped meanwhile: this side closes the connection
  virtual void on_listener() {}
  virtual void on_peer_dead(const std::shared_ptr<Peer>&) {} // its pidfd fired
  [[nodiscard]] virtual bool awaits_death(const Peer&) const { return false; } // keep watching a lost peer's pidfd
  // Polls what a GPU writes and moves copies along. Returns the nanoseconds after which it wants to be called again.
  [[nodiscard]] virtual std::uint64_t tick() = 0;
  virtual void after_turn() {} // no lock held; each turn of the loop
  virtual void fill_stats(gpuloan_stats& stats) const = 0;
  virtual void fill_peer_info(const Peer& peer, gpuloan_peer_info& info) const = 0;

  static constexpr std::uint64_t kListenerTag = 0;
  const ContextOptions options_;
  const std::shared_ptr<driver::Gpu> gpu_; // null: no device
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  std::map<std::uint64_t, std::shared_ptr<Peer>> peers_; // by tag
  std::unique_ptr<loop::Engine> engine_;                 // the loop's
  std::uint64_t loans_total_ = 0, loans_failed_ = 0, copied_bytes_ = 0;
  std::uint32_t gpu_waits_ = 0;
  std::uint64_t hot_until_ns_ = 0;       // caller-driven: the loop does not sleep before that, since a completion is near
  std::uint64_t tick_ns_ = kTickFirstNs; // the present interval; grows while nothing moves

 private:
  void on_message(std::uint64_t tag, const loop::Message& message) final;
  void on_closed(std::uint64_t tag, int error) final;
  void on_readable(std::uint64_t tag) final;
  void on_writable(std::uint64_t tag) final;
  void loop_main();
  void run_once(std::uint64_t limit_ns);
  [[nodiscard]] Result<bool> wait_in_engine(std::uint64_t timeout_ns);
  void turn_loop(Lock& lock, std::uint64_t limit_ns); // caller-driven
  std::uint64_t timed_tick(); // lock held
  void run_tasks();
  void flush(const std::shared_ptr<Peer>& peer);
  bool send_now(Peer& peer, std::span<const std::byte> message, std::vector<UniqueFd> fds);
  void send_bundle();
  void end_bundle() noexcept;
  void settle_loss(const std::shared_ptr<Peer>& peer); // lock held
  void take_out_lost();                                // lock held, on the loop
  void no_memory_for(std::uint64_t tag);               // no lock held; what the peer said is lost, so the peer is
  [[nodiscard]] Event& event_of(std::uint64_t number) noexcept { return events_[number - first_event_]; } // lock held, as for the next three
  void name_event(std::uint64_t number) noexcept;
  [[nodiscard]] Event take_event(std::uint64_t number) noexcept;
  void drop_empty_events() noexcept;
  void signal_events() noexcept; // lock held; event_fd_ is readable while events wait
  [[nodiscard]] std::shared_ptr<Peer> find_peer(std::uint64_t tag);

  Peer* bundled_ = nullptr; // what goes to it goes into bundle_
  channel::Bundle bundle_;
  UniqueFd event_fd_; // with a loop thread
  bool signalled_ = false;
  bool fd_wanted_ = false;    // nobody polls what nobody asked for
  bool notify_later_ = false; // the loop's
  int poll_fd_ = -1;
  std::deque<Event> events_; // the first one is never empty
  std::uint64_t first_event_ = std::uint64_t{1} << 32; // its number
  std::size_t empty_events_ = 0;
  Handle* held_ = nullptr;
  std::vector<std::function<void()>> tasks_;
  std::vector<std::function<void()>> running_; // the loop's: one that threw comes first in the next turn
  std::size_t next_task_ = 0;
  bool leaving_ = false; // a lost peer is still in the loop
  std::thread loop_thread_;
  std::atomic<std::thread::id> loop_id_{};
  std::atomic<std::thread::id> waiting_id_{}; // in engine_->wait
  std::mutex turn_mutex_; // caller-driven: who turns the loop
  std::thread::id turning_; // lock held
  std::atomic<bool> stopping_{false};
  std::atomic<bool> sleeping_{false}; // the loop waits for longer than a tick
  std::uint64_t tick_at_ns_ = kNever; // when the loop looks next
  std::uint32_t turn_messages_ = 0;   // the present turn of the loop brought records
  bool turn_others_ = false;          // and something else, or is a look that was asked for
  int quick_waits_ = 0;               // the last ones that were short and brought one record each: another is likely to follow as soon
  bool any_stalled_ = false;          // of the peers
  std::uint64_t tick_not_before_ns_ = 0;
  gpuloan_engine engine_kind_ = GPULOAN_ENGINE_EPOLL;
  std::string engine_reason_;
  std::uint64_t next_tag_ = 2;
  const std::uint32_t fork_generation_ = fork_generation();
};

inline void pause_cpu() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Done>
bool Context::wait(Lock& lock, const Deadline& deadline, bool polls, Done done) {
  if (done()) return true;
  std::uint64_t nap = kTickFirstNs;
  while (!deadline.passed() && !closed_) {
    const std::uint64_t left = deadline.left_ns();
    const std::uint64_t pause = polls ? std::min(left, nap) : left;
    if (options_.loop_thread) {
      changed_.wait_for(lock, std::chrono::nanoseconds(pause));
    } else {
      turn_loop(lock, pause);
    }
    if (done()) return true;
    nap = next_tick(nap);
  }
  return done();
}

template <typename AnyLoan, typename Done>
bool Context::wait_turn(Lock& lock, const Deadline& deadline, AnyLoan& loan, gate::Word word, Done done) {
  loan.spun = false;
  if (done()) return true;
  const std::uint64_t start = now_ns();
  const Patience::Plan plan = spins() ? loan.patience.plan() : Patience::Plan{0, 0};
  if (plan.sleep_ns != 0 && wait(lock, Deadline::at(std::min(start + plan.sleep_ns, deadline.at_ns())), true, done)) {
    loan.patience.waited(now_ns() - start);
    return true;
  }
  const std::uint64_t until = std::min(start + plan.sleep_ns + plan.spin_ns, deadline.at_ns());
  const std::uint32_t slot = loan.slot;
  const bool watches = loan.id != 0; // else it has no slot yet
  bool over = false;
  struct Watch { // ends whatever done() throws
    const gate::Words& words;
    std::uint32_t slot;
    gate::Word word;
    bool on;
    void set(bool to) const {
      if (on && words) words.watch(slot, word, to); // a lost peer's words are gone
    }
    ~Watch() { set(false); }
  };
  std::optional<Watch> watch(Watch{loan.peer->words, slot, word, watches});
  watch->set(true);
  const gate::Words::Look look = watches ? loan.peer->words.look(slot, word) : gate::Words::Look();
  while (!over && !closed_ && now_ns() < until) {
    const std::uint64_t seen = look.load();
    bool same = true;
    lock.unlock();
    for (int pauses = 0; same && pauses < 8; ++pauses) {
      pause_cpu();
      same = look.load() == seen;
    }
    lock.lock();
    if (same && !options_.loop_thread) turn_loop(lock, 0);
    over = done();
  }
  loan.spun = over;
  watch.reset();
  if (!over) over = wait(lock, deadline, true, done); // looks once more first
  loan.patience.waited(now_ns() - start);
  return over;
}

} // namespace gpuloan::loan
