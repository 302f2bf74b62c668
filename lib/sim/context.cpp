// SPDX-License-Identifier: MIT
//
// The thread's part (its stack of contexts, its per-thread streams) is freed by a pthread key. Unlike the destructor
// of a thread_local object, that does not run for the main thread when the process exits, so static destructors still
// find their current context.
#include <sim/address_space.hpp>
#include <sim/api.hpp>
#include <sim/config.hpp>
#include <sim/context.hpp>
#include <sim/device.hpp>
#include <sim/event.hpp>
#include <sim/pool.hpp>
#include <sim/process.hpp>
#include <sim/state_file.hpp>
#include <sim/stream.hpp>

#include <algorithm>
#include <new>
#include <pthread.h>
#include <utility>

namespace gpuloan::sim {
namespace {

struct Current {
  std::uint64_t handle;
  Device device;
};

struct ThreadState {
  std::vector<Current> stack;
  std::vector<std::shared_ptr<StreamState>> streams;
  ~ThreadState() {
    for (const auto& stream : streams) close_stream(stream);
  }
};

void end_thread(void* state) {
  // A forked child owns none of it, and the locks may be held by threads that it does not have.
  if (!forked_since_init()) delete static_cast<ThreadState*>(state);
}

pthread_key_t make_key() {
  pthread_key_t key = {};
  if (::pthread_key_create(&key, end_thread) != 0) throw std::bad_alloc();
  return key;
}

ThreadState& this_thread() {
  static const pthread_key_t key = make_key();
  auto* state = static_cast<ThreadState*>(::pthread_getspecific(key));
  if (state == nullptr) {
    state = new ThreadState;
    ::pthread_setspecific(key, state);
  }
  return *state;
}

HandleTable<ContextState>& table() {
  static auto* instance = new HandleTable<ContextState>(0x51);
  return *instance;
}

// The primary context of one device.
struct Primary {
  std::mutex mutex; // held while the context is made or destroyed
  ContextRef context;
  unsigned count = 0;
  std::uint64_t handle = 0;
};

Primary& primary(Device device) {
  static auto* instance = new Primary[kMaxDevices];
  return instance[device];
}

// Each context holds its device, which in exclusive-process mode one process may. Under MPS that one is the server.
CuResult occupy(Device device) {
  const int mode = config().compute_mode;
  const off_t byte = StateFile::context_byte(physical_device(device));
  StateFile& file = StateFile::get();
  const StateFile::Guard guard(file);
  if (mode == ModeProhibited) return DeviceUnavailable;
  if (mode == ModeExclusiveProcess && config().mps == 0 && file.held_by_others(byte)) return DeviceUnavailable;
  file.hold(byte);
  return Success;
}

void vacate(const ContextState& context) {
  StateFile& file = StateFile::get();
  const StateFile::Guard guard(file);
  file.drop(StateFile::context_byte(context.physical));
}

ContextRef create_context(Device device, std::uint64_t handle) {
  auto context = std::make_shared<ContextState>(device, handle);
  {
    const std::lock_guard lock(context->mutex);
    context->legacy = make_stream(context, StreamKind::Legacy);
  }
  table().put(handle, context);
  return context;
}

// Waits for the work of the context, as the real driver does (it never ends behind a wait that nobody releases), then
// for its workers, and frees what belongs to it.
void destroy_context(const ContextRef& context) {
  static_cast<void>(synchronize_context(*context));
  static_cast<void>(table().take(context->handle));
  std::vector<std::unique_ptr<Operation>> dropped; // these two end unlocked
  std::vector<std::shared_ptr<StreamState>> ended;
  {
    std::unique_lock lock(context->mutex);
    context->dying.store(true, std::memory_order_release);
    dropped = cancel_streams(*context);
    context->progress.wait(lock, [&] { return context->workers == 0; });
    ended.swap(context->streams);
    context->legacy.reset();
  }
  forget_streams(*context);
  forget_events(*context);
  AddressSpace::get().forget_context(context->handle);
  vacate(*context);
}

} // namespace

ContextState::ContextState(Device which, std::uint64_t number)
    : device(which), physical(physical_device(which)), handle(number) {}

bool has_current_context() { return !this_thread().stack.empty(); }

ContextRef current_context() {
  const auto& stack = this_thread().stack;
  return stack.empty() ? nullptr : table().find(stack.back().handle);
}

ContextRef find_context(std::uint64_t handle) { return table().find(handle); }

std::vector<ContextRef> all_contexts() { return table().all(); }

CuResult context_state(const ContextState& context) {
  const CuResult sticky = context.sticky.load(std::memory_order_acquire);
  if (sticky != Success) return sticky;
  return context.dying.load(std::memory_order_acquire) ? ContextIsDestroyed : Success;
}

std::shared_ptr<StreamState> thread_stream(const ContextRef& context) {
  auto& streams = this_thread().streams;
  std::erase_if(streams, [](const auto& stream) { return stream->context->dying.load(std::memory_order_acquire); });
  for (const auto& stream : streams) {
    if (stream->context == context) return stream;
  }
  const std::lock_guard lock(context->mutex);
  streams.push_back(make_stream(context, StreamKind::PerThread));
  return streams.back();
}

void fail_context(ContextState& context, CuResult code) {
  std::vector<std::unique_ptr<Operation>> dropped; // ends unlocked
  const std::lock_guard lock(context.mutex);
  CuResult expected = Success;
  context.sticky.compare_exchange_strong(expected, code);
  dropped = cancel_streams(context);
}

std::size_t live_contexts() { return table().size(); }

std::size_t live_waits() {
  std::size_t waits = 0;
  for (const ContextRef& context : all_contexts()) {
    const std::lock_guard lock(context->mutex);
    for (const auto& stream : context->streams) waits += stream->waiting ? 1U : 0U;
  }
  return waits;
}

namespace api {

CuResult cuDevicePrimaryCtxRetain(Context* context, Device device) {
  if (context == nullptr) return InvalidValue;
  if (!is_device(device)) return InvalidDevice;
  Primary& mine = primary(device);
  const std::lock_guard lock(mine.mutex);
  if (mine.handle == 0) mine.handle = table().reserve();
  if (!mine.context) {
    if (const CuResult result = occupy(device)) return result;
    mine.context = create_context(device, mine.handle);
  }
  ++mine.count;
  *context = to_handle<Context>(mine.handle);
  return Success;
}

CuResult cuDevicePrimaryCtxRelease(Device device) {
  if (!is_device(device)) return InvalidDevice;
  Primary& mine = primary(device);
  const std::lock_guard lock(mine.mutex);
  if (mine.count == 0) return InvalidContext;
  if (--mine.count == 0) destroy_context(std::exchange(mine.context, nullptr));
  return Success;
}

CuResult cuCtxCreate(Context* context, unsigned, Device device) {
  if (context == nullptr) return InvalidValue;
  if (!is_device(device)) return InvalidDevice;
  if (const CuResult result = occupy(device)) return result;
  const ContextRef made = create_context(device, table().reserve());
  this_thread().stack.push_back({made->handle, device});
  *context = to_handle<Context>(made->handle);
  return Success;
}

CuResult cuCtxDestroy(Context context) {
  const ContextRef found = table().find(from_handle(context));
  if (!found) return InvalidContext;
  auto& stack = this_thread().stack;
  if (!stack.empty() && stack.back().handle == found->handle) stack.pop_back();
  destroy_context(found);
  return Success;
}

CuResult cuCtxSetCurrent(Context context) {
  auto& stack = this_thread().stack;
  const ContextRef found = table().find(from_handle(context));
  if (context != nullptr && !found) return InvalidContext;
  if (!stack.empty()) stack.pop_back();
  if (found) stack.push_back({found->handle, found->device});
  return Success;
}

CuResult cuCtxGetCurrent(Context* context) {
  if (context == nullptr) return InvalidValue;
  const auto& stack = this_thread().stack;
  *context = stack.empty() ? nullptr : to_handle<Context>(stack.back().handle);
  return Success;
}

CuResult cuCtxPushCurrent(Context context) {
  if (context == nullptr) return InvalidValue;
  const ContextRef found = table().find(from_handle(context));
  if (!found) return InvalidContext;
  this_thread().stack.push_back({found->handle, found->device});
  return Success;
}

CuResult cuCtxPopCurrent(Context* context) {
  auto& stack = this_thread().stack;
  if (stack.empty()) return InvalidContext;
  if (context != nullptr) *context = to_handle<Context>(stack.back().handle);
  stack.pop_back();
  return Success;
}

// Answered for a failed or destroyed context too.
CuResult cuCtxGetDevice(Device* device) {
  if (device == nullptr) return InvalidValue;
  const auto& stack = this_thread().stack;
  if (stack.empty()) return InvalidContext;
  *device = stack.back().device;
  return Success;
}

CuResult cuCtxSynchronize() {
  if (const CuResult result = synchronize_context(*current_context())) return result;
  trim_pools();
  return Success;
}

} // namespace api
} // namespace gpuloan::sim
