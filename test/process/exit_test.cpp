// SPDX-License-Identifier: MIT
//
// A process that ends by exit() with contexts, a held loan and a stuck stream: it ends at once and with its own code, also
// when the driver has said goodbye before (case B7). In one form its objects live on, in the other static destructors end them.
//
//   exit_test                  starts itself once for each form
//   exit_test leave|destroy used|gone
#include "../support/run.hpp"

#include <gpuloan/gpuloan.hpp>

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <memory>
#include <string_view>

namespace loan_test {
namespace {

constexpr std::uint64_t kBytes = 50'000;
constexpr int kExitCode = 42;
constexpr std::uint64_t kSoonMs = 5000; // a driver that is asked never answers; sanitizers and busy machines take their time

struct Scene {
  explicit Scene(const Bench& bench)
      : exporter(bench), worker(bench), peer(exporter.attach(worker)), region(peer, kBytes), held(lend(bench, peer, region, {.access = GPULOAN_ACCESS_WRITE})),
        open(lend(bench, peer, region_of(bench), {})), loan(worker.offered(held)) {
    loan.acquire();
    bench.gpu.hold(1);
    bench.gpu.upload(region.pointer(), kBytes, 2, 1); // behind it everything would wait
  }
  const Region& region_of(const Bench&) {
    other = std::make_unique<Region>(peer, kBytes);
    return *other;
  }
  Exporter exporter;
  Worker worker;
  gpuloan_peer* peer;
  Region region;
  std::unique_ptr<Region> other;
  Lent held, open;
  Borrowed loan;
};

// Left as they are; volatile, so that LeakSanitizer finds them here.
Gpu* volatile left_gpu;
const Bench* volatile left_bench;
Scene* volatile left_scene;

// The caller's own objects of the C++ interface, which its static destructors end.
gpuloan::Context static_context;

int end_with(std::string_view objects, std::string_view driver) {
  watchdog(60, "a process that ends");
  left_gpu = new Gpu("sim");
  left_bench = new Bench{Cell{}, *left_gpu, Habitat::Thread};
  left_scene = new Scene(*left_bench);
  if (objects == "destroy") {
    auto options = gpuloan::init<gpuloan_context_options>();
    options.role = GPULOAN_ROLE_EXPORTER;
    options.driver = "sim";
    static_context = gpuloan::Context::create(options);
    static_context.listen((std::string(std::getenv("GPULOAN_TEST_FOLDER")) + "/socket").c_str());
  }
  if (driver == "gone") {
    void* library = ::dlopen(std::getenv("GPULOAN_SIM_LIBRARY"), RTLD_NOW | RTLD_NOLOAD);
    expect(library != nullptr, "the simulated driver is not loaded");
    const auto deinitialize = reinterpret_cast<void (*)()>(::dlsym(library, "gpuloan_sim_deinitialize"));
    expect(deinitialize != nullptr, "gpuloan_sim_deinitialize");
    deinitialize();
  }
  std::exit(kExitCode);
}

int run_all() {
  const TempFolder folder("gpuloan-exit");
  use_private_sim(folder);
  expect(::setenv("GPULOAN_TEST_FOLDER", folder.path().c_str(), 1) == 0, "setenv");
  int failed = 0;
  for (const char* objects : {"leave", "destroy"}) {
    for (const char* driver : {"used", "gone"}) {
      Process process({objects, driver}, {});
      const std::uint64_t start = now_ms();
      const int status = process.wait();
      const std::uint64_t took = now_ms() - start;
      const bool good = status == kExitCode && took < kSoonMs;
      std::printf("%s objects %s, driver %s: exit status %d after %llu ms\n", good ? "ok" : "not ok", objects, driver, status, static_cast<unsigned long long>(took));
      failed += good ? 0 : 1;
    }
  }
  return failed == 0 ? 0 : 1;
}

int run(int count, char** words) { return count > 2 ? end_with(words[1], words[2]) : run_all(); }

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
