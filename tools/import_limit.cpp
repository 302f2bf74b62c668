// SPDX-License-Identifier: MIT
#include "import_limit.hpp"

#include "child.hpp"
#include "commands.hpp"
#include "cuda.hpp"
#include "floor_rows.hpp"
#include "output.hpp"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>

namespace gpuloan::tool {
namespace {

constexpr std::uint64_t kUnit = std::uint64_t{2} << 20;
constexpr std::uint64_t kSecondSize = std::uint64_t{1} << 30;
constexpr std::uint64_t kLeftFree = std::uint64_t{1} << 30; // for the CUDA contexts of the children, and for others
constexpr std::uint64_t kNoise = std::uint64_t{64} << 20;
constexpr unsigned kConfirmations = 2;
constexpr unsigned char kFirst = 0xA5, kLast = 0x5A; // the bytes at both ends

struct PoolCalls {
  explicit PoolCalls(const Cuda& cuda) {
    cuda.find("cuMemPoolCreate", create);
    cuda.find("cuMemPoolDestroy", destroy);
    cuda.find("cuMemPoolExportToShareableHandle", export_pool);
    cuda.find("cuMemPoolImportFromShareableHandle", import_pool);
    cuda.find("cuMemPoolExportPointer", export_pointer);
    cuda.find("cuMemPoolImportPointer", import_pointer);
    cuda.find("cuMemAllocFromPoolAsync", allocate);
    cuda.find("cuMemFreeAsync", free);
    cuda.find("cuMemGetInfo_v2", memory);
  }
  cuda::CuResult (*create)(cuda::Pool*, const cuda::PoolProps*);
  cuda::CuResult (*destroy)(cuda::Pool);
  cuda::CuResult (*export_pool)(void*, cuda::Pool, int, unsigned long long);
  cuda::CuResult (*import_pool)(cuda::Pool*, void*, int, unsigned long long);
  cuda::CuResult (*export_pointer)(cuda::PoolPointer*, cuda::DevicePtr);
  cuda::CuResult (*import_pointer)(cuda::DevicePtr*, cuda::Pool, cuda::PoolPointer*);
  cuda::CuResult (*allocate)(cuda::DevicePtr*, std::size_t, cuda::Pool, cuda::Stream);
  cuda::CuResult (*free)(cuda::DevicePtr, cuda::Stream);
  cuda::CuResult (*memory)(std::size_t*, std::size_t*);
};

// One allocation in a pool of its own, exported.
class Exported {
 public:
  Exported(Cuda& cuda, const PoolCalls& calls, cuda::Device device, std::uint64_t bytes) : cuda_(cuda), calls_(calls) {
    try {
      make(device, bytes);
    } catch (...) {
      end();
      throw;
    }
  }
  Exported(const Exported&) = delete;
  Exported& operator=(const Exported&) = delete;
  ~Exported() { end(); }

  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] const cuda::PoolPointer& shared() const noexcept { return shared_; }
  void close_fd() noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  void make(cuda::Device device, std::uint64_t bytes) {
    cuda::PoolProps props = {};
    props.type = cuda::AllocationPinned;
    props.handle_types = cuda::HandlePosixFd;
    props.location = {cuda::LocationDevice, device};
    cuda_.check("cuMemPoolCreate", calls_.create(&pool_, &props));
    cuda_.check("cuMemAllocFromPoolAsync", calls_.allocate(&pointer_, bytes, pool_, cuda_.stream()));
    cuda_.fill8(pointer_, kFirst, 1);
    cuda_.fill8(pointer_ + bytes - 1, kLast, 1);
    cuda_.synchronize();
    cuda_.check("cuMemPoolExportToShareableHandle", calls_.export_pool(&fd_, pool_, cuda::HandlePosixFd, 0));
    if (::fcntl(fd_, F_SETFD, FD_CLOEXEC) != 0) throw Failure(ExitSystem, "fcntl(F_SETFD) of the pool's descriptor failed");
    cuda_.check("cuMemPoolExportPointer", calls_.export_pointer(&shared_, pointer_));
  }
  void end() noexcept {
    close_fd();
    if (pointer_ != 0) static_cast<void>(calls_.free(pointer_, cuda_.stream()));
    try {
      cuda_.synchronize();
    } catch (const Failure&) { // destroying the pool is still right
    }
    if (pool_ != nullptr) static_cast<void>(calls_.destroy(pool_));
  }

  Cuda& cuda_;
  const PoolCalls& calls_;
  cuda::Pool pool_ = nullptr;
  cuda::DevicePtr pointer_ = 0;
  int fd_ = -1;
  cuda::PoolPointer shared_ = {};
};

std::string hex(const cuda::PoolPointer& shared) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : shared.reserved) text += {kDigits[byte >> 4], kDigits[byte & 15]};
  return text;
}

cuda::PoolPointer parse_hex(const std::string& text) {
  cuda::PoolPointer shared = {};
  if (text.size() != 2 * sizeof shared.reserved) throw Failure(ExitUsage, "is not the bytes of a pool pointer");
  for (std::size_t at = 0; at < sizeof shared.reserved; ++at) {
    shared.reserved[at] = static_cast<unsigned char>(std::stoul(text.substr(2 * at, 2), nullptr, 16));
  }
  return shared;
}

class Search {
 public:
  Search(const CommonOptions& common, std::uint32_t step_timeout_ms, const gpuloan_driver_info& driver)
      : common_(common), step_timeout_ms_(step_timeout_ms), deadline_(common.timeout_ms), cuda_(driver, common.device), calls_(cuda_) {}

  ImportLimitFound run();

 private:
  [[nodiscard]] std::uint64_t free_bytes() const {
    std::size_t free = 0, total = 0;
    cuda_.check("cuMemGetInfo", calls_.memory(&free, &total));
    return free;
  }
  [[nodiscard]] bool survived(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t still_missing(std::uint64_t before) const;

  const CommonOptions& common_;
  const std::uint32_t step_timeout_ms_;
  const Deadline deadline_;
  Cuda cuda_;
  const PoolCalls calls_;
  ImportLimitFound found_;
  std::vector<std::uint64_t> survived_; // the sizes that were, ascending
};

bool Search::survived(std::uint64_t bytes) {
  check_interrupted();
  ++found_.steps;
  Exported lent(cuda_, calls_, common_.device, bytes);
  std::vector<std::string> arguments = {"import-limit-child", "--device", std::to_string(common_.device), "--pointer", hex(lent.shared()),
                                        "--bytes", std::to_string(bytes)};
  if (!common_.driver.empty()) arguments.insert(arguments.end(), {"--driver", common_.driver});
  Child child = Child::start(arguments, lent.fd());
  lent.close_fd();
  const Deadline step(step_timeout_ms_);
  while (!child.ended() && !step.passed() && !deadline_.passed()) {
    check_interrupted();
    std::this_thread::sleep_for(Milliseconds(1));
  }
  const bool late = !child.ended();
  child.end(); // its mapping is gone before the memory is freed
  if (late && deadline_.passed()) {
    throw Failure(ExitTimeout, "the import limit was not found within " + deadline_.text() + "; allow more by --timeout");
  }
  if (!late && child.exit_code() > ExitLoanFailed) { // that says nothing about the size
    throw Failure(child.exit_code(), "the importer could not begin, so nothing is known: its own line is above");
  }
  const bool good = !late && child.succeeded();
  std::fprintf(stderr, "gpuloan probe: import of %llu MiB: %s\n", static_cast<unsigned long long>(bytes >> 20),
               good   ? "fine"
               : late ? ("no answer within " + step.text()).c_str()
                      : ("the importer " + child.status_text()).c_str());
  if (good && (survived_.empty() || survived_.back() < bytes)) survived_.push_back(bytes);
  return good;
}

// A dead process's memory comes back a little later than its end is seen.
std::uint64_t Search::still_missing(std::uint64_t before) const {
  const Deadline patience(2000);
  for (;;) {
    const std::uint64_t now = free_bytes();
    if (now + kNoise >= before || patience.passed()) return before > now ? before - now : 0;
    std::this_thread::sleep_for(Milliseconds(10));
  }
}

ImportLimitFound Search::run() {
  found_.device = common_.device;
  found_.lower = kUnit;
  if (free_bytes() < kLeftFree + kUnit) throw Failure(ExitDeviceMemory, "less than 1 GiB of the device is free: there is no room to search in");
  // Also makes everything that the driver makes at first use.
  for (unsigned tries = 1; !survived(found_.lower); ++tries) {
    if (tries <= kConfirmations) continue;
    found_.upper = found_.lower;
    found_.none = "not even 2 MiB of a pool can be imported by another process";
    return found_;
  }
  const std::uint64_t before = free_bytes();
  found_.upper = (std::max(before, kLeftFree + kUnit) - kLeftFree) / kUnit * kUnit;
  std::fprintf(stderr, "gpuloan probe: searching from 2 MiB to %llu MiB, which is what is free less 1 GiB\n",
               static_cast<unsigned long long>(found_.upper >> 20));
  std::uint64_t bad = found_.upper + kUnit;
  for (std::uint64_t size = std::min(kSecondSize, found_.upper); survived_.back() < size; size = std::min(2 * size, found_.upper)) {
    if (!survived(size)) {
      bad = size;
      break;
    }
  }
  // Just above the limit an import may go well by chance (5252 MiB did once, of two times). So the size that is found is tried again, and
  // where that fails it was too large, and the search goes on below it.
  unsigned confirmed = 0;
  while (confirmed < kConfirmations) {
    if (const std::uint64_t good = survived_.back(); bad - good > kUnit) {
      const std::uint64_t middle = (good + bad) / 2 / kUnit * kUnit;
      if (!survived(middle)) bad = middle;
    } else if (survived(good)) {
      ++confirmed;
    } else {
      bad = good;
      confirmed = 0;
      survived_.pop_back();
      if (survived_.empty()) {
        found_.none = "importing " + size_text_long(bad) + " went well once and not again: this driver has no fixed limit";
        return found_;
      }
    }
  }
  found_.bytes = survived_.back();
  found_.reached_upper = found_.bytes == found_.upper;
  found_.missing = still_missing(before);
  return found_;
}

// The sacrificial process: what goes wrong here is the import.
void import_and_look(Cuda& cuda, cuda::PoolPointer shared, std::uint64_t bytes) {
  const PoolCalls calls(cuda);
  cuda::Pool pool = nullptr;
  void* const shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(Child::kInheritedFd));
  cuda.check("cuMemPoolImportFromShareableHandle", calls.import_pool(&pool, shareable, cuda::HandlePosixFd, 0));
  ::close(Child::kInheritedFd);
  cuda::DevicePtr pointer = 0;
  cuda.check("cuMemPoolImportPointer", calls.import_pointer(&pointer, pool, &shared));
  unsigned char ends[2] = {};
  cuda.copy_out(&ends[0], pointer, 1);
  cuda.copy_out(&ends[1], pointer + bytes - 1, 1);
  cuda.synchronize();
  if (ends[0] != kFirst || ends[1] != kLast) throw Failure(ExitLoanFailed, "the imported memory has other bytes than were written");
}

} // namespace

ImportLimitFound find_import_limit(const CommonOptions& common, std::uint32_t step_timeout_ms) {
  const gpuloan_driver_info driver = probe_driver(common.driver_or_null());
  auto device = init<gpuloan_device_info>();
  attempt("cannot probe device " + std::to_string(common.device),
          [&] { check(gpuloan_device_probe(common.driver_or_null(), common.device, &device)); });
  if ((device.floors & GPULOAN_FLOOR_POOLS) == 0) {
    throw Failure(ExitUnsupported, std::string("device ") + std::to_string(common.device) + " has no pools that can be shared: " + missing_text(device, GPULOAN_FLOOR_POOLS));
  }
  return Search(common, step_timeout_ms, driver).run();
}

int import_limit_child(Arguments arguments) {
  constexpr rlimit kNoCore = {1, 1}; // 1 also keeps a handler that core_pattern names from being called
  ::setrlimit(RLIMIT_CORE, &kNoCore);
  const pid_t parent = ::getppid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL); // an import may never return, and it holds device memory
  if (::getppid() != parent) return ExitInternal;
  CommonOptions common;
  cuda::PoolPointer shared = {};
  std::uint64_t bytes = 0;
  Parser parser("import-limit-child [OPTION]...", "Started by gpuloan probe --import-limit; not for people.");
  common.add_to(parser);
  parser.value("pointer", "HEX", "the exported pointer", [&](const std::string& text) { shared = parse_hex(text); });
  parser.value("bytes", "N", "of the allocation", [&](const std::string& text) { bytes = parse_number(text, 1, UINT64_MAX); });
  if (!parser.parse(arguments)) return ExitOk;
  if (bytes == 0) throw Failure(ExitUsage, "this subcommand is started by 'gpuloan probe --import-limit'; run that instead");
  Cuda cuda(probe_driver(common.driver_or_null()), common.device);
  try {
    import_and_look(cuda, shared, bytes);
  } catch (const Failure& failure) {
    throw Failure(ExitLoanFailed, failure.what());
  }
  return ExitOk;
}

} // namespace gpuloan::tool
