// SPDX-License-Identifier: MIT
//
// Events inside a process and between processes, with what happens when the recording process dies.
#include "child.hpp"
#include "driver.hpp"

#include <csignal>
#include <unistd.h>
#include <vector>

using namespace sim_test;

namespace {

constexpr unsigned kShared = EventDisableTiming | EventInterprocess;

IpcEventHandle handle_of(Event event) {
  IpcEventHandle handle = {};
  REQUIRE(driver().cuIpcGetEventHandle(&handle, event) == Success);
  return handle;
}

Event open_event(const Link::End& from) {
  IpcEventHandle handle = {};
  from.receive_bytes(&handle, sizeof handle);
  Event event = nullptr;
  REQUIRE(driver().cuIpcOpenEventHandle(&event, handle) == Success);
  return event;
}

void send_event(const Link::End& to, Event event) {
  const IpcEventHandle handle = handle_of(event);
  to.send_bytes(&handle, sizeof handle);
}

} // namespace

TEST_CASE("an event is done when the work before its record is") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream stream = make_stream();
    const Event event = make_event();
    CHECK(cuda.stream_hold(stream) == Success);
    CHECK(cuda.cuEventRecord(event, stream) == Success);
    CHECK(cuda.cuEventQuery(event) == NotReady);
    CHECK(cuda.stream_release(stream) == Success);
    CHECK(cuda.cuEventSynchronize(event) == Success);
    CHECK(cuda.cuEventQuery(event) == Success);
    CHECK(cuda.cuEventDestroy(event) == Success);
    CHECK(cuda.cuEventDestroy(event) == InvalidHandle);
    CHECK(cuda.cuEventQuery(event) == InvalidHandle);
    Event wrong = nullptr;
    CHECK(cuda.cuEventCreate(&wrong, 64) == InvalidValue);
    CHECK(cuda.cuEventCreate(&wrong, EventInterprocess) == InvalidValue);
  });
}

TEST_CASE("a stream waits for the record that was newest when the wait was called") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream first = make_stream();
    const Stream second = make_stream();
    const Stream waiter = make_stream();
    const Event event = make_event();
    CHECK(cuda.stream_hold(first) == Success);
    CHECK(cuda.cuEventRecord(event, first) == Success);
    CHECK(cuda.cuStreamWaitEvent(waiter, event, 0) == Success);
    CHECK(cuda.cuEventRecord(event, second) == Success);
    CHECK(cuda.cuEventSynchronize(event) == Success);
    CHECK(cuda.cuStreamQuery(waiter) == NotReady);
    CHECK(cuda.cuEventDestroy(event) == Success);
    CHECK(cuda.cuStreamQuery(waiter) == NotReady);
    CHECK(cuda.stream_release(first) == Success);
    CHECK(cuda.cuStreamSynchronize(waiter) == Success);
  });
}

TEST_CASE("an interprocess event crosses, and its end is seen on the other side") {
  Machine machine;
  Link link;
  Child recorder([&] {
    const Driver& cuda = start();
    const Stream stream = make_stream();
    const Event event = make_event(kShared);
    CHECK(cuda.stream_hold(stream) == Success);
    CHECK(cuda.cuEventRecord(event, stream) == Success);
    send_event(link.left(), event);
    CHECK(link.left().hear() == 1);
    CHECK(cuda.stream_release(stream) == Success);
    CHECK(link.left().hear() == 2);
    CHECK(cuda.cuEventDestroy(event) == Success);
    link.left().say(3);
    CHECK(link.left().hear() == 4);
  });
  Child waiter([&] {
    const Driver& cuda = start();
    const Event event = open_event(link.right());
    const Stream stream = make_stream();
    CHECK(cuda.cuEventQuery(event) == NotReady);
    CHECK(cuda.cuStreamWaitEvent(stream, event, 0) == Success);
    CHECK(cuda.cuStreamQuery(stream) == NotReady);
    link.right().say(1);
    CHECK(cuda.cuStreamSynchronize(stream) == Success);
    CHECK(cuda.cuEventQuery(event) == Success);
    link.right().say(2);
    CHECK(link.right().hear() == 3);
    CHECK(cuda.cuEventRecord(event, stream) == Success);
    CHECK(cuda.cuEventSynchronize(event) == Success);
    link.right().say(4);
  });
  waiter.finish();
  recorder.finish();
}

// R15
TEST_CASE("the opened event's end leaves the creator's alone; a destroyed creator's handle opens nothing") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Event event = make_event(kShared);
    const IpcEventHandle handle = handle_of(event);
    Event opened = nullptr;
    REQUIRE(cuda.cuIpcOpenEventHandle(&opened, handle) == Success);
    CHECK(cuda.cuEventRecord(opened, nullptr) == Success);
    CHECK(cuda.cuEventSynchronize(event) == Success);
    CHECK(cuda.cuEventDestroy(opened) == Success);
    CHECK(cuda.cuEventQuery(event) == Success);
    REQUIRE(cuda.cuIpcOpenEventHandle(&opened, handle) == Success);
    CHECK(cuda.cuEventDestroy(event) == Success);
    CHECK(cuda.cuEventQuery(opened) == Success);
    Event late = nullptr;
    CHECK(cuda.cuIpcOpenEventHandle(&late, handle) == InvalidValue);
    CHECK(cuda.cuIpcOpenEventHandle(&late, IpcEventHandle{}) == 205); // CUDA_ERROR_MAP_FAILED
    CHECK(cuda.cuEventDestroy(opened) == Success);
    const Event reuse = make_event(kShared);
    CHECK(cuda.cuIpcOpenEventHandle(&late, handle) == InvalidValue);
    CHECK(cuda.cuEventDestroy(reuse) == Success);
    IpcEventHandle none = {};
    REQUIRE(cuda.cuIpcOpenEventHandle(&opened, handle_of(make_event(kShared))) == Success);
    CHECK(cuda.cuIpcGetEventHandle(&none, opened) == InvalidHandle);
    CHECK(cuda.cuIpcGetEventHandle(&none, make_event()) == InvalidHandle);
  });
}

TEST_CASE("S5: an event recorded behind the work of a killed process is never done") {
  Machine machine;
  Link link;
  Link control;
  Child recorder([&] {
    const Driver& cuda = start();
    const Event event = open_event(link.right());
    const Stream stream = make_stream();
    CHECK(cuda.stream_delay(stream, 1'000'000'000) == Success);
    CHECK(cuda.cuEventRecord(event, stream) == Success);
    link.right().say(1);
    ::pause();
  });
  Child waiter([&] {
    const Driver& cuda = start();
    const Event event = make_event(kShared);
    send_event(link.left(), event);
    CHECK(link.left().hear() == 1);
    const Stream stream = make_stream();
    CHECK(cuda.cuStreamWaitEvent(stream, event, 0) == Success);
    control.left().say(2);
    CHECK(control.left().hear() == 3);
    CHECK(cuda.cuEventQuery(event) == NotReady);
    CHECK(cuda.cuStreamQuery(stream) == NotReady);
    // Recording again is no way back: the new record stands behind the lost one.
    const Stream other = make_stream();
    CHECK(cuda.cuEventRecord(event, other) == Success);
    CHECK(cuda.cuStreamSynchronize(make_stream()) == Success);
    CHECK(cuda.cuEventQuery(event) == NotReady);
    CHECK(cuda.cuStreamQuery(other) == NotReady);
  });
  CHECK(control.right().hear() == 2);
  recorder.kill();
  control.right().say(3);
  waiter.finish();
}

// R16
TEST_CASE("S7, S11: an event that was never recorded counts as done, and a wait for it is none") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    for (const unsigned flags : {0U + EventDisableTiming, kShared}) {
      const Event event = make_event(flags);
      const Stream stream = make_stream();
      CHECK(cuda.cuEventQuery(event) == Success);
      CHECK(cuda.cuEventSynchronize(event) == Success);
      CHECK(cuda.cuStreamWaitEvent(stream, event, 0) == Success);
      CHECK(cuda.cuStreamQuery(stream) == Success);
    }
  });
}

// R18
TEST_CASE("a machine has 4096 interprocess events, and those of the dead are used again") {
  Machine machine;
  Link link;
  Child hoarder([&] {
    const Driver& cuda = start();
    for (int count = 0; count < 4096; ++count) static_cast<void>(make_event(kShared));
    Event more = nullptr;
    CHECK(cuda.cuEventCreate(&more, kShared) == OutOfMemory);
    CHECK(cuda.cuEventCreate(&more, EventDisableTiming) == Success);
    link.left().say(1);
    ::pause();
  });
  CHECK(link.right().hear() == 1);
  in_child([] {
    start();
    Event event = nullptr;
    CHECK(driver().cuEventCreate(&event, kShared) == OutOfMemory);
  });
  hoarder.kill();
  in_child([] {
    start();
    const Event event = make_event(kShared);
    CHECK(driver().cuEventQuery(event) == Success);
  });
}
