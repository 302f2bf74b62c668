// SPDX-License-Identifier: MIT
//
// rungs_test: every rung, chosen by arithmetic: by the room for a copy, and by the size that an importer of pool memory
// survives.
//
//   rungs_test [--driver sim|real|PATH] [--only TEXT]
//       as TAP. Exit status 0: passed, 1: failed, 77: this cannot run here.
//
// The worker is this program again (--worker).
#include "foreign_memory.hpp"

#include "../support/cell.hpp"
#include "../support/host.hpp"
#include "../support/run.hpp"
#include "../support/serve.hpp"

#include <gpuloan/gpuloan.hpp>

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/resource.h>

namespace loan_test {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint32_t kDefault = GPULOAN_RUNG_VMM | GPULOAN_RUNG_IPC | GPULOAN_RUNG_HOST;
constexpr std::uint32_t kAll = kDefault | GPULOAN_RUNG_POOL;

struct Scene {
  explicit Scene(const Bench& to, std::uint32_t rungs = kAll, std::uint64_t import_limit = 0)
      : bench(to),
        exporter(to, [=](auto& options) { options.rungs = rungs, options.pool_import_limit = import_limit; }),
        worker(to),
        peer(exporter.attach(worker)) {}
  const Bench& bench;
  Exporter exporter;
  Worker worker;
  gpuloan_peer* peer;
};

void touch(Scene& scene, const Borrowed& loan, Op op, std::uint64_t offset, std::uint64_t seed) {
  Command what = loan.command(op);
  what.value = offset;
  what.bytes = kPage;
  what.seed = seed;
  scene.worker.call(what);
}

// Lent for read and then for write, with another page touched at both ends of it and in the middle: all bytes cross in place
// or by a copy, but only these are looked at.
gpuloan_loan_report carry(Scene& scene, std::uint64_t pointer, std::uint64_t bytes, std::uint32_t rungs = 0) {
  const std::uint64_t places[] = {0, bytes / 2 / kPage * kPage, bytes - kPage};
  std::uint64_t seed = 1;
  for (const std::uint64_t place : places) scene.bench.gpu.upload(pointer + place, kPage, seed++);
  LendArgs args{.access = GPULOAN_ACCESS_READ, .rungs = rungs};
  const Lent read = lend(scene.bench, scene.peer, pointer, bytes, args);
  Borrowed reader = scene.worker.offered(read);
  expect_equal(reader.acquire().bytes, bytes, "view.bytes");
  seed = 1;
  for (const std::uint64_t place : places) touch(scene, reader, Op::Check, place, seed++);
  reader.done();
  read.ended();
  args.access = GPULOAN_ACCESS_WRITE;
  const Lent write = lend(scene.bench, scene.peer, pointer, bytes, args);
  Borrowed writer = scene.worker.offered(write);
  writer.acquire();
  seed = 11;
  for (const std::uint64_t place : places) touch(scene, writer, Op::Fill, place, seed++);
  writer.done();
  write.ended();
  seed = 11;
  for (const std::uint64_t place : places) expect_pattern(scene.bench, pointer + place, kPage, seed++);
  const gpuloan_loan_report report = write.report();
  expect_equal(read.report().rung, report.rung, "the rung of the read loan and of the write loan");
  return report;
}

// 16 GiB on a card of 24: source and destination of a copy do not fit at once.
void more_than_half_the_card(const Bench& bench) {
  constexpr std::uint64_t kBytes = 16 * kGiB;
  Scene scene(bench);
  const std::uint64_t pointer = bench.gpu.alloc(kBytes);
  std::size_t free = 0, total = 0;
  expect(bench.gpu.call.cuMemGetInfo(&free, &total) == cuda::Success && total == 24 * kGiB, "a card of 24 GiB");
  expect(free < kBytes, "there is room for a copy");
  gpuloan_loan* none = nullptr;
  const std::string room = "a copy needs " + std::to_string(kBytes) + " bytes of the device beside the original, ";
  for (const std::uint32_t rungs : {std::uint32_t{GPULOAN_RUNG_VMM}, std::uint32_t{GPULOAN_RUNG_HOST}, std::uint32_t{GPULOAN_RUNG_VMM | GPULOAN_RUNG_HOST}}) {
    const LendArgs args{.rungs = rungs};
    expect_status(try_lend(bench, scene.peer, pointer, kBytes, args, &none), GPULOAN_ERR_NO_RUNG, "16 GiB by a copy");
    expect_contains(gpuloan_error_text(), room, "the reason");
  }
  const gpuloan_loan_report report = carry(scene, pointer, kBytes);
  expect_equal(report.rung, GPULOAN_RUNG_IPC, "the rung that carries 16 GiB");
  expect_equal(report.copied_bytes, 0U, "report.copied_bytes");
  const std::uint64_t half = 4 * kMiB; // of which there is room for a copy
  expect_equal(carry(scene, pointer, half, GPULOAN_RUNG_VMM).copied_bytes, half, "report.copied_bytes of a part");
  bench.gpu.free(pointer);
  scene.worker.close();
}

const char* not_24_gib(const Bench& bench) {
  std::size_t free = 0, total = 0;
  static_cast<void>(bench.gpu.call.cuMemGetInfo(&free, &total));
  return total == 24 * kGiB ? nullptr : "the device has not 24 GiB";
}

// The device's current pool.
class Current {
 public:
  explicit Current(const Bench& bench) : bench_(bench) {
    void* library = ::dlopen(bench.gpu.info().path, RTLD_NOW | RTLD_LOCAL); // loaded already
    alloc_ = reinterpret_cast<decltype(alloc_)>(::dlsym(library, "cuMemAllocAsync"));
    free_ = reinterpret_cast<decltype(free_)>(::dlsym(library, "cuMemFreeAsync"));
    expect(alloc_ != nullptr && free_ != nullptr, "a driver with pools");
  }
  [[nodiscard]] std::uint64_t alloc(std::uint64_t bytes) const {
    cuda::DevicePtr pointer = 0;
    expect_equal(static_cast<int>(alloc_(&pointer, bytes, bench_.gpu.stream())), 0, "cuMemAllocAsync");
    bench_.gpu.sync();
    return pointer;
  }
  void free(std::uint64_t pointer) const {
    expect_equal(static_cast<int>(free_(pointer, bench_.gpu.stream())), 0, "cuMemFreeAsync");
    bench_.gpu.sync();
  }

 private:
  const Bench& bench_;
  CuResult (*alloc_)(cuda::DevicePtr*, std::size_t, cuda::Stream) = nullptr;
  CuResult (*free_)(cuda::DevicePtr, cuda::Stream) = nullptr;
};

void expect_way(const gpuloan_loan_report& report, gpuloan_rung rung, bool copied, Where where = Where::current()) {
  expect_equal(report.rung, rung, "report.rung", where);
  expect_equal(report.copied_bytes, copied ? report.bytes : 0, "report.copied_bytes", where);
}

// D5. What a framework that uses cuMemAllocAsync sees of the swap: memory from before, below the limit and above it.
void swapped_pool(const Bench& bench) {
  const Current current(bench);
  const std::uint64_t early = current.alloc(3 * kMiB);
  expect_ok(gpuloan_pool_install(0), "gpuloan_pool_install");
  expect_status(gpuloan_pool_install(0), GPULOAN_ERR_STATE, "gpuloan_pool_install again");
  Scene scene(bench, kAll, 4 * kMiB);
  expect_way(carry(scene, early, 3 * kMiB), GPULOAN_RUNG_VMM, true);
  const std::uint64_t fits = current.alloc(4 * kMiB), large = current.alloc(6 * kMiB);
  expect_way(carry(scene, fits, 4 * kMiB), GPULOAN_RUNG_POOL, false);
  expect_way(carry(scene, fits + kMiB + 512, 64 * kPage), GPULOAN_RUNG_POOL, false); // a view
  expect_way(carry(scene, large, 6 * kMiB), GPULOAN_RUNG_VMM, true);
  const gpuloan_loan_report view = carry(scene, large + kMiB, 64 * kPage); // a small view of what would kill the worker
  expect_way(view, GPULOAN_RUNG_VMM, true);
  expect_contains(view.rung_reason, "importing more than 4194304 at once kills the importer (the option pool_import_limit)", "report.rung_reason");
  for (const std::uint64_t pointer : {early, large}) current.free(pointer);
  expect_ok(gpuloan_pool_uninstall(0), "gpuloan_pool_uninstall");
  expect_way(carry(scene, fits, 4 * kMiB), GPULOAN_RUNG_POOL, false); // in use all the time
  const std::uint64_t late = current.alloc(3 * kMiB);
  expect_way(carry(scene, late, 3 * kMiB), GPULOAN_RUNG_VMM, true);
  for (const std::uint64_t pointer : {fits, late}) current.free(pointer);
  scene.worker.close();
  scene.exporter.destroy();
  expect_status(gpuloan_pool_uninstall(0), GPULOAN_ERR_STATE, "gpuloan_pool_uninstall again"); // gives the pool back as well
}

const char* no_pools(const Bench& bench) {
  auto device = init<gpuloan_device_info>();
  expect_ok(gpuloan_device_probe(bench.cell.driver.c_str(), 0, &device), "gpuloan_device_probe");
  return (device.floors & GPULOAN_FLOOR_POOLS) != 0 ? nullptr : "the device has no pools that can be shared";
}

// D5. Sizes about the limit, end to end: up to it in place, above it never, whatever part is lent.
void sizes_about_the_limit(const Bench& bench) {
  const Current current(bench);
  for (const std::uint64_t mebibytes : {5247U, 5248U, 5249U, 5264U, 6144U}) {
    const std::uint64_t bytes = mebibytes * kMiB;
    const gpuloan::InstalledPool pool = gpuloan::InstalledPool::install(0);
    Scene scene(bench);
    const std::uint64_t pointer = current.alloc(bytes);
    if (mebibytes <= 5248) {
      expect_way(carry(scene, pointer, bytes), GPULOAN_RUNG_POOL, false);
    } else {
      gpuloan_loan* none = nullptr;
      expect_status(try_lend(bench, scene.peer, pointer, bytes, {.policy = GPULOAN_POLICY_REQUIRE_ZERO_COPY}, &none), GPULOAN_ERR_NO_RUNG,
                    std::to_string(mebibytes) + " MiB without a copy");
      expect_contains(gpuloan_error_text(), "importing more than 5502926848 at once kills the importer (the default", "the reason");
      for (const std::uint64_t place : {std::uint64_t{0}, bytes - 64 * kPage}) {
        expect_way(carry(scene, pointer + place, 64 * kPage), GPULOAN_RUNG_VMM, true);
      }
    }
    current.free(pointer);
    scene.worker.close(); // which lives
  }
}

// While it lives, this process and those that it starts have few descriptors.
class FewDescriptors {
 public:
  FewDescriptors() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlimit few = before_;
    few.rlim_cur = 64;
    ::setrlimit(RLIMIT_NOFILE, &few);
  }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};

// D1. A thousand loans, each with memory, and so with a descriptor, of its own: one that stays behind at either side runs out.
void thousand_loans(const Bench& bench) {
  struct Kind {
    Made made;
    gpuloan_rung rung;
  };
  const FewDescriptors few;
  Scene scene(bench);
  unsigned loans = 0;
  while (loans < 1000) {
    for (const Kind kind : {Kind{Made::VmmOne, GPULOAN_RUNG_VMM}, Kind{Made::PoolShareable, GPULOAN_RUNG_POOL}, Kind{Made::Alloc, GPULOAN_RUNG_IPC}}) {
      const Foreign memory(bench, kind.made, {.bytes = 4 * kPage});
      expect_way(carry(scene, memory.pointer(), memory.bytes(), static_cast<std::uint32_t>(kind.rung)), kind.rung, false);
      loans += 2; // for read and for write
    }
  }
  scene.worker.close();
}

const char* not_simulated(const Bench& bench) {
  return bench.gpu.simulated() ? no_pools(bench) : "the real driver itself has many descriptors open";
}

// A limit that was measured holds for contexts made from then on that name none.
void measured_limit(const Bench& bench) {
  const Current current(bench);
  const char* driver = bench.cell.driver.c_str();
  gpuloan::InstalledPool pool = gpuloan::InstalledPool::install(0);
  const std::uint64_t pointer = current.alloc(6 * kMiB);
  {
    Scene before(bench);
    expect_way(carry(before, pointer, 6 * kMiB), GPULOAN_RUNG_POOL, false);
    before.worker.close();
  }
  expect_status(gpuloan_import_limit_remember(driver, 0, kMiB), GPULOAN_ERR_INVALID, "a limit of 1 MiB");
  expect_ok(gpuloan_import_limit_remember(driver, 0, 5 * kMiB), "gpuloan_import_limit_remember");
  auto device = init<gpuloan_device_info>();
  expect_ok(gpuloan_device_probe(driver, 0, &device), "gpuloan_device_probe");
  expect_equal(device.pool_import_limit, 4 * kMiB, "pool_import_limit of the device");
  expect_equal(device.pool_import_limit_source, GPULOAN_LIMIT_MEASURED, "pool_import_limit_source of the device");
  {
    Scene after(bench);
    const gpuloan_loan_report report = carry(after, pointer, 6 * kMiB);
    expect_way(report, GPULOAN_RUNG_VMM, true);
    expect_contains(report.rung_reason, "importing more than 4194304 at once kills the importer (measured on this device and driver)", "report.rung_reason");
    after.worker.close();
  }
  expect_ok(gpuloan_import_limit_remember(driver, 0, 0), "gpuloan_import_limit_remember of nothing");
  expect_ok(gpuloan_device_probe(driver, 0, &device), "gpuloan_device_probe");
  expect_equal(device.pool_import_limit, 0, "pool_import_limit of a device where nothing can be imported");
  expect_equal(device.pool_import_limit_source, GPULOAN_LIMIT_MEASURED, "its pool_import_limit_source");
  {
    Scene none(bench);
    const gpuloan_loan_report report = carry(none, pointer, 6 * kMiB);
    expect_way(report, GPULOAN_RUNG_VMM, true);
    expect_contains(report.rung_reason, "no memory of a pool can be imported by another process (measured on this device and driver)", "report.rung_reason");
    none.worker.close();
  }
  {
    Scene option(bench, kAll, 6 * kMiB);
    expect_way(carry(option, pointer, 6 * kMiB), GPULOAN_RUNG_POOL, false);
    option.worker.close();
  }
  current.free(pointer);
  gpuloan::InstalledPool moved = std::move(pool);
  pool = gpuloan::InstalledPool(); // nothing is its any more
  expect_status(gpuloan_pool_install(0), GPULOAN_ERR_STATE, "gpuloan_pool_install beside an InstalledPool");
  moved.uninstall();
  expect_status(gpuloan_pool_uninstall(0), GPULOAN_ERR_STATE, "gpuloan_pool_uninstall behind an InstalledPool");
}

constexpr Case kCases[] = {
    {"16 GiB on a card of 24", more_than_half_the_card, true, not_24_gib},
    {"a swapped pool", swapped_pool, true, no_pools},
    {"sizes about the import limit", sizes_about_the_limit, true, no_pools},
    {"a thousand loans with 64 descriptors", thousand_loans, true, not_simulated},
    {"a measured import limit", measured_limit, true, no_pools},
};

int run(int count, char** words) {
  Cell cell;
  cell.driver = default_driver();
  cell.rung = GPULOAN_RUNG_NONE; // all are allowed
  std::string only;
  for (int at = 1; at < count; ++at) {
    const std::string_view word = words[at];
    if (word == "--worker" && count - at > 2) {
      die_with_parent();
      const int control = std::atoi(words[at + 1]), loan_end = std::atoi(words[at + 2]);
      for (const int fd : {control, loan_end}) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
      return serve(control, loan_end, Habitat::Process);
    }
    if (word == "--only" && count - at > 1) only = words[++at];
    else if (word != "--rung" && count - at > 1 && take_cell_option(word, words[at + 1], cell)) ++at;
    else fail("the argument '" + std::string(word) + "' is not understood; the head of rungs_main.cpp lists them");
  }
  const TempFolder folder("gpuloan-rungs");
  use_private_sim(folder);
  ::setenv("XDG_CACHE_HOME", (folder.path() + "/cache").c_str(), 1);
  ::setenv("GPULOAN_DRIVER", cell.driver.c_str(), 1); // which the pool swap opens
  if (const std::string why = missing(cell); !why.empty()) {
    std::printf("1..0 # SKIP %s\n", why.c_str());
    return kSkipped;
  }
  Gpu gpu(cell.driver.c_str());
  std::printf("# %s driver at %s\n", gpu.simulated() ? "SIMULATED" : "real", gpu.info().path);
  gpu.warm_up();
  return run_cases({cell, gpu}, kCases, only).exit_status();
}

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
