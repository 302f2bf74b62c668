// SPDX-License-Identifier: MIT
//
// The host rung's other forms: pages that both sides work on in place, a side that wants host memory, a worker without a
// device, and bytes that lie anywhere.
#include "suite.hpp"

#include "../support/pattern.hpp"

namespace loan_test {
namespace {

constexpr std::uint64_t kHostBytes = 300'007;

} // namespace

const char* only_host_rung(const Bench& bench) {
  return bench.cell.rung == GPULOAN_RUNG_HOST ? nullptr : "a form of the host rung";
}

const char* no_cpu_worker(const Bench& bench) {
  if (bench.cell.gate == GPULOAN_GATE_EVENT) return "a side without a device has no events";
  return only_host_rung(bench);
}

// Device memory that the worker wants to see as host memory: one DMA each way, no further copy.
static void segment(const Bench& bench, gpuloan_peer* peer, Worker& worker) {
  const Region region(peer, kHostBytes);
  bench.gpu.upload(region.pointer(), kHostBytes, 1);
  const Lent read = lend(bench, peer, region, {.memory = GPULOAN_MEMORY_HOST});
  Borrowed reader = worker.offered(read);
  expect_equal(reader.acquire().host, 1, "the view has a host address");
  reader.check(1);
  reader.done(kCpuStream);
  read.ended();
  expect_equal(read.report().copied_bytes, kHostBytes, "copied bytes");
  expect_equal(read.report().memory, GPULOAN_MEMORY_HOST, "report.memory");
  expect_steps(read.report());
  const Lent write = lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE, .memory = GPULOAN_MEMORY_HOST});
  Borrowed writer = worker.offered(write);
  writer.acquire();
  writer.fill(2);
  writer.done(kCpuStream);
  write.done();
  expect_pattern(bench, region.pointer(), kHostBytes, 2);
  write.ended();
  gpuloan_loan* none = nullptr;
  const LendArgs strict = {.memory = GPULOAN_MEMORY_HOST, .policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY};
  expect_status(try_lend(bench, peer, region.pointer(), kHostBytes, strict, &none), GPULOAN_ERR_NO_RUNG, "a copy under require zero-copy");
  expect_contains(gpuloan_error_text(), "zero-copy", "the text of NO_RUNG");
}

// Host pages of the arena: both sides work on the same ones.
static void in_place(const Bench& bench, gpuloan_peer* peer, Worker& worker) {
  const Region region(peer, kHostBytes, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_HOST);
  auto* host = static_cast<unsigned char*>(gpuloan_region_host(region.get()));
  expect(host != nullptr, "a host region has no host address");
  write_pattern({host, kHostBytes}, 3);
  const auto address = region.pointer() != 0 ? region.pointer() : reinterpret_cast<std::uint64_t>(host);
  const LendArgs args = {.access = GPULOAN_ACCESS_WRITE, .memory = GPULOAN_MEMORY_HOST, .policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY};
  const Lent lent = lend(bench, peer, address, kHostBytes, args);
  Borrowed loan = worker.offered(lent);
  expect_equal(loan.acquire().host, 1, "the view has a host address");
  loan.check(3);
  loan.fill(4);
  loan.done(kCpuStream);
  lent.ended();
  expect(pattern_mismatch({host, kHostBytes}, 4) == kHostBytes, "the worker's bytes are not in the host region");
  expect_equal(lent.report().copied_bytes, 0U, "copied bytes");
}

// K4
void host_memory(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  segment(bench, peer, worker);
  in_place(bench, peer, worker);
  Borrowed wish = worker.request(kHostBytes, 0, 0, GPULOAN_MEMORY_HOST);
  const Granted granted = grant(bench, exporter.event(GPULOAN_EVENT_REQUEST).request, {});
  expect_equal(wish.acquire().host, 1, "the view has a host address");
  wish.fill(5);
  wish.done(kCpuStream);
  granted.loan.ended();
  expect_pattern(bench, granted.region.pointer(), kHostBytes, 5);
  expect(gpuloan_region_host(granted.region.get()) == nullptr, "the result is not device memory");
  const Region pages(peer, kHostBytes, GPULOAN_ACCESS_WRITE, GPULOAN_MEMORY_HOST); // in place instead
  auto* host = static_cast<unsigned char*>(gpuloan_region_host(pages.get()));
  Borrowed next = worker.request(kHostBytes, 0, 0, GPULOAN_MEMORY_HOST);
  gpuloan_loan* with = nullptr;
  gpuloan_request* request = exporter.event(GPULOAN_EVENT_REQUEST).request;
  expect_ok(gpuloan_request_grant_with(request, reinterpret_cast<std::uint64_t>(host), nullptr, &with), "gpuloan_request_grant_with");
  const Lent in_place_result(with);
  expect_equal(next.acquire().host, 1, "the view has a host address");
  next.fill(6);
  next.done(kCpuStream);
  in_place_result.ended();
  expect(pattern_mismatch({host, kHostBytes}, 6) == kHostBytes, "the worker's bytes are not in the host region");
  expect_equal(in_place_result.report().copied_bytes, 0U, "copied bytes");
  worker.close();
}

// D10. No driver is loaded on the worker's side; its CPU reads and writes.
void cpu_worker(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench, {.flags = OpenNoDevice});
  gpuloan_peer* peer = exporter.attach(worker);
  auto info = init<gpuloan_peer_info>();
  expect_ok(gpuloan_peer_info_get(peer, &info), "gpuloan_peer_info_get");
  expect_equal(info.has_device, 0U, "has_device");
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, kHostBytes, std::uint64_t{5} << 20}) {
    const Region region(peer, bytes);
    bench.gpu.upload(region.pointer(), bytes, 1);
    const Lent lent = lend(bench, peer, region, {});
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.check(1);
    loan.done(kCpuStream);
    lent.ended();
    Borrowed wish = worker.request(bytes);
    const Granted granted = grant(bench, exporter.event(GPULOAN_EVENT_REQUEST).request, {});
    wish.acquire();
    wish.fill(2);
    wish.done(kCpuStream);
    granted.loan.ended();
    expect_pattern(bench, granted.region.pointer(), bytes, 2);
  }
  worker.close();
}

// Memory that gpuloan did not allocate.
void foreign_pointer(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const std::uint64_t pointer = bench.gpu.alloc(kHostBytes);
  bench.gpu.upload(pointer, kHostBytes, 1);
  {
    const Lent read = lend(bench, peer, pointer, kHostBytes, {});
    Borrowed reader = worker.offered(read);
    reader.acquire();
    reader.check(1);
    gpuloan_loan* none = nullptr;
    const LendArgs write_args = {.access = GPULOAN_ACCESS_WRITE};
    expect_status(try_lend(bench, peer, pointer + 5, 10, write_args, &none), GPULOAN_ERR_BUSY, "write under read");
    reader.done();
    read.ended();
    const Lent write = lend(bench, peer, pointer + 5, kHostBytes - 5, write_args);
    Borrowed writer = worker.offered(write);
    writer.acquire();
    writer.fill(2);
    writer.done();
    write.ended();
    expect_pattern(bench, pointer + 5, kHostBytes - 5, 2);
    expect_status(try_lend(bench, peer, pointer, kHostBytes * 1000, {}, &none), GPULOAN_ERR_INVALID, "a range that leaves the allocation");
  }
  bench.gpu.free(pointer);
  worker.close();
}

// Handles that nobody dropped end with their context.
void handles_left_behind(const Bench& bench) {
  Exporter exporter(bench);
  Worker worker(bench, {.flags = OpenKeepHandles});
  gpuloan_peer* peer = exporter.attach(worker);
  Region region(peer, kHostBytes);
  Region unused(peer, kHostBytes);
  Lent held = lend(bench, peer, region, {});
  Lent ended = lend(bench, peer, region, {});
  Borrowed loan = worker.offered(ended);
  loan.acquire();
  loan.done();
  ended.ended();
  worker.offered(held).acquire();
  static_cast<void>(worker.request(kHostBytes));
  static_cast<void>(exporter.event(GPULOAN_EVENT_REQUEST));
  exporter.destroy();
  worker.close();
  for (Lent* lent : {&held, &ended}) lent->forget();
  region.forget();
  unused.forget();
}

} // namespace loan_test
