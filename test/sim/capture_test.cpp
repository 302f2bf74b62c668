// SPDX-License-Identifier: MIT
//
// Stream capture as a bystander meets it.
#include "child.hpp"
#include "driver.hpp"

#include <thread>

using namespace sim_test;

namespace {

int capture_status(Stream stream) {
  int status = -1;
  REQUIRE(driver().cuStreamIsCapturing(stream, &status) == Success);
  return status;
}

CuResult end_capture(Stream stream) {
  void* graph = nullptr;
  return driver().cuStreamEndCapture(stream, &graph);
}

} // namespace

TEST_CASE("work on a capturing stream is not run") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream stream = make_stream();
    DevicePtr device = 0;
    REQUIRE(cuda.cuMemAlloc(&device, 4) == Success);
    CHECK(capture_status(stream) == CaptureNone);
    CHECK(end_capture(stream) == IllegalState);
    CHECK(cuda.cuStreamBeginCapture(stream, CaptureRelaxed) == Success);
    CHECK(cuda.cuStreamBeginCapture(stream, CaptureRelaxed) == IllegalState);
    CHECK(capture_status(stream) == CaptureActive);
    CHECK(cuda.cuMemsetD32Async(device, 1, 1, stream) == Success);
    CHECK(end_capture(stream) == Success);
    CHECK(capture_status(stream) == CaptureNone);
    CHECK(cuda.cuStreamQuery(stream) == Success);
    CHECK(read_word(device) == 0);
    CHECK(cuda.cuStreamBeginCapture(nullptr, CaptureGlobal) == StreamCaptureUnsupported);
  });
}

TEST_CASE("a query or a synchronisation of a capturing stream invalidates the capture") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream stream = make_stream();
    for (const auto call : {cuda.cuStreamQuery, cuda.cuStreamSynchronize}) {
      CHECK(cuda.cuStreamBeginCapture(stream, CaptureRelaxed) == Success);
      CHECK(call(stream) == StreamCaptureUnsupported);
      CHECK(capture_status(stream) == CaptureInvalidated);
      CHECK(cuda.stream_delay(stream, 0) == StreamCaptureInvalidated);
      CHECK(end_capture(stream) == StreamCaptureInvalidated);
      CHECK(call(stream) == Success);
    }
  });
}

TEST_CASE("waiting for the whole context invalidates every capture in it") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream stream = make_stream();
    CHECK(cuda.cuStreamBeginCapture(stream, CaptureRelaxed) == Success);
    CHECK(cuda.cuCtxSynchronize() == StreamCaptureUnsupported);
    CHECK(end_capture(stream) == StreamCaptureInvalidated);
    CHECK(cuda.cuCtxSynchronize() == Success);
  });
}

TEST_CASE("the legacy stream and a capture of a blocking stream do not go together") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    const Stream blocking = make_stream(StreamDefault);
    DevicePtr device = 0;
    REQUIRE(cuda.cuMemAlloc(&device, 4) == Success);
    CHECK(cuda.cuStreamBeginCapture(blocking, CaptureRelaxed) == Success);
    int status = -1;
    CHECK(cuda.cuStreamIsCapturing(nullptr, &status) == StreamCaptureImplicit);
    CHECK(capture_status(blocking) == CaptureActive);
    CHECK(cuda.cuMemsetD32Async(device, 1, 1, nullptr) == StreamCaptureImplicit);
    CHECK(capture_status(blocking) == CaptureInvalidated);
    CHECK(end_capture(blocking) == StreamCaptureInvalidated);
    const Stream free_stream = make_stream(StreamNonBlocking);
    CHECK(cuda.cuStreamBeginCapture(free_stream, CaptureRelaxed) == Success);
    CHECK(cuda.cuMemsetD32Async(device, 1, 1, nullptr) == Success);
    CHECK(capture_status(nullptr) == CaptureNone);
    CHECK(end_capture(free_stream) == Success);
  });
}

TEST_CASE("a global capture forbids unsafe calls to threads that are not relaxed") {
  Machine machine;
  in_child([] {
    const Driver& cuda = start();
    Context context = nullptr;
    REQUIRE(cuda.cuCtxGetCurrent(&context) == Success);
    const Stream stream = make_stream();
    const Event event = make_event();
    const auto in_thread = [&](int mode, CuResult expected) {
      std::thread([&] {
        REQUIRE(cuda.cuCtxPushCurrent(context) == Success);
        int previous = mode;
        CHECK(cuda.cuThreadExchangeStreamCaptureMode(&previous) == Success);
        CHECK(previous == CaptureGlobal);
        CHECK(cuda.cuEventQuery(event) == expected);
      }).join();
    };
    CHECK(cuda.cuStreamBeginCapture(stream, CaptureGlobal) == Success);
    in_thread(CaptureRelaxed, Success);
    in_thread(CaptureThreadLocal, Success);
    CHECK(capture_status(stream) == CaptureActive);
    in_thread(CaptureGlobal, StreamCaptureUnsupported);
    CHECK(capture_status(stream) == CaptureInvalidated);
    CHECK(end_capture(stream) == StreamCaptureInvalidated);
    CHECK(cuda.cuStreamBeginCapture(stream, CaptureThreadLocal) == Success);
    in_thread(CaptureGlobal, Success);
    CHECK(cuda.cuEventQuery(event) == StreamCaptureUnsupported); // on the thread that captures
    CHECK(end_capture(stream) == StreamCaptureInvalidated);
    CHECK(cuda.cuEventQuery(event) == Success);
  });
}
