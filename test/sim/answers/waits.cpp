// SPDX-License-Identifier: MIT
//
// Questions about streams that wait for a word, and about what stands still behind them.
#include "answers.hpp"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <unistd.h>
#include <vector>

namespace answers {

// Does a copy with pageable memory return while the stream is stuck?
void ask_pageable() {
  start();
  std::uint64_t* page = words();
  DevicePtr device = 0;
  need(cuda.cuMemAlloc(&device, 8 * kMiB), "cuMemAlloc");
  static std::vector<char> host(8 * kMiB);
  std::uint64_t turn = 0;
  const auto ask = [&](const char* question, const std::function<void(Stream)>& call) {
    const Stream stuck = stream();
    need(cuda.cuStreamWaitValue64(stuck, at(page), ++turn, WaitGeq), "wait");
    say(question, ends_within_ms(patience_ms(), [=] { call(stuck); }));
    store(page, turn);
    need(cuda.cuStreamSynchronize(stuck), "sync");
  };
  for (const std::size_t size : {std::size_t{64}, std::size_t{65536}, std::size_t{65537}, kMiB, 8 * kMiB}) {
    char question[32];
    std::snprintf(question, sizeof question, "htod-%zu", size);
    ask(question, [=](Stream stuck) { cuda.cuMemcpyHtoDAsync(device, host.data(), size, stuck); });
  }
  ask("dtoh-64", [=](Stream stuck) { cuda.cuMemcpyDtoHAsync(host.data(), device, 64, stuck); });
  ask("any-htod-64", [=](Stream stuck) { cuda.cuMemcpyAsync(device, at(host.data()), 64, stuck); });
}

// What gets no turn while another thread's cuMemFree stands behind a stream that waits (fact S10)? 1: it stands too.
void ask_standing() {
  start();
  std::uint64_t* page = words();
  Context context = nullptr;
  need(cuda.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  static Stream stuck, other, made_stream;
  static Event recorded, made_event;
  static DevicePtr device, range, made;
  static MemHandle handle;
  static std::size_t total;
  static AccessDesc open;
  stuck = stream(), other = stream(), recorded = event(EventDisableTiming);
  alignas(4096) static char plain[8192];
  open = {{LocationDevice, 0}, AccessReadWrite};
  need(cuda.cuMemAlloc(&device, kMiB), "cuMemAlloc");
  static std::uint64_t* word = nullptr;
  word = page + 8;
  struct Question {
    const char* name;
    CuResult (*call)();
  };
  const Question questions[] = {
      {"cuMemsetD8Async", [] { return cuda.cuMemsetD8Async(device, 1, 4096, other); }},
      {"cuMemsetD32Async", [] { return cuda.cuMemsetD32Async(device, 1, 1024, other); }},
      {"cuMemcpyAsync", [] { return cuda.cuMemcpyAsync(device, device + 8192, 4096, other); }},
      {"cuMemcpyDtoDAsync", [] { return cuda.cuMemcpyDtoDAsync(device, device + 8192, 4096, other); }},
      {"cuMemcpyHtoDAsync", [] { return cuda.cuMemcpyHtoDAsync(device, word, 64, other); }},
      {"cuMemcpyDtoHAsync", [] { return cuda.cuMemcpyDtoHAsync(word, device, 64, other); }},
      {"cuEventRecord", [] { return cuda.cuEventRecord(recorded, other); }},
      {"cuEventCreate", [] { return cuda.cuEventCreate(&made_event, EventDisableTiming); }},
      {"cuEventDestroy", [] { return cuda.cuEventDestroy(made_event); }},
      {"cuStreamCreate", [] { return cuda.cuStreamCreate(&made_stream, StreamNonBlocking); }},
      {"cuStreamDestroy", [] { return cuda.cuStreamDestroy(made_stream); }},
      {"cuMemAlloc", [] { return cuda.cuMemAlloc(&made, kMiB); }},
      {"cuStreamSynchronize", [] { return cuda.cuStreamSynchronize(other); }},
      {"cuEventSynchronize", [] { return cuda.cuEventSynchronize(recorded); }},
      {"cuEventQuery", [] { return cuda.cuEventQuery(recorded); }},
      {"cuStreamQuery", [] { return cuda.cuStreamQuery(other); }},
      {"cuStreamWaitEvent", [] { return cuda.cuStreamWaitEvent(other, recorded, 0); }},
      {"cuStreamWriteValue64", [] { return cuda.cuStreamWriteValue64(other, at(word), 7, 0); }},
      {"cuStreamWaitValue64", [] { return cuda.cuStreamWaitValue64(other, at(word), 0, WaitGeq); }},
      {"cuMemCreate", [] { const AllocationProp wish = prop(); return cuda.cuMemCreate(&handle, 2 * kMiB, &wish, 0); }},
      {"cuMemAddressReserve", [] { return cuda.cuMemAddressReserve(&range, 2 * kMiB, 0, 0, 0); }},
      {"cuMemMap", [] { return cuda.cuMemMap(range, 2 * kMiB, 0, handle, 0); }},
      {"cuMemSetAccess", [] { return cuda.cuMemSetAccess(range, 2 * kMiB, &open, 1); }},
      {"cuMemUnmap", [] { return cuda.cuMemUnmap(range, 2 * kMiB); }},
      {"cuMemAddressFree", [] { return cuda.cuMemAddressFree(range, 2 * kMiB); }},
      {"cuMemRelease", [] { return cuda.cuMemRelease(handle); }},
      {"cuMemHostRegister", [] { return cuda.cuMemHostRegister(plain, sizeof plain, 0); }},
      {"cuMemGetInfo", [] { std::size_t free = 0; return cuda.cuMemGetInfo(&free, &total); }},
  };
  for (const Question& question : questions) need(question.call(), question.name); // whatever the driver makes at first use
  need(cuda.cuStreamSynchronize(other), "sync");
  need(cuda.cuMemHostUnregister(plain), "cuMemHostUnregister");
  std::uint64_t turn = 0;
  for (const Question& question : questions) {
    DevicePtr freed = 0;
    need(cuda.cuMemAlloc(&freed, kMiB), "cuMemAlloc");
    need(cuda.cuStreamWaitValue64(stuck, at(page), ++turn, WaitGeq), "wait");
    const auto in_context = [context](const auto& call) {
      return std::async(std::launch::async, [=] {
        const CuResult current = cuda.cuCtxSetCurrent(context);
        return current != Success ? current : call();
      });
    };
    auto free = in_context([freed] { return cuda.cuMemFree(freed); });
    const bool blocked = free.wait_for(std::chrono::milliseconds(100)) == std::future_status::timeout;
    auto call = in_context(question.call);
    const bool stands = call.wait_for(std::chrono::milliseconds(patience_ms())) == std::future_status::timeout;
    store(page, turn);
    const bool well = free.get() == Success && call.get() == Success;
    say(question.name, well && blocked ? stands : -1);
  }
}

// Waits of one context and what else still runs (fact S9).
void ask_waits() {
  start();
  std::uint64_t* page = words();
  const Stream used = stream();
  need(cuda.cuStreamWriteValue64(used, at(page + 500), 1, 0), "write");
  need(cuda.cuStreamSynchronize(used), "sync");
  std::vector<Stream> waiting;
  const auto add = [&] {
    waiting.push_back(stream());
    need(cuda.cuStreamWaitValue64(waiting.back(), at(page + waiting.size()), 1, WaitGeq), "wait");
  };
  for (int count = 0; count < 7; ++count) add();
  Stream fresh = stream();
  need(cuda.cuStreamWriteValue64(fresh, at(page + 400), 1, 0), "write");
  need(cuda.cuStreamWriteValue64(used, at(page + 401), 1, 0), "write");
  say("7.fresh", later(fresh));
  say("7.used", later(used));
  add();
  fresh = stream();
  need(cuda.cuStreamWriteValue64(fresh, at(page + 402), 1, 0), "write");
  need(cuda.cuStreamWriteValue64(used, at(page + 403), 1, 0), "write");
  say("8.fresh", later(fresh));
  say("8.used", later(used));
  need(cuda.cuStreamWriteValue64(nullptr, at(page + 404), 1, 0), "write");
  say("8.legacy", later(nullptr));
  store(page + 1, 1);
  say("released.fresh", later(fresh));
  say("released.used", later(used));
  for (std::size_t index = 1; index <= waiting.size(); ++index) store(page + index, 1);
  say("all-released", cuda.cuCtxSynchronize());
}

// The same with streams that wait for an event instead: the fresh stream's state; 1000: a call about it did not return;
// 2000: nor did the wait.
void ask_event_waits() {
  start();
  std::uint64_t* page = words();
  const Stream source = stream();
  const Event gate = event(EventDisableTiming);
  need(cuda.cuStreamWaitValue64(source, at(page), 1, WaitGeq), "wait");
  need(cuda.cuEventRecord(gate, source), "record");
  for (int count = 1; count <= 64; ++count) {
    const bool made = ends_within_ms(1000, [=] { need(cuda.cuStreamWaitEvent(stream(), gate, 0), "wait event"); });
    if (made && count % 8 != 0) continue;
    static Stream fresh;
    const bool wrote = ends_within_ms(1000, [=] {
      fresh = stream();
      need(cuda.cuStreamWriteValue64(fresh, at(page + 1), 1, 0), "write");
    });
    char question[32];
    std::snprintf(question, sizeof question, "%d", count);
    say(question, made && wrote ? later(fresh) : made ? 1000 : 2000);
    if (!made || !wrote) break;
  }
  store(page, 1);
  say("sync", cuda.cuCtxSynchronize());
}

// Which calls stand behind a stream of the context that waits for a word? 1: the call returned meanwhile.
void ask_blocks() {
  start();
  std::uint64_t* page = words();
  std::uint64_t* second = words();
  const Stream stuck = stream();
  const Stream used = stream();
  const Event idle = event(EventDisableTiming);
  const Event doomed = event(EventDisableTiming);
  const Event shared = event(kShared);
  const Stream over = stream();
  need(cuda.cuEventRecord(idle, used), "record");
  need(cuda.cuCtxSynchronize(), "sync");
  static unsigned host[4];
  DevicePtr device = 0;
  DevicePtr plain = 0;
  need(cuda.cuMemAlloc(&device, 64), "cuMemAlloc");
  need(cuda.cuMemAlloc(&plain, 64), "cuMemAlloc");
  void* memory = ::aligned_alloc(4096, 4096);
  void* pinned = nullptr;
  need(cuda.cuMemAllocHost(&pinned, 4096), "cuMemAllocHost");
  std::uint64_t turn = 0;
  const auto ask = [&](const char* question, const std::function<CuResult()>& call) {
    need(cuda.cuStreamWaitValue64(stuck, at(page), ++turn, WaitGeq), "wait");
    static std::atomic<CuResult> result;
    const bool returned = ends_within_ms(patience_ms(), [=] { result = call(); });
    store(page, turn);
    need(cuda.cuStreamSynchronize(stuck), "sync");
    ::usleep(20'000); // a call that stood behind the wait ends now
    say(question, returned ? 1 : 0);
    if (result != Success) say(question, 1000 + result);
  };
  static MemHandle handle;
  static DevicePtr address;
  static int fd;
  ask("stream-create", [] {
    Stream made;
    return cuda.cuStreamCreate(&made, StreamNonBlocking);
  });
  ask("stream-destroy", [=] { return cuda.cuStreamDestroy(over); });
  ask("stream-query", [=] { return cuda.cuStreamQuery(used); });
  ask("event-create", [] {
    Event made;
    return cuda.cuEventCreate(&made, EventDisableTiming);
  });
  ask("event-create-shared", [] {
    Event made;
    return cuda.cuEventCreate(&made, kShared);
  });
  ask("event-destroy", [=] { return cuda.cuEventDestroy(doomed); });
  ask("event-query", [=] { return cuda.cuEventQuery(idle); });
  ask("event-synchronize", [=] { return cuda.cuEventSynchronize(idle); });
  ask("event-record", [=] { return cuda.cuEventRecord(idle, used); });
  ask("event-handle", [=] {
    IpcEventHandle bytes;
    return cuda.cuIpcGetEventHandle(&bytes, shared);
  });
  ask("mem-get-info", [] {
    std::size_t a, b;
    return cuda.cuMemGetInfo(&a, &b);
  });
  ask("mem-alloc", [] {
    DevicePtr made;
    return cuda.cuMemAlloc(&made, 64);
  });
  ask("mem-alloc-large", [] {
    DevicePtr made;
    return cuda.cuMemAlloc(&made, 512 * kMiB);
  });
  ask("mem-free", [=] { return cuda.cuMemFree(plain); });
  ask("mem-create", [] {
    const AllocationProp wish = prop();
    return cuda.cuMemCreate(&handle, 2 * kMiB, &wish, 0);
  });
  ask("reserve", [] { return cuda.cuMemAddressReserve(&address, 2 * kMiB, 0, 0, 0); });
  ask("map", [] { return cuda.cuMemMap(address, 2 * kMiB, 0, handle, 0); });
  ask("set-access", [] { return give(address, 2 * kMiB, AccessReadWrite); });
  ask("export", [] { return cuda.cuMemExportToShareableHandle(&fd, handle, HandlePosixFd, 0); });
  ask("import", [] {
    MemHandle made;
    return cuda.cuMemImportFromShareableHandle(&made, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)), 1);
  });
  ask("set-access-again", [] { return give(address, 2 * kMiB, AccessRead); });
  ask("unmap", [] { return cuda.cuMemUnmap(address, 2 * kMiB); });
  ask("release", [] { return cuda.cuMemRelease(handle); });
  ask("address-free", [] { return cuda.cuMemAddressFree(address, 2 * kMiB); });
  ask("host-register", [=] { return cuda.cuMemHostRegister(memory, 4096, 0); });
  ask("host-unregister", [=] { return cuda.cuMemHostUnregister(memory); });
  ask("host-unregister-words", [=] { return cuda.cuMemHostUnregister(second); });
  ask("host-alloc", [] {
    void* made;
    return cuda.cuMemAllocHost(&made, 4096);
  });
  ask("host-free", [=] { return cuda.cuMemFreeHost(pinned); });
  ask("pointer-attributes", [=] {
    unsigned type = 0;
    const int attribute = PointerMemoryType;
    void* out = &type;
    return cuda.cuPointerGetAttributes(1, &attribute, &out, device);
  });
  ask("copy-pageable", [=] { return cuda.cuMemcpyHtoDAsync(device, host, 4, used); });
  ask("copy-to-pageable", [=] { return cuda.cuMemcpyDtoHAsync(host, device, 4, used); });
  ask("primary-retain", [] {
    Context made;
    return cuda.cuDevicePrimaryCtxRetain(&made, 0);
  });
  ask("primary-release", [] { return cuda.cuDevicePrimaryCtxRelease(0); });
  static Context other;
  ask("ctx-create", [] { return cuda.cuCtxCreate(&other, 0, 0); });
  ask("ctx-destroy", [] { return cuda.cuCtxDestroy(other); });
}

// One stream waits: how many of 64 others, used before, stand still with it?
void ask_channels() {
  start();
  std::uint64_t* page = words();
  std::vector<Stream> others;
  for (std::size_t index = 0; index < 64; ++index) {
    others.push_back(stream());
    need(cuda.cuStreamWriteValue64(others.back(), at(page + 8 + index), 1, 0), "write");
  }
  need(cuda.cuCtxSynchronize(), "sync");
  const Stream stuck = stream();
  need(cuda.cuStreamWaitValue64(stuck, at(page), 1, WaitGeq), "wait");
  for (std::size_t index = 0; index < 64; ++index) {
    need(cuda.cuStreamWriteValue64(others[index], at(page + 8 + index), 2, 0), "write");
  }
  const Stream fresh = stream();
  need(cuda.cuStreamWriteValue64(fresh, at(page + 100), 2, 0), "write");
  say("fresh", later(fresh));
  ::usleep(static_cast<unsigned>(patience_ms()) * 1000);
  long long stand_still = 0;
  for (const Stream one : others) stand_still += cuda.cuStreamQuery(one) == NotReady ? 1 : 0;
  say("stand-still-of-64", stand_still);
  store(page, 1);
  say("sync", cuda.cuCtxSynchronize());
}

// One stream waits while twelve others are busy for a moment: do the calls return, and how many of the streams used
// next still stand when all is quiet? A real driver was seen to block in cuStreamCreate at about the 32nd stream.
void ask_busy_channels() {
  start();
  std::uint64_t* page = words();
  DevicePtr device = 0;
  need(cuda.cuMemAlloc(&device, 256 * kMiB), "cuMemAlloc");
  need(cuda.cuMemsetD8Async(device, 1, 256 * kMiB, nullptr), "fill"); // whatever a first fill loads is loaded now
  need(cuda.cuCtxSynchronize(), "sync");
  const Stream stuck = stream();
  need(cuda.cuStreamWaitValue64(stuck, at(page), 1, WaitGeq), "wait");
  for (int busy = 0; busy < 12; ++busy) {
    const Stream where = stream();
    for (int count = 0; count < 8; ++count) need(cuda.cuMemsetD8Async(device, 1, 256 * kMiB, where), "fill");
  }
  std::vector<Stream> fresh;
  for (std::size_t index = 0; index < 32; ++index) {
    static Stream one;
    if (!ends_within_ms(1000, [] { one = stream(); })) {
      say("stream-create-blocked-at", static_cast<long long>(index) + 14);
      break;
    }
    fresh.push_back(one);
    need(cuda.cuStreamWriteValue64(one, at(page + 8 + index), 2, 0), "write");
  }
  ::usleep(static_cast<unsigned>(patience_ms()) * 2000);
  long long stand_still = 0;
  for (const Stream one : fresh) stand_still += cuda.cuStreamQuery(one) == NotReady ? 1 : 0;
  say("stand-still", stand_still);
  store(page, 1);
  say("sync", cuda.cuCtxSynchronize());
}

// The first fills and copies of a context while a stream waits: 1 when the call returned.
void ask_first_fill() {
  start();
  std::uint64_t* page = words();
  DevicePtr device = 0;
  need(cuda.cuMemAlloc(&device, 256 * kMiB), "cuMemAlloc");
  const Stream stuck = stream();
  const Stream other = stream();
  need(cuda.cuStreamWaitValue64(stuck, at(page), 1, WaitGeq), "wait");
  say("d32-one-word", ends_within_ms(1000, [=] { cuda.cuMemsetD32Async(device, 1, 1, other); }));
  say("d8-small", ends_within_ms(1000, [=] { cuda.cuMemsetD8Async(device, 1, 4096, other); }));
  say("d8-large", ends_within_ms(1000, [=] { cuda.cuMemsetD8Async(device, 1, 256 * kMiB, other); }));
  say("dtod-small", ends_within_ms(1000, [=] { cuda.cuMemcpyDtoDAsync(device, device + kMiB, 4096, other); }));
  say("dtod-large",
      ends_within_ms(1000, [=] { cuda.cuMemcpyDtoDAsync(device, device + 128 * kMiB, 64 * kMiB, other); }));
  say("others-end", later(other, 10'000));
  store(page, 1);
  say("sync", cuda.cuCtxSynchronize());
}

// A wait in one context, calls in another.
void ask_other_context() {
  start();
  std::uint64_t* page = words();
  Context second = nullptr;
  need(cuda.cuCtxCreate(&second, 0, 0), "cuCtxCreate");
  const Stream stuck = stream();
  need(cuda.cuStreamWaitValue64(stuck, at(page), 1, WaitGeq), "wait");
  need(cuda.cuCtxPopCurrent(&second), "pop");
  static std::uint64_t* plain;
  plain = words();
  DevicePtr device = 0;
  need(cuda.cuMemAlloc(&device, 64), "cuMemAlloc");
  say("free", ends_within_ms(patience_ms(), [=] { cuda.cuMemFree(device); }));
  say("unregister", ends_within_ms(patience_ms(), [] { cuda.cuMemHostUnregister(plain); }));
  say("sync", ends_within_ms(patience_ms(), [] { cuda.cuCtxSynchronize(); }));
  const Stream free_stream = stream();
  say("write.returns",
      ends_within_ms(patience_ms(), [=] { cuda.cuStreamWriteValue64(free_stream, at(page + 1), 1, 0); }));
  say("write", later(free_stream));
  store(page, 1);
  say("end", cuda.cuCtxSynchronize());
}

void ask_release_under_wait() {
  start();
  std::uint64_t* page = words();
  const Stream stuck = stream();
  need(cuda.cuStreamWaitValue64(stuck, at(page), 1, WaitGeq), "wait");
  say("returns", ends_within_ms(patience_ms(), [] { cuda.cuDevicePrimaryCtxRelease(0); }));
  store(page, 1);
  ::usleep(200'000);
  say("sync", cuda.cuCtxSynchronize());
}

void ask_unregister_under_wait() {
  start();
  std::uint64_t* page = words();
  const Stream stuck = stream();
  need(cuda.cuStreamWaitValue64(stuck, at(page), 1, WaitGeq), "wait");
  static std::atomic<CuResult> result;
  result = -1;
  say("returns", ends_within_ms(patience_ms(), [=] { result = cuda.cuMemHostUnregister(page); }));
  say("result", result);
  say("stream", later(stuck));
  store(page, 1);
  say("stream.after-store", later(stuck));
}

} // namespace answers
