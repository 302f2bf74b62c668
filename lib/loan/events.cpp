// SPDX-License-Identifier: MIT
//
// Context: what its caller is told, and the names that the caller has for peers, loans and regions. An event waits until it is taken, or
// until the caller drops the last name of what it is about.
#include <loan/context.hpp>
#include <loan/loan.hpp>

#include <algorithm>
#include <cerrno>
#include <unistd.h>

namespace gpuloan::loan {
namespace {

constexpr std::size_t kRefusalsMax = 64; // events of refused connections that may wait: they need no key
constexpr std::size_t kEmptyEventsMax = 64;

bool of_turn(const Event& event) noexcept { return event.type == GPULOAN_EVENT_LOAN_READY || event.type == GPULOAN_EVENT_LOAN_DONE; }

} // namespace

void Context::push_event(Event event) {
  if (event.loan && !event.loan->handle.held()) return; // nobody could name it
  if (of_turn(event) && event.loan->turn_event_queued) return;
  if (event.type == GPULOAN_EVENT_PEER_REFUSED &&
      std::count_if(events_.begin(), events_.end(), [](const Event& other) { return other.type == GPULOAN_EVENT_PEER_REFUSED; }) >= static_cast<std::ptrdiff_t>(kRefusalsMax)) {
    return;
  }
  try {
    events_.push_back(std::move(event));
    name_event(first_event_ + events_.size() - 1);
  } catch (const std::bad_alloc&) { // nobody may wait for what is not told: the end of the connection is, as soon as there is memory
    if (!event.peer || event.peer->lost) throw;
    lose(event.peer, out_of_memory());
  }
  signal_events();
  notify();
}

void Context::push_ended(const std::shared_ptr<Loan>& loan) noexcept {
  try {
    push_event({GPULOAN_EVENT_LOAN_ENDED, loan->outcome, loan->peer, loan, nullptr, loan->outcome_text});
  } catch (const std::bad_alloc&) {
    lose(loan->peer, out_of_memory());
  }
}

// Every event has a number, the next one's is one more, and a loan knows those of its events: they are found among thousands.
void Context::name_event(std::uint64_t number) noexcept {
  const Event& event = event_of(number);
  if (of_turn(event)) event.loan->turn_event_queued = true;
  if (event.loan) event.loan->events[event.loan->events_queued++] = number;
}

// Leaves an empty event, unless it is the first one: that one never is.
Event Context::take_event(std::uint64_t number) noexcept {
  Event event = std::exchange(event_of(number), {});
  if (of_turn(event)) event.loan->turn_event_queued = false;
  if (event.loan) {
    auto& named = event.loan->events;
    const auto end = named.begin() + event.loan->events_queued--;
    const auto mine = std::find(named.begin(), end, number);
    std::copy(mine + 1, end, mine);
  }
  ++empty_events_;
  while (!events_.empty() && events_.front().type == GPULOAN_EVENT_NONE) {
    events_.pop_front();
    ++first_event_;
    --empty_events_;
  }
  return event;
}

// Nobody may ever take the first one.
void Context::drop_empty_events() noexcept {
  if (empty_events_ < kEmptyEventsMax || empty_events_ < events_.size() / 2) return;
  std::erase_if(events_, [](const Event& event) { return event.type == GPULOAN_EVENT_NONE; });
  empty_events_ = 0;
  for (const Event& event : events_) {
    if (event.loan) event.loan->events_queued = 0;
  }
  for (std::size_t at = 0; at < events_.size(); ++at) name_event(first_event_ + at);
}

void Context::forget_events(Loan& loan) noexcept {
  while (loan.events_queued > 0) static_cast<void>(take_event(loan.events[0]));
  drop_empty_events();
  signal_events();
}

void Context::forget_peer(Peer& peer) noexcept {
  peer.closed = true;
  for (std::uint64_t next = first_event_, end = next + events_.size(); next != end; ++next) {
    if (next >= first_event_ && event_of(next).peer.get() == &peer && event_of(next).loan == nullptr) static_cast<void>(take_event(next));
  }
  signal_events();
}

std::vector<std::shared_ptr<void>> Context::forget_loans(const Peer& peer) {
  std::vector<std::shared_ptr<void>> last;
  last.reserve(events_.size());
  for (std::uint64_t next = first_event_, end = next + events_.size(); next != end; ++next) {
    if (next < first_event_ || event_of(next).loan == nullptr || event_of(next).loan->peer.get() != &peer) continue;
    const Event event = take_event(next);
    if (event.type != GPULOAN_EVENT_LOAN_OFFERED) continue;
    if (auto loan = drop(event.loan->handle)) last.push_back(std::move(loan));
  }
  signal_events();
  return last;
}

void Context::notify() noexcept {
  if (std::this_thread::get_id() == waiting_id_.load()) {
    notify_later_ = true;
    return;
  }
  changed_.notify_all();
  if (turning_ != std::thread::id() && turning_ != std::this_thread::get_id() && engine_) engine_->wake(); // it does not look at changed_
}

int Context::fd() noexcept {
  if (!options_.loop_thread) return poll_fd_;
  const Lock lock(mutex_);
  fd_wanted_ = true;
  signal_events();
  return event_fd_.get();
}

void Context::signal_events() noexcept {
  if (!options_.loop_thread || !fd_wanted_ || signalled_ == !events_.empty()) return;
  signalled_ = !events_.empty();
  std::uint64_t count = 1;
  static_cast<void>(signalled_ ? ::write(event_fd_.get(), &count, sizeof count) : ::read(event_fd_.get(), &count, sizeof count));
}

void Context::hold(Handle& handle, std::shared_ptr<void> self) noexcept {
  if (!handle.self_) {
    handle.self_ = std::move(self);
    handle.next_ = held_;
    handle.link_ = &held_;
    if (held_ != nullptr) held_->link_ = &handle.next_;
    held_ = &handle;
  }
  ++handle.count_;
}

std::shared_ptr<void> Context::drop(Handle& handle) noexcept {
  if (handle.count_ == 0 || --handle.count_ != 0) return nullptr;
  *handle.link_ = handle.next_;
  if (handle.next_ != nullptr) handle.next_->link_ = handle.link_;
  return std::exchange(handle.self_, nullptr);
}

void Context::EndAll::operator()(Handle* first) const noexcept {
  while (first != nullptr) {
    Handle* const next = first->next_;
    const std::shared_ptr<void> last = std::exchange(first->self_, nullptr);
    first = next;
  }
}

Context::Cleared Context::clear_handles() noexcept {
  for (const Event& event : events_) {
    if (event.loan) event.loan->events_queued = 0;
  }
  events_.clear();
  for (Handle* handle = held_; handle != nullptr; handle = handle->next_) handle->count_ = 0; // whoever drops one now finds nothing
  return {std::unique_ptr<Handle, EndAll>(std::exchange(held_, nullptr)), std::exchange(tasks_, {})};
}

Result<Event> Context::next_event(std::uint32_t timeout_ms) {
  Lock lock(mutex_);
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  if (events_.empty() && timeout_ms == 0 && !options_.loop_thread) turn_loop(lock, 0);
  if (!wait(lock, deadline, false, [this] { return !events_.empty(); })) {
    return closed_ ? fail(GPULOAN_ERR_STATE, "the context is closed") : fail(GPULOAN_ERR_TIMEOUT, "no event came within " + std::to_string(timeout_ms) + " ms");
  }
  Event event = take_event(first_event_);
  signal_events();
  return event;
}

Result<void> Context::wait_end(const Loan& loan, std::uint32_t timeout_ms) {
  Lock lock(mutex_);
  if (!wait(lock, Deadline::after_ms(timeout_ms), false, [&] { return loan.ended; })) {
    return fail(GPULOAN_ERR_TIMEOUT, "the loan did not end within " + std::to_string(timeout_ms) + " ms");
  }
  return loan.outcome_result();
}

void Context::put_back(Event event) {
  const Lock lock(mutex_);
  events_.push_front(std::move(event));
  name_event(--first_event_);
  signal_events();
}

} // namespace gpuloan::loan
