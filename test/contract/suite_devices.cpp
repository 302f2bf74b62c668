// SPDX-License-Identifier: MIT
//
// Which device is meant: the two sides see the machine's devices in other orders, or not all of them, and work on the same
// one or on two. Every device has bytes of its own, so that a loan which lands on another one shows.
#include "suite_devices.hpp"

#include <cstdlib>
#include <sstream>

namespace loan_test {
namespace {

constexpr std::uint64_t kDevicesBytes = (std::uint64_t{2} << 20) + 4099;

Cell all_rungs(Cell cell) {
  cell.rung = GPULOAN_RUNG_NONE; // all are allowed
  return cell;
}

void see(const char* visible) { // of the workers that are started from now on
  if (visible != nullptr) ::setenv("CUDA_VISIBLE_DEVICES", visible, 1);
  else ::unsetenv("CUDA_VISIBLE_DEVICES");
}

// A block of cuMemAlloc memory of the test's own.
struct Block {
  Block(Gpu& owner, std::uint64_t size) : gpu(owner), bytes(size), pointer(owner.alloc(size)) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { gpu.free(pointer); }
  Gpu& gpu;
  const std::uint64_t bytes, pointer;
};

// A read loan and a write loan of `pointer`: the worker finds the bytes, changes them, and its pointer lies on the device
// with that UUID. The report of the first.
gpuloan_loan_report there_and_back(const Bench& bench, gpuloan_peer* peer, Worker& worker, std::uint64_t pointer, std::uint64_t seed,
                                   const std::string& uuid, Where where = Where::current()) {
  bench.gpu.upload(pointer, kDevicesBytes, seed);
  const Lent read = lend(bench, peer, pointer, kDevicesBytes, {}, where);
  Borrowed reading = worker.offered(read, where);
  reading.acquire(where);
  reading.check(seed, 0, where);
  if (!uuid.empty()) expect(reading.device_of(where).text == uuid, "the view lies on " + std::string(reading.device_of(where).text) + ", not on " + uuid, where);
  reading.done(0, where);
  read.ended(GPULOAN_OK, where);
  const Lent write = lend(bench, peer, pointer, kDevicesBytes, {.access = GPULOAN_ACCESS_WRITE}, where);
  Borrowed writing = worker.offered(write, where);
  writing.acquire(where);
  writing.fill(seed + 1000, 0, where);
  writing.done(0, where);
  write.ended(GPULOAN_OK, where);
  expect_pattern(bench, pointer, kDevicesBytes, seed + 1000, 0, where);
  return read.report(where);
}

void expect_direct(const gpuloan_loan_report& report, gpuloan_rung rung, Where where = Where::current()) {
  expect(report.rung == static_cast<std::uint32_t>(rung), std::string("the loan went over ") + gpuloan_rung_name(report.rung) + ": " + report.rung_reason, where);
  expect_equal(report.copied_bytes, 0U, "copied bytes", where);
}

// The arena's memory, and the caller's own.
// Where a block lies that was opened on a peer of its device, a real driver was not asked yet: `across`.
void expect_all_direct(const Bench& bench, gpuloan_peer* peer, Worker& worker, std::uint64_t seed, const std::string& uuid, bool across = false,
                       Where where = Where::current()) {
  Region region(peer, kDevicesBytes);
  expect_direct(there_and_back(bench, peer, worker, region.pointer(), seed, uuid, where), GPULOAN_RUNG_VMM, where);
  region.destroy(where);
  const Block block(bench.gpu, kDevicesBytes);
  expect_direct(there_and_back(bench, peer, worker, block.pointer, seed + 1, across && !bench.gpu.simulated() ? "" : uuid, where), GPULOAN_RUNG_IPC, where);
}

// Refused without a copy, for a reason with these words; carried by the host rung otherwise.
void expect_apart(const Bench& bench, gpuloan_peer* peer, Worker& worker, std::uint64_t seed, std::string_view words, Where where = Where::current()) {
  const Region region(peer, kDevicesBytes);
  const Block block(bench.gpu, kDevicesBytes);
  for (const std::uint64_t pointer : {region.pointer(), block.pointer}) {
    gpuloan_loan* none = nullptr;
    const gpuloan_status status = try_lend(bench, peer, pointer, kDevicesBytes, {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY}, &none);
    expect_status(status, GPULOAN_ERR_NO_RUNG, "without a copy", where);
    expect_contains(gpuloan_error_text(), words, "the reason", where);
    const gpuloan_loan_report report = there_and_back(bench, peer, worker, pointer, seed++, "", where);
    expect_equal(report.rung, GPULOAN_RUNG_HOST, "rung", where);
    expect_contains(report.rung_reason, words, "the reason in the report", where);
  }
}

gpuloan_peer_info info_of(gpuloan_peer* peer) {
  auto info = init<gpuloan_peer_info>();
  expect_ok(gpuloan_peer_info_get(peer, &info), "gpuloan_peer_info_get");
  return info;
}

} // namespace

std::vector<std::string> machine_uuids() {
  const char* text = std::getenv(kUuidsVariable);
  std::istringstream words(text != nullptr ? text : "");
  std::vector<std::string> uuids;
  for (std::string word; words >> word;) uuids.push_back(word);
  return uuids;
}

// G1, G3: the exporter sees the devices 0 1, the worker 1 0.
void opposite_orders(const Cell& wanted) {
  const Cell cell = all_rungs(wanted);
  const std::string uuids[] = {uuid_of(cell.driver.c_str(), 0), uuid_of(cell.driver.c_str(), 1)};
  see("1,0");
  for (int ordinal = 0; ordinal < 2; ++ordinal) {
    Gpu gpu(cell.driver.c_str(), ordinal);
    const Bench bench{cell, gpu};
    const std::string& uuid = uuids[ordinal];
    expect(uuid == machine_uuids()[static_cast<std::size_t>(ordinal)], "device " + std::to_string(ordinal) + " is " + uuid);
    Exporter exporter(bench);
    Worker worker(bench, {.device = 1 - ordinal});
    gpuloan_peer* peer = exporter.attach(worker);
    expect_equal(info_of(peer).has_device, 1U, "the worker sees the device");
    const auto seed = static_cast<std::uint64_t>(10 * ordinal + 1);
    expect_all_direct(bench, peer, worker, seed, uuid);
    const Region region(peer, 64);
    const Lent lent = lend(bench, peer, region, {});
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    expect_equal(loan.device_of().value, static_cast<std::uint64_t>(1 - ordinal), "the worker's number of the device");
    loan.done();
    lent.ended();
    worker.close();
  }
}

// G2, G6: the exporter sees the machine's device 1 alone, as its device 0.
void subsets(const Cell& wanted) {
  const Cell cell = all_rungs(wanted);
  Gpu gpu(cell.driver.c_str());
  const Bench bench{cell, gpu};
  const std::string uuid = machine_uuids()[1];
  expect(uuid_of(cell.driver.c_str(), 0) == uuid, "the exporter sees another device");
  Exporter exporter(bench);
  {
    see("0,1");
    Worker worker(bench, {.device = 1});
    expect_all_direct(bench, exporter.attach(worker), worker, 1, uuid);
    worker.close();
  }
  {
    see("0");
    Worker worker(bench);
    gpuloan_peer* peer = exporter.attach(worker);
    expect_equal(info_of(peer).has_device, 0U, "the worker sees the device");
    expect_apart(bench, peer, worker, 20, "this one is not visible to it: " + uuid);
    worker.close();
  }
}

// G7: whatever stands in the variable, the driver is asked and the loan lands on the UUID.
void forms_of_the_variable(const Cell& wanted) {
  const Cell cell = all_rungs(wanted);
  const std::string first = machine_uuids()[0], second = machine_uuids()[1];
  Gpu gpu(cell.driver.c_str());
  const Bench bench{cell, gpu};
  Exporter exporter(bench);
  std::uint64_t seed = 1;
  const auto lands = [&](const std::string& visible, int device) {
    see(visible.c_str());
    Worker worker(bench, {.device = device});
    expect_all_direct(bench, exporter.attach(worker), worker, seed += 2, first);
    worker.close();
  };
  lands(first, 0);
  lands(first.substr(0, 12), 0); // "GPU-" and eight digits
  lands(second + "," + first, 1);
  lands("0," + second, 0); // forms are not mixed: what follows the first is not seen
  for (const char* nothing : {"", "-1"}) {
    if (!gpu.simulated() && *nothing == '\0') continue; // what it means depends on the driver
    see(nothing);
    expect_equal(Process({"--make-context", cell.driver}, {}).wait(), -GPULOAN_ERR_NO_DEVICE, "a context where no device is visible");
  }
  see("1");
  expect_equal(Process({"--make-context", cell.driver}, {}).wait(), 0, "a context where one is");
}

// G7: the exporter works in slice 2 of the first GPU.
void slices(const Cell& wanted) {
  const Cell cell = all_rungs(wanted);
  Gpu gpu(cell.driver.c_str());
  const Bench bench{cell, gpu};
  Exporter exporter(bench);
  const char* const own = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string uuid = own;
  {
    see(uuid.substr(0, 12).c_str());
    Worker worker(bench);
    expect_all_direct(bench, exporter.attach(worker), worker, 1, "GPU" + uuid.substr(3));
    worker.close();
  }
  see("0"); // slice 1 of the same GPU
  Worker worker(bench);
  expect_apart(bench, exporter.attach(worker), worker, 20, "this one is not visible to it: " + uuid);
  worker.close();
}

// G5: both ways, nothing is copied, and the bytes are those of the exporter's device.
void across_devices(const Cell& wanted) {
  const Cell cell = all_rungs(wanted); // both sides see the same devices in the same order
  for (int ordinal = 0; ordinal < 2; ++ordinal) {
    auto info = init<gpuloan_device_info>();
    expect_ok(gpuloan_device_probe(cell.driver.c_str(), 1 - ordinal, &info), "gpuloan_device_probe");
    if ((info.peers & (std::uint64_t{1} << ordinal)) == 0) throw Skip{"the devices of this machine have no peer access"};
    Gpu gpu(cell.driver.c_str(), ordinal);
    const Bench bench{cell, gpu};
    const std::string uuid = uuid_of(cell.driver.c_str(), ordinal);
    Exporter exporter(bench);
    Worker worker(bench, {.device = 1 - ordinal});
    gpuloan_peer* peer = exporter.attach(worker);
    expect_all_direct(bench, peer, worker, static_cast<std::uint64_t>(ordinal) * 10 + 1, uuid, true);

    Borrowed wish = worker.request(kDevicesBytes); // a result of the worker's, in the exporter's memory
    const Granted granted = grant(bench, exporter.event(GPULOAN_EVENT_REQUEST).request, {});
    wish.acquire();
    expect(wish.device_of().text == uuid, "the result lies on " + std::string(wish.device_of().text));
    wish.fill(77);
    wish.done();
    granted.loan.ended();
    expect_pattern(bench, granted.region.pointer(), kDevicesBytes, 77);
    worker.close();
  }
}

void without_peer_access(const Cell& wanted) {
  const Cell cell = all_rungs(wanted);
  see(nullptr);
  Gpu gpu(cell.driver.c_str());
  const Bench bench{cell, gpu};
  Exporter exporter(bench);
  Worker worker(bench, {.device = 1});
  gpuloan_peer* peer = exporter.attach(worker);
  expect_equal(info_of(peer).has_device, 1U, "the worker sees the device");
  expect_apart(bench, peer, worker, 1, "no peer access to this one: " + machine_uuids()[0]);
  worker.close();
}

// Device 1 reaches the memory of 0, and not the other way.
void one_way_access(const Cell& wanted) {
  const Cell cell = all_rungs(wanted);
  see(nullptr);
  {
    Gpu gpu(cell.driver.c_str(), 0);
    const Bench bench{cell, gpu};
    Exporter exporter(bench);
    Worker worker(bench, {.device = 1});
    expect_all_direct(bench, exporter.attach(worker), worker, 1, machine_uuids()[0]);
    worker.close();
  }
  Gpu gpu(cell.driver.c_str(), 1);
  const Bench bench{cell, gpu};
  Exporter exporter(bench);
  Worker worker(bench, {.device = 0});
  expect_apart(bench, exporter.attach(worker), worker, 20, "no peer access to this one: " + machine_uuids()[1]);
  worker.close();
}

// G4: memory of device 1, from threads whose current context is that of device 0, none, and its own.
void callers_contexts(const Cell& wanted) {
  const Cell cell = all_rungs(wanted);
  see(nullptr);
  Gpu other(cell.driver.c_str(), 0);
  Gpu gpu(cell.driver.c_str(), 1);
  const Bench bench{cell, gpu};
  const std::string uuid = machine_uuids()[1];
  static_cast<void>(gpu.stream());
  for (const cuda::Context current : {other.context(), cuda::Context{nullptr}, gpu.context()}) {
    std::unique_ptr<Exporter> exporter;
    const auto meant = [](gpuloan_context_options& options) {
      options.device = 1;
      options.flags = GPULOAN_CONTEXT_DEVICE;
    };
    gpuloan_peer* peer = nullptr;
    Worker worker(bench, {.flags = OpenBare, .device = 1});
    const Block block(gpu, kDevicesBytes);
    gpu.upload(block.pointer, kDevicesBytes, 5);
    gpu.sync();
    std::unique_ptr<Region> region;
    std::unique_ptr<Lent> lent;
    {
      const OtherContext there(gpu, current);
      exporter = std::make_unique<Exporter>(bench, meant);
      peer = exporter->attach(worker);
      region = std::make_unique<Region>(peer, kDevicesBytes);
    }
    {
      const OtherContext there(gpu, current);
      lent = std::make_unique<Lent>(lend(bench, peer, block.pointer, kDevicesBytes, {.access = GPULOAN_ACCESS_WRITE, .keep_open = true}));
    }
    Borrowed loan = worker.offered(*lent);
    loan.acquire();
    loan.check(5);
    expect(loan.device_of().text == uuid, "the view lies on " + std::string(loan.device_of().text));
    loan.fill(6);
    loan.done();
    {
      const OtherContext there(gpu, current);
      lent->done();
      expect_ok(gpuloan_loan_ready(lent->get(), gpu.stream()), "gpuloan_loan_ready");
    }
    loan.acquire();
    loan.check(6);
    loan.done();
    {
      const OtherContext there(gpu, current);
      lent->done();
      expect_ok(gpuloan_reclaim(lent->get(), kWaitMs), "gpuloan_reclaim");
      expect_direct(lent->report(), GPULOAN_RUNG_IPC);
      lent.reset();
    }
    gpu.upload(region->pointer(), kDevicesBytes, 8);
    gpu.sync();
    {
      const OtherContext there(gpu, current);
      lent = std::make_unique<Lent>(lend(bench, peer, region->pointer(), kDevicesBytes, {}));
    }
    Borrowed reading = worker.offered(*lent);
    reading.acquire();
    reading.check(8);
    reading.done();
    {
      const OtherContext there(gpu, current);
      lent->ended();
      expect_direct(lent->report(), GPULOAN_RUNG_VMM);
      lent.reset();
      region.reset();
      worker.close();
      exporter.reset();
    }
  }

  // Memory of another device than the context's is not taken for its own.
  Exporter exporter(bench);
  Worker worker(bench, {.device = 1});
  gpuloan_peer* peer = exporter.attach(worker);
  std::uint64_t wrong = 0;
  {
    const OtherContext there(gpu, other.context());
    wrong = other.alloc(kDevicesBytes);
  }
  gpuloan_loan* none = nullptr;
  expect_status(try_lend(bench, peer, wrong, kDevicesBytes, {}, &none), GPULOAN_ERR_INVALID, "lending device 0's memory from a context for device 1");
  expect_contains(gpuloan_error_text(), "is memory of device 0, the context works on device 1 (" + uuid, "the reason");
  other.free(wrong);
  worker.close();
}

// Memory, limits and numbers of two devices in one process do not mix.
void a_context_per_device(const Cell& wanted) {
  const Cell cell = all_rungs(wanted);
  constexpr std::uint64_t kRegion = std::uint64_t{6} << 20;
  see(nullptr);
  Gpu first(cell.driver.c_str(), 0);
  Gpu second(cell.driver.c_str(), 1);
  const Bench benches[] = {{cell, first}, {cell, second}};
  const auto limited = [](int device) {
    return [device](gpuloan_context_options& options) {
      options.device = device;
      options.flags = GPULOAN_CONTEXT_DEVICE;
      options.account_bytes = std::uint64_t{8} << 20;
    };
  };
  Exporter exporters[] = {Exporter(benches[0], limited(0)), Exporter(benches[1], limited(1))};
  Worker workers[] = {Worker(benches[0], {.device = 0}), Worker(benches[1], {.device = 1})};
  gpuloan_peer* const peers[] = {exporters[0].attach(workers[0], "worker"), exporters[1].attach(workers[1], "worker")};
  const auto used = [&](Gpu& gpu) {
    const OtherContext there(second, gpu.context());
    return gpu.used_bytes();
  };
  const std::uint64_t before[] = {used(first), used(second)};
  Region region(peers[1], kRegion);
  expect_equal(exporters[1].stats().live_bytes, kRegion, "live bytes of the second");
  expect_equal(exporters[0].stats().live_bytes, 0U, "live bytes of the first");
  if (first.simulated()) {
    expect_equal(used(second) - before[1], kRegion, "bytes taken of the second device");
    expect_equal(used(first) - before[0], 0U, "bytes taken of the first device");
  }
  auto options = init<gpuloan_region_options>();
  options.bytes = kRegion;
  options.access = GPULOAN_ACCESS_WRITE;
  gpuloan_region* more = nullptr;
  expect_status(gpuloan_region_create(peers[1], &options, &more), GPULOAN_ERR_LIMIT, "over the account's limit on the second");
  Region fits(peers[0], kRegion); // the account of the same name on the first is another one
  expect_equal(first.device_of(fits.pointer()), 0, "device of the first's region");
  expect_equal(first.device_of(region.pointer()), 1, "device of the second's region");
  fits.destroy();
  region.destroy();
  for (Worker& worker : workers) worker.close();
}

// G9: vmm is an alias, ipc is refused, and what is lent is right either way.
void one_process(const Cell& wanted) {
  const Cell cell = all_rungs(wanted);
  see(nullptr);
  Gpu gpu(cell.driver.c_str());
  const Bench bench{cell, gpu, Habitat::Thread};
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  Region region(peer, kDevicesBytes);
  expect_direct(there_and_back(bench, peer, worker, region.pointer(), 1, ""), GPULOAN_RUNG_VMM);
  region.destroy();
  {
    const Block block(gpu, kDevicesBytes);
    gpuloan_loan* none = nullptr;
    expect_status(try_lend(bench, peer, block.pointer, kDevicesBytes, {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY}, &none), GPULOAN_ERR_NO_RUNG, "ipc in one process");
    expect_contains(gpuloan_error_text(), "one process, which cannot open its own legacy handles", "the reason");
    const gpuloan_loan_report report = there_and_back(bench, peer, worker, block.pointer, 3, "");
    expect_equal(report.rung, GPULOAN_RUNG_VMM, "rung of the copy");
    expect_equal(report.copied_bytes, kDevicesBytes, "copied bytes");
    const Lent host = lend(bench, peer, block.pointer, kDevicesBytes, {.rungs = GPULOAN_RUNG_HOST});
    Borrowed loan = worker.offered(host);
    loan.acquire();
    loan.check(1003);
    loan.done();
    host.ended();
  }
  worker.close();
}

// G10: an older driver says ALREADY_MAPPED where another library of the worker has opened the block.
void opened_by_others(const Cell& wanted) {
  const Cell cell = all_rungs(wanted);
  see(nullptr);
  Gpu gpu(cell.driver.c_str());
  const Bench bench{cell, gpu};
  ::setenv("GPULOAN_SIM_FAIL", "cuIpcOpenMemHandle:2:208", 1); // the first opening is the canary's
  Exporter exporter(bench);
  Worker worker(bench);
  gpuloan_peer* peer = exporter.attach(worker);
  const Block block(gpu, kDevicesBytes);
  const Lent lent = lend(bench, peer, block.pointer, kDevicesBytes, {});
  Borrowed loan = worker.offered(lent);
  const Reply reply = loan.try_acquire(kWaitMs);
  expect_status(reply.status, GPULOAN_ERR_DRIVER, "acquire");
  expect_contains(reply.text, "something else in this process has opened this block", "the reason");
  expect_contains(reply.text, "CUDA_ERROR_ALREADY_MAPPED (208)", "the reason");
  lent.ended(GPULOAN_ERR_DRIVER);
  expect_equal(worker.calls("cuIpcCloseMemHandle"), 1, "closings: the canary's alone");
  expect_direct(there_and_back(bench, peer, worker, block.pointer, 5, ""), GPULOAN_RUNG_IPC); // the other one has closed it
  expect_equal(worker.calls("cuIpcCloseMemHandle"), 3, "closings");
  worker.close();
}

// G11: what a probe says before any loan, what a loan says, and what works all the same.
void exclusive_process(const Cell& wanted) {
  const Cell cell = all_rungs(wanted);
  see(nullptr);
  auto info = init<gpuloan_device_info>();
  expect_ok(gpuloan_device_probe(cell.driver.c_str(), 0, &info), "gpuloan_device_probe");
  expect_equal(info.compute_mode, 3, "compute mode");
  Gpu gpu(cell.driver.c_str());
  const Bench bench{cell, gpu};
  Exporter exporter(bench);
  {
    Worker worker(bench, {.flags = OpenLate});
    gpuloan_peer* peer = exporter.attach(worker);
    const Region region(peer, kDevicesBytes);
    const Block block(gpu, kDevicesBytes);
    for (const std::uint64_t pointer : {region.pointer(), block.pointer}) {
      gpuloan_loan* none = nullptr;
      expect_status(try_lend(bench, peer, pointer, kDevicesBytes, {}, &none), GPULOAN_ERR_NO_RUNG, "a loan to a second process");
      expect_contains(gpuloan_error_text(), "exclusive-process mode", "the reason");
    }
    worker.close();
  }
  {
    Worker worker(bench, {.flags = OpenNoDevice});
    gpuloan_peer* peer = exporter.attach(worker);
    const Region region(peer, kDevicesBytes);
    gpu.upload(region.pointer(), kDevicesBytes, 4);
    const Lent lent = lend(bench, peer, region, {});
    Borrowed loan = worker.offered(lent);
    loan.acquire();
    loan.check(4);
    loan.done(kCpuStream);
    lent.ended();
    worker.close();
  }
  Worker worker(bench, {.device = 1}); // which is its own, and reaches the first
  expect_all_direct(bench, exporter.attach(worker), worker, 7, machine_uuids()[0]);
  worker.close();
}

} // namespace loan_test
