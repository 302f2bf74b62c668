// SPDX-License-Identifier: MIT
//
// Records and waits are stream operations; a record takes its number when it is queued, not when the call began.
#include <sim/api.hpp>
#include <sim/config.hpp>
#include <sim/event.hpp>
#include <sim/pool.hpp>

namespace gpuloan::sim {
namespace {

using EventRef = std::shared_ptr<EventState>;

HandleTable<EventState>& table() {
  static auto* instance = new HandleTable<EventState>(0x53);
  return *instance;
}

void wait_until_done(const Moment& moment, const ContextState& context) {
  Backoff backoff;
  while (!moment.done() && !context.cancelled()) backoff.pause();
}

// A record that is dropped with its context counts as done for local waiters, which could not be released otherwise.
class LocalRecord final : public Operation {
 public:
  explicit LocalRecord(EventRef event) : event_(std::move(event)), record_(std::make_shared<Record>()) {}
  ~LocalRecord() override { record_->done.store(true, std::memory_order_release); }
  void queued() override {
    const std::lock_guard lock(event_->mutex);
    event_->newest = record_;
  }
  CuResult run(StreamState&) override {
    record_->done.store(true, std::memory_order_release);
    return Success;
  }

 private:
  EventRef event_;
  std::shared_ptr<Record> record_;
};

// Records of one shared event become done in their order, whoever made them: behind the record of a dead process a
// stream stands still (fact S5).
class SharedRecord final : public Operation {
 public:
  explicit SharedRecord(std::shared_ptr<EventSlot> slot) : moment_{nullptr, std::move(slot), 0} {}
  void queued() override { moment_.number = moment_.slot->begin_record(); }
  CuResult run(StreamState& stream) override {
    const Moment before{nullptr, moment_.slot, moment_.number - 1};
    wait_until_done(before, *stream.context);
    if (before.done()) moment_.slot->complete(moment_.number);
    return Success;
  }

 private:
  Moment moment_;
};

class Wait final : public Operation {
 public:
  explicit Wait(Moment moment) : moment_(std::move(moment)) {}
  CuResult run(StreamState& stream) override {
    wait_until_done(moment_, *stream.context);
    return Success;
  }

 private:
  const Moment moment_;
};

// The event, if its context is well.
CuResult resolve(Event handle, EventRef& out) {
  EventRef event = table().find(from_handle(handle));
  if (!event) return InvalidHandle;
  if (const CuResult result = context_state(*event->context)) return result;
  out = std::move(event);
  return Success;
}

} // namespace

Moment EventState::moment() {
  if (slot) return {nullptr, slot, slot->recorded()};
  const std::lock_guard lock(mutex);
  return {newest, nullptr, 0};
}

void forget_events(const ContextState& context) {
  table().remove_if([&](const EventState& event) { return event.context.get() == &context; });
}

std::size_t live_events() { return table().size(); }

namespace api {

CuResult cuEventCreate(Event* event, unsigned flags) {
  constexpr unsigned kKnown = EventBlockingSync | EventDisableTiming | EventInterprocess;
  if (event == nullptr || (flags & ~kKnown) != 0) return InvalidValue;
  const bool interprocess = (flags & EventInterprocess) != 0;
  if (interprocess && (flags & EventDisableTiming) == 0) return InvalidValue;
  if (interprocess && !config().has(Group::IpcEvents)) return NotSupported;
  auto made = std::make_shared<EventState>();
  made->context = current_context();
  if (interprocess) {
    if (const CuResult result = EventSlot::create(made->slot)) return result;
  }
  *event = to_handle<Event>(table().add(std::move(made)));
  return Success;
}

CuResult cuEventDestroy(Event event) {
  EventRef found;
  if (const CuResult result = resolve(event, found)) return result;
  const EventRef taken = table().take(from_handle(event));
  if (!taken) return InvalidHandle;
  if (taken->slot) taken->slot->retire();
  return Success;
}

CuResult cuEventRecord(Event event, Stream stream) {
  EventRef found;
  StreamRef where;
  if (const CuResult result = resolve(event, found)) return result;
  if (const CuResult result = resolve_stream(stream, where)) return result;
  if (where->context != found->context) return InvalidHandle;
  if (found->slot) return submit(where, std::make_unique<SharedRecord>(found->slot));
  return submit(where, std::make_unique<LocalRecord>(found));
}

CuResult cuEventQuery(Event event) {
  EventRef found;
  if (const CuResult result = resolve(event, found)) return result;
  return found->moment().done() ? Success : NotReady;
}

CuResult cuEventSynchronize(Event event) {
  EventRef found;
  if (const CuResult result = resolve(event, found)) return result;
  const Moment moment = found->moment();
  wait_until_done(moment, *found->context);
  if (const CuResult result = context_state(*found->context)) return result;
  trim_pools();
  return Success;
}

CuResult cuStreamWaitEvent(Stream stream, Event event, unsigned flags) {
  if (flags > 1) return InvalidValue; // 1: external, for captures
  EventRef found;
  StreamRef where;
  if (const CuResult result = resolve(event, found)) return result;
  if (const CuResult result = resolve_stream(stream, where)) return result;
  Moment moment = found->moment();
  if (moment.done()) return Success;
  return submit(where, std::make_unique<Wait>(std::move(moment)));
}

CuResult cuIpcGetEventHandle(IpcEventHandle* handle, Event event) {
  if (handle == nullptr) return InvalidValue;
  EventRef found;
  if (const CuResult result = resolve(event, found)) return result;
  if (!found->slot || found->opened) return InvalidHandle;
  *handle = found->slot->handle();
  return Success;
}

CuResult cuIpcOpenEventHandle(Event* event, IpcEventHandle handle) {
  if (event == nullptr) return InvalidValue;
  auto made = std::make_shared<EventState>();
  made->context = current_context();
  made->opened = true;
  if (const CuResult result = EventSlot::open(handle, made->slot)) return result;
  *event = to_handle<Event>(table().add(std::move(made)));
  return Success;
}

} // namespace api
} // namespace gpuloan::sim
