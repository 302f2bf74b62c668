// SPDX-License-Identifier: MIT
//
// gpuloan probe: what the driver, each device and the kernel can do, and what is lost where something is missing. It
// makes no CUDA context, save to search for the import limit. What can be said is said even where there is no driver; the exit code then is that of the
// driver's error.
#include "commands.hpp"
#include "floor_rows.hpp"
#include "import_limit.hpp"
#include "output.hpp"
#include "session.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace gpuloan::tool {
namespace {

constexpr char kMinimumDriver[] = "CUDA 11.4 (driver 470); the memop gate needs 11.7 (driver 515)";

struct Fact {
  const char* name;
  bool good;
  std::string text; // why, or what is lost
};

struct Findings {
  std::string driver_error;
  int code = ExitOk;
  gpuloan_driver_info driver = init<gpuloan_driver_info>();
  std::vector<gpuloan_device_info> devices;
  std::vector<Fact> kernel;
  std::string kernel_release;
  std::optional<ImportLimitFound> import_limit; // where it was searched for
};

const char* limit_source(std::uint32_t source) {
  return source == GPULOAN_LIMIT_MEASURED ? "measured" : source == GPULOAN_LIMIT_OPTION ? "option" : "default";
}

const char* compute_mode_name(const gpuloan_device_info& info) {
  return info.compute_mode == 2 ? "prohibited: no CUDA context can be made; nvidia-smi -c DEFAULT allows them"
         : info.compute_mode != 3 ? "default"
         : info.mps != 0          ? "exclusive process, shared by MPS"
                                  : "exclusive process: only one side can use the device; nvidia-smi -c DEFAULT, or MPS, lets both";
}

// What to do where io_uring is denied, by the error of the step that failed.
const char* io_uring_remedy(std::string_view reason) {
  const auto says = [reason](const char* error) { return reason.find(error) != std::string_view::npos; };
  if (says("(EPERM)") || says("(EACCES)"))
    return "; epoll does the work. To have it: sysctl kernel.io_uring_disabled=0, and a seccomp profile that allows io_uring_setup, "
           "io_uring_enter and io_uring_register (containers: --security-opt seccomp=PROFILE)";
  if (says("(ENOSYS)") || says("(EINVAL)")) return "; epoll does the work. To have it: Linux 6.0 or newer, built with CONFIG_IO_URING";
  if (says("(ENOMEM)")) return "; epoll does the work. To have it: raise RLIMIT_MEMLOCK (ulimit -l)";
  return "; epoll does the work";
}

// What an exporter's loop would run on. No device is needed to ask.
Fact find_io_uring() {
  auto options = init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_EXPORTER;
  options.flags = GPULOAN_CONTEXT_NO_DEVICE;
  try {
    const gpuloan_stats stats = Context::create(options).stats();
    const std::string_view reason = stats.engine_reason;
    const std::size_t text = reason.starts_with("io_uring: ") ? std::strlen("io_uring: ") : 0;
    const bool good = stats.engine == GPULOAN_ENGINE_IO_URING;
    return {"io_uring", good, std::string(reason.substr(text)) + (good ? "" : io_uring_remedy(reason))};
  } catch (const StatusError& error) {
    return {"io_uring", false, error.what()};
  }
}

Fact find_pidfd() {
  const auto fd = static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0));
  if (fd < 0)
    return {
        "pidfd", false,
        std::string(std::strerror(errno)) + "; a peer's death cannot be proven, memory of lost peers stays out longer: Linux 5.3 or newer, "
                                            "and a seccomp profile that allows pidfd_open, have it"};
  ::close(fd);
  return {"pidfd", true, "the death of a peer can be proven"};
}

Fact find_seals() {
  const int fd = ::memfd_create("gpuloan-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const bool good = fd >= 0 && ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE) == 0;
  const int code = errno;
  if (fd >= 0) ::close(fd);
  if (!good)
    return {"memfd seals", false,
            std::string(std::strerror(code)) + "; Linux 5.1 or newer is needed to make a context"};
  return {"memfd seals", true, "control words cannot be taken away by a peer"};
}

Fact find_files() {
  rlimit limit = {};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const bool good = limit.rlim_cur >= 1024;
  return {"open files", good,
          std::to_string(limit.rlim_cur) + " (RLIMIT_NOFILE)" + (good ? "" : "; raise it with 'ulimit -n'")};
}

Findings look(const CommonOptions& common, bool one_device) {
  Findings found;
  utsname name = {};
  ::uname(&name);
  found.kernel_release = name.release;
  found.kernel = {find_io_uring(), find_pidfd(), find_seals(), find_files()};
  try {
    found.driver = probe_driver(common.driver_or_null());
    const auto count = static_cast<std::int32_t>(found.driver.devices);
    if (count == 0) throw Failure(ExitNoDriver, "the driver works but shows no device; check CUDA_VISIBLE_DEVICES");
    for (std::int32_t ordinal = one_device ? common.device : 0; ordinal < (one_device ? common.device + 1 : count); ++ordinal) {
      auto info = init<gpuloan_device_info>();
      attempt("cannot probe device " + std::to_string(ordinal),
              [&] { check(gpuloan_device_probe(common.driver_or_null(), ordinal, &info)); });
      found.devices.push_back(info);
    }
  } catch (const Failure& failure) {
    found.code = failure.code();
    found.driver_error = failure.what();
  }
  return found;
}

// "to 1, 2; none to 3"; "" where there is no other device.
std::string peers_text(const gpuloan_device_info& info, const Findings& found) {
  std::string with, without;
  for (std::int32_t other = 0; other < static_cast<std::int32_t>(std::min(found.driver.devices, 64U)); ++other) {
    if (other == info.ordinal) continue;
    std::string& list = (info.peers >> other & 1U) != 0 ? with : without;
    list += (list.empty() ? "" : ", ") + std::to_string(other);
  }
  if (with.empty()) return without.empty() ? "" : "none to " + without + ": a loan to a worker on another device is copied by the host rung";
  return "to " + with + (without.empty() ? "" : "; none to " + without);
}

void print_device(const gpuloan_device_info& info, const Findings& found) {
  std::printf("\ndevice  %s\n", device_line(info).c_str());
  std::printf("  compute mode %s; VMM granularity %s%s\n", compute_mode_name(info),
              info.granularity != 0 ? size_text(info.granularity).c_str() : "none",
              info.integrated != 0 ? "; integrated" : "");
  if (const std::string peers = peers_text(info, found); !peers.empty()) std::printf("  peer access %s\n", peers.c_str());
  for (const FloorRow& floor : kFloors) {
    const bool good = usable(info, floor);
    std::printf("  %-14s %-3s  %s%s%s\n", floor.name, good ? "yes" : "NO", good ? "" : "lost: ", good ? floor.gives : floor.lost,
                !good && (info.floors & floor.bit) != 0 ? " (there, and not used under MPS)" : "");
  }
  std::printf("  %-14s %s\n", "mps", info.mps == 0 ? "no" : (std::string("YES  lost: ") + kMpsLost).c_str());
  if (info.pool_import_limit == 0 && (info.floors & GPULOAN_FLOOR_POOLS) != 0) {
    std::printf("  %-14s none: no memory of a pool can be imported, the pool rung is refused (measured)\n", "import limit");
  } else if (info.pool_import_limit != 0) {
    std::printf("  %-14s %llu MiB for one allocation of a pool (%s)\n", "import limit",
                static_cast<unsigned long long>(info.pool_import_limit >> 20),
                info.pool_import_limit_source == GPULOAN_LIMIT_MEASURED ? "measured" : "default; --import-limit measures it");
  }
  if (info.floor_reason[0] != '\0') std::printf("  missing: %s\n", info.floor_reason);
}

void print_import_limit(const ImportLimitFound& found) {
  const auto mebibytes = [](std::uint64_t bytes) { return static_cast<unsigned long long>(bytes >> 20); };
  if (found.bytes == 0) {
    std::printf("\nimport limit of device %d: none: %s; %u imports were tried\n", found.device, found.none.c_str(), found.steps);
  } else {
    std::printf("\nimport limit of device %d: %s%llu MiB; searched from %llu to %llu MiB in %u imports\n", found.device,
                found.reached_upper ? "no limit up to " : "", mebibytes(found.bytes), mebibytes(found.lower), mebibytes(found.upper),
                found.steps);
  }
  if (found.missing >> 26 != 0) {
    std::printf("  %s of the device did not come back; they will at the end of this process\n", size_text(found.missing).c_str());
  }
}

void print_text(const Findings& found) {
  std::printf("gpuloan %s\n", gpuloan_version_text());
  std::printf("driver  %s\n", found.driver.path[0] != '\0' ? driver_line(found.driver).c_str() : "none");
  std::printf("minimum %s\n", kMinimumDriver);
  for (const gpuloan_device_info& info : found.devices) print_device(info, found);
  if (found.import_limit) print_import_limit(*found.import_limit);
  std::printf("\nkernel  Linux %s\n", found.kernel_release.c_str());
  for (const Fact& fact : found.kernel) {
    std::printf("  %-14s %-3s%s%s\n", fact.name, fact.good ? "yes" : "NO", fact.text.empty() ? "" : "  ",
                fact.text.c_str());
  }
}

void json_device(Json& json, const gpuloan_device_info& info) {
  json.begin_object().member("ordinal", info.ordinal).member("name", info.name);
  json.member("uuid", uuid_text(info)).member("total_bytes", info.total_bytes);
  json.member("granularity", info.granularity).member("compute_mode", info.compute_mode);
  json.member("integrated", info.integrated != 0).member("floor_reason", info.floor_reason);
  json.key("peers").begin_array();
  for (int other = 0; other < 64; ++other) {
    if ((info.peers >> other & 1U) != 0) json.value(other);
  }
  json.end();
  json.member("mps", info.mps != 0).member("mps_lost", info.mps != 0 ? kMpsLost : "");
  json.member("pool_import_limit", info.pool_import_limit);
  json.member("pool_import_limit_source", limit_source(info.pool_import_limit_source));
  json.key("floors").begin_array();
  for (const FloorRow& floor : kFloors) {
    const bool good = usable(info, floor);
    json.begin_object().member("name", floor.name).member("present", (info.floors & floor.bit) != 0).member("usable", good);
    json.member("gives", floor.gives).member("lost", good ? "" : floor.lost).end();
  }
  json.end().end();
}

void print_json(const Findings& found) {
  Json json;
  json.begin_object();
  json_outcome(json, "probe", found.code);
  json.member("version", gpuloan_version_text())
      .member("error", found.driver_error)
      .member("minimum_driver", kMinimumDriver);
  json.key("driver");
  if (found.driver.path[0] == '\0') {
    json.null();
  } else {
    json.begin_object()
        .member("simulated", found.driver.simulated != 0)
        .member("version", version_text(found.driver.version));
    json.member("path", found.driver.path).member("found_by", found.driver.found_by).end();
  }
  json.key("devices").begin_array();
  for (const gpuloan_device_info& info : found.devices) json_device(json, info);
  json.end();
  json.key("import_limit");
  if (const auto& limit = found.import_limit) {
    json.begin_object().member("device", limit->device).member("bytes", limit->bytes).member("reached_upper", limit->reached_upper);
    json.member("none", limit->none).member("lower_bytes", limit->lower).member("upper_bytes", limit->upper).member("imports", limit->steps);
    json.member("device_bytes_missing", limit->missing).end();
  } else {
    json.null();
  }
  json.key("kernel").begin_object().member("release", found.kernel_release).key("facilities").begin_array();
  for (const Fact& fact : found.kernel) {
    json.begin_object().member("name", fact.name).member("available", fact.good).member("text", fact.text).end();
  }
  json.end().end().end();
  std::fputs(json.text().c_str(), stdout);
}

} // namespace

int probe(Arguments arguments) {
  CommonOptions common;
  Parser parser("probe [OPTION]...",
                "Says what the driver, its devices and the kernel can do for loans, and what is lost where\n"
                "something is missing. Makes no CUDA context, except with --import-limit.");
  common.add_to(parser);
  bool import_limit = false;
  std::uint32_t step_timeout_ms = 20'000;
  parser.flag("import-limit", "measure how large an allocation the EXPERIMENTAL pool rung can lend, and keep it", import_limit);
  parser.value("step-timeout", "SECONDS", "with --import-limit: an import that takes longer counts as too large; default 20",
               [&](const std::string& text) { step_timeout_ms = parse_seconds(text); });
  if (!parser.parse(arguments)) return ExitOk;
  if (parser.given("step-timeout") && !import_limit) throw Failure(ExitUsage, "--step-timeout belongs to --import-limit");
  std::optional<ImportLimitFound> limit;
  if (import_limit) {
    limit = find_import_limit(common, step_timeout_ms);
    attempt("the import limit is " + (limit->bytes == 0 ? "none: " + limit->none : std::to_string(limit->bytes >> 20) + " MiB"),
            [&] { check(gpuloan_import_limit_remember(common.driver_or_null(), common.device, limit->bytes)); });
  }
  Findings found = look(common, parser.given("device"));
  found.import_limit = limit;
  common.json ? print_json(found) : print_text(found);
  std::fflush(stdout);
  if (!found.driver_error.empty()) std::fprintf(stderr, "gpuloan probe: %s\n", found.driver_error.c_str());
  return found.code;
}

} // namespace gpuloan::tool
