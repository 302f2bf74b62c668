// SPDX-License-Identifier: MIT
//
// Questions about events and memory operations.
#include "answers.hpp"

#include <cstdlib>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace answers {

void ask_events() {
  start();
  Event made = nullptr;
  say("create.flags-64", cuda.cuEventCreate(&made, 64));
  say("create.interprocess-alone", cuda.cuEventCreate(&made, EventInterprocess));
  const Event local = event(EventDisableTiming);
  say("query.never-recorded", cuda.cuEventQuery(local));
  IpcEventHandle handle = {};
  say("handle.of-local", cuda.cuIpcGetEventHandle(&handle, local));
  const Event shared = event(kShared);
  need(cuda.cuIpcGetEventHandle(&handle, shared), "cuIpcGetEventHandle");
  say("open.same-process", cuda.cuIpcOpenEventHandle(&made, handle));
  say("open.zeros", cuda.cuIpcOpenEventHandle(&made, IpcEventHandle{}));
  Context other = nullptr;
  need(cuda.cuCtxCreate(&other, 0, 0), "cuCtxCreate");
  say("record.other-context", cuda.cuEventRecord(local, stream()));
  say("wait.other-context", cuda.cuStreamWaitEvent(stream(), local, 0));
  say("query.other-context", cuda.cuEventQuery(local));
  say("wait.flags-8", cuda.cuStreamWaitEvent(stream(), local, 8));
}

void ask_memops() {
  start();
  std::uint64_t* page = words();
  const Stream where = stream();
  static std::uint64_t plain;
  say("write.unregistered", cuda.cuStreamWriteValue64(where, at(&plain), 1, 0));
  say("write.misaligned", cuda.cuStreamWriteValue64(where, at(page) + 4, 1, 0));
  say("write.behind", cuda.cuStreamWriteValue64(where, at(page) + 4096, 1, 0));
  say("write.flags-1", cuda.cuStreamWriteValue64(where, at(page), 1, 1));
  say("write.flags-64", cuda.cuStreamWriteValue64(where, at(page), 1, 64));
  say("wait.misaligned", cuda.cuStreamWaitValue64(where, at(page) + 4, 0, 0));
  say("wait.flags-64", cuda.cuStreamWaitValue64(where, at(page), 0, 64));
  say("write.null", cuda.cuStreamWriteValue64(where, 0, 1, 0));
  DevicePtr device = 0;
  need(cuda.cuMemAlloc(&device, 64), "cuMemAlloc");
  say("write.device", cuda.cuStreamWriteValue64(where, device, 0x100000002, 0));
  say("wait.device", cuda.cuStreamWaitValue64(where, device, 0x100000002, WaitEq));
  say("legacy-stream", cuda.cuStreamWriteValue64(nullptr, at(page) + 8, 5, 0));
  say("sync", cuda.cuCtxSynchronize());
  store(page + 2, 3);
  say("wait.cyclic", cuda.cuStreamWaitValue64(where, at(page + 2), UINT64_MAX, WaitGeq));
  say("wait.cyclic.done", later(where));
  store(page + 2, UINT64_MAX);
}

// An event recorded on a stuck stream, then on a free one.
void ask_record_again() {
  start();
  std::uint64_t* page = words();
  const Stream stuck = stream();
  const Stream waiter = stream();
  for (const unsigned flags : {EventDisableTiming + 0U, kShared}) {
    const bool shared = flags == kShared;
    const Event gate = event(flags);
    store(page, 0);
    need(cuda.cuStreamWaitValue64(stuck, at(page), 1, WaitGeq), "wait");
    need(cuda.cuEventRecord(gate, stuck), "record");
    need(cuda.cuStreamWaitEvent(waiter, gate, 0), "wait event");
    const Stream quick = stream();
    say(shared ? "shared.call-returns" : "local.call-returns",
        ends_within_ms(patience_ms(), [=] { cuda.cuEventRecord(gate, quick); }));
    say(shared ? "shared.quick-stream" : "local.quick-stream", later(quick));
    say(shared ? "shared.event" : "local.event", cuda.cuEventQuery(gate));
    say(shared ? "shared.waiter" : "local.waiter", cuda.cuStreamQuery(waiter));
    store(page, 1);
    say(shared ? "shared.sync" : "local.sync", cuda.cuCtxSynchronize());
  }
}

// Interprocess events between two processes. The other process only records and opens; what it learns goes into shared
// memory, and the asking process prints it.
void ask_peer() {
  struct Shared {
    IpcEventHandle handle;
    IpcEventHandle destroyed;
    IpcEventHandle orphan;
    std::uint64_t step;
    std::uint64_t word;
    CuResult opened, opened_destroyed, exported_again, recorded;
  };
  auto* shared =
      static_cast<Shared*>(::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto until = [&](std::uint64_t step) {
    while (__atomic_load_n(&shared->step, __ATOMIC_ACQUIRE) < step) ::usleep(1000);
  };
  const pid_t peer = ::fork();
  if (peer == 0) {
    start();
    until(1);
    Event opened = nullptr;
    Event none = nullptr;
    IpcEventHandle again = {};
    shared->opened = cuda.cuIpcOpenEventHandle(&opened, shared->handle);
    shared->opened_destroyed = cuda.cuIpcOpenEventHandle(&none, shared->destroyed);
    shared->exported_again = cuda.cuIpcGetEventHandle(&again, opened);
    std::uint64_t* page = words();
    const Stream stuck = stream();
    need(cuda.cuStreamWaitValue64(stuck, at(page), 1, WaitGeq), "wait");
    shared->recorded = cuda.cuEventRecord(opened, stuck);
    need(cuda.cuIpcGetEventHandle(&shared->orphan, event(kShared)), "handle");
    store(&shared->step, 2);
    until(3);
    store(page, 1);
    need(cuda.cuCtxSynchronize(), "sync");
    store(&shared->step, 4);
    until(5);
    std::exit(0);
  }
  start();
  const Event gate = event(kShared);
  const Event gone = event(kShared);
  need(cuda.cuIpcGetEventHandle(&shared->handle, gate), "handle");
  need(cuda.cuIpcGetEventHandle(&shared->destroyed, gone), "handle");
  need(cuda.cuEventDestroy(gone), "destroy");
  store(&shared->step, 1);
  until(2);
  say("open", shared->opened);
  say("open.destroyed", shared->opened_destroyed);
  say("export-opened", shared->exported_again);
  say("record-opened", shared->recorded);
  say("query.pending", cuda.cuEventQuery(gate));
  const Stream quick = stream();
  say("record-again.call-returns", ends_within_ms(patience_ms(), [=] { cuda.cuEventRecord(gate, quick); }));
  say("record-again.quick-stream", later(quick));
  say("record-again.event", cuda.cuEventQuery(gate));
  store(&shared->step, 3);
  until(4);
  say("record-again.released", later(quick));
  store(&shared->step, 5);
  ::waitpid(peer, nullptr, 0);
  Event orphan = nullptr;
  say("open.creator-gone", cuda.cuIpcOpenEventHandle(&orphan, shared->orphan));
  say("query.peer-gone", cuda.cuEventQuery(gate));
}

} // namespace answers
