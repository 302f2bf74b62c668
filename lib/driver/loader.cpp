// SPDX-License-Identifier: MIT
//
// From an opened library to a Driver: resolve the table, call cuInit, refuse what cannot work, remember the rest.
//
// Symbols: cuGetProcAddress gives the function with the ABI of the version that symbols.inc declares. Without it, or
// where it does not know the name, dlsym of the exported name does: cuMemAlloc and cuMemAlloc_v2 are two ABIs, and the
// bare name is the old one (R20).
//
// The list of drivers is per process and never shrinks; it is locked while a driver starts, so two threads never
// initialise one driver at once. A forked child does not reach the lock (see lifetime.hpp) unless no driver was
// initialised before the fork; it then has a list of its own, since another thread may hold the parent's lock.
#include <driver/loader.hpp>

#include <base/fork.hpp>
#include <base/log.hpp>
#include <driver/lifetime.hpp>

#include <atomic>
#include <dlfcn.h>
#include <mutex>
#include <vector>

// Says in the ELF file that libcuda.so.1 is opened at run time, so that packagers and initrd builders know (the
// "dlopen metadata" note that systemd specifies). It lies in this file since every user of the driver links it; in
// assembly since sanitizers may pad a variable.
// clang-format off
asm(R"(
.pushsection .note.dlopen,"a",@note
.balign 4
.long 1f - 0f
.long 3f - 2f
.long 0x407c0c0a
0: .asciz "FDO"
1: .balign 4
2: .asciz "[{\"feature\":\"cuda\",\"description\":\"GPU memory through the NVIDIA driver\",\"priority\":\"recommended\",\"soname\":[\"libcuda.so.1\"]}]"
3: .balign 4
.popsection
)");
// clang-format on

namespace gpuloan::driver {
namespace {

using ProcAddress = CuResult (*)(const char* name, void** function, int version, std::uint64_t flags);
using ProcAddressV2 = CuResult (*)(const char* name, void** function, int version, std::uint64_t flags, int* found);

class Symbols {
 public:
  explicit Symbols(void* handle)
      : handle_(handle),
        by_version_(reinterpret_cast<ProcAddress>(::dlsym(handle, "cuGetProcAddress"))),
        by_version_v2_(reinterpret_cast<ProcAddressV2>(::dlsym(handle, "cuGetProcAddress_v2"))) {}

  [[nodiscard]] void* find(const char* name, const char* exported, int since) const {
    void* function = nullptr;
    int found = 0;
    CuResult code = NotFound;
    if (by_version_v2_ != nullptr) {
      code = by_version_v2_(name, &function, since, 0, &found);
    } else if (by_version_ != nullptr) {
      code = by_version_(name, &function, since, 0);
    }
    return code == Success && function != nullptr ? function : ::dlsym(handle_, exported);
  }

 private:
  void* handle_;
  ProcAddress by_version_;
  ProcAddressV2 by_version_v2_;
};

void resolve(Table& table, void* handle) {
  const Symbols symbols(handle);
#define GPULOAN_CUDA(need, since, group, name, exported, params)                                                       \
  table.name = reinterpret_cast<decltype(table.name)>(symbols.find(#name, #exported, since));
#include <driver/symbols.inc>
#undef GPULOAN_CUDA
}

struct Registry {
  const std::uint32_t generation = fork_generation();
  std::mutex mutex;
  struct Entry {
    void* handle;
    std::shared_ptr<const Driver> driver;
  };
  std::vector<Entry> entries;
};

Registry& registry() {
  static std::atomic<Registry*> current{nullptr};
  Registry* known = current.load(std::memory_order_acquire);
  while (known == nullptr || known->generation != fork_generation()) {
    auto* fresh = new Registry; // never destroyed
    if (current.compare_exchange_strong(known, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *known;
}

} // namespace

void Loader::note_missing(Driver& driver) {
  const auto lacks = [&driver](Group group, const char* name) {
    std::string& list = driver.missing_[static_cast<unsigned>(group)];
    list += (list.empty() ? "" : ", ") + std::string(name);
    driver.missing_mask_ |= 1U << static_cast<unsigned>(group);
  };
#define GPULOAN_CUDA(need, since, group, name, exported, params)                                                       \
  if (driver.call.name == nullptr) lacks(Group::group, #name);
#include <driver/symbols.inc>
#undef GPULOAN_CUDA
}

Result<std::shared_ptr<const Driver>> Loader::start(const Library& library) {
  auto driver = std::make_shared<Driver>();
  driver->path_ = loaded_path(library.handle);
  driver->found_by_ = library.found_by;
  // By a symbol, not by the name: the simulated driver may stand in as libcuda.so.1.
  driver->simulated_ = ::dlsym(library.handle, "gpuloan_sim_stream_delay") != nullptr;
  resolve(driver->call, library.handle);
  note_missing(*driver);
  const Table& call = driver->call;
  // The version does not need cuInit, and its failure is told by cuInit too.
  if (call.cuDriverGetVersion != nullptr && call.cuDriverGetVersion(&driver->version_) != Success) driver->version_ = 0;
  // cuInit before the check of symbols: an old toolkit's stub is a stub first.
  if (call.cuInit != nullptr) {
    claim_process();
    if (const CuResult code = call.cuInit(0); code != Success) return std::unexpected(startup_error(*driver, code));
  }
  GPULOAN_TRY(check_required(*driver));
  watch_exit();
  return driver;
}

Result<std::shared_ptr<const Driver>> Loader::load(const Library& library) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  for (const auto& entry : known.entries) {
    if (entry.handle == library.handle) return entry.driver;
  }
  auto driver = start(library);
  if (!driver) return driver;
  known.entries.push_back({library.handle, *driver});
  GPULOAN_LOG(GPULOAN_LOG_INFO, (*driver)->describe() + ", found by: " + (*driver)->found_by());
  return driver;
}

Result<std::shared_ptr<const Driver>> Driver::open(const char* choice) {
  GPULOAN_TRY(check_calls_allowed());
  auto library = open_library(choice);
  if (!library) return forward(std::move(library.error()));
  return Loader::load(*library);
}

std::shared_ptr<const Driver> Driver::wrap(const Table& table) {
  auto driver = std::make_shared<Driver>();
  driver->call = table;
  driver->path_ = "a table";
  driver->found_by_ = "wrapped";
  Loader::note_missing(*driver);
  if (table.cuDriverGetVersion != nullptr && table.cuDriverGetVersion(&driver->version_) != Success) driver->version_ = 0;
  claim_process();
  watch_exit();
  return driver;
}

} // namespace gpuloan::driver
