// SPDX-License-Identifier: MIT
//
// Why a driver that was found cannot be used. These are the sentences people meet first, in containers above all, so
// each names the library that was loaded, its version, the code, the kernel module's version where there is one, and
// what to do about it.
#include <driver/loader.hpp>

#include <algorithm>
#include <fstream>

namespace gpuloan::driver {
namespace {

enum { InsufficientDriver = 35 };
constexpr int kNamed = 4; // an old driver may lack dozens of functions

// "580.159.04", "" when no kernel module is loaded. The open and the closed module word their line differently, but
// the version is in both the first word that starts with a digit.
std::string kernel_module() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  if (!std::getline(file, line)) return {};
  for (std::size_t at = line.find("Module"); at != std::string::npos; at = line.find(' ', at + 1)) {
    if (const std::size_t word = line.find_first_not_of(' ', at); word != std::string::npos && word != at &&
                                                                  line[word] >= '0' && line[word] <= '9') {
      return line.substr(word, line.find(' ', word) - word);
    }
  }
  return {};
}

std::string module_text(const Driver& driver) {
  if (driver.simulated()) return "no kernel module is needed";
  const std::string version = kernel_module();
  return version.empty() ? "no NVIDIA kernel module is loaded" : "the kernel module is " + version;
}

bool is_compat(const Driver& driver) { return driver.path().find("/compat") != std::string::npos; }

Error mismatch(const Driver& driver, const std::string& head) {
  std::string text = head + "; the library does not match the kernel side (" + module_text(driver) + "): ";
  text += is_compat(driver) ? "it is a compat library: take its folder out of LD_LIBRARY_PATH, so that the system's own "
                              "driver is found"
                            : "take any cuda compat folder out of LD_LIBRARY_PATH; after a driver update reboot, or reload "
                              "the kernel module";
  return {GPULOAN_ERR_DRIVER_MISMATCH, std::move(text)};
}

Error stub(const std::string& head) {
  return {GPULOAN_ERR_STUB_DRIVER,
          head + "; this is the CUDA toolkit's stub library, made for linking only: take its folder (stubs) out of the "
                 "library path and use the libcuda.so.1 of the NVIDIA driver"};
}

} // namespace

Error startup_error(const Driver& driver, CuResult code) {
  const std::string head = "cuInit: " + code_text(driver, code) + " [" + driver.describe() + "]";
  switch (code) {
    case StubLibrary:
      return stub(head);
    case SystemDriverMismatch:
    case CompatNotSupportedOnDevice:
      return mismatch(driver, head);
    case InsufficientDriver:
    case CallRequiresNewerDriver:
      return {GPULOAN_ERR_OLD_DRIVER, head + "; the NVIDIA driver is too old: install a newer one (" + module_text(driver) + ")"};
    case NoDevice:
      return {GPULOAN_ERR_NO_DEVICE,
              head + "; the driver shows no device: look at CUDA_VISIBLE_DEVICES, at /dev/nvidia* in this container, and at "
                     "nvidia-smi (" + module_text(driver) + ")"};
    case InvalidDevice:
      return {GPULOAN_ERR_NO_DEVICE, head + "; a device named by CUDA_VISIBLE_DEVICES does not exist, or a GPU in MIG mode has "
                                            "no instance"};
    case Unknown:
      return {GPULOAN_ERR_DRIVER, head + "; look for NVRM and Xid lines in the kernel log; after a suspend reload nvidia_uvm; "
                                         "in a container look at /dev/nvidia-uvm (" + module_text(driver) + ")"};
    default:
      return driver.error("cuInit", code);
  }
}

Result<void> check_required(const Driver& driver) {
  if (driver.call.cuInit == nullptr) {
    return fail(GPULOAN_ERR_NO_DRIVER, driver.path() + " is no CUDA driver: it has no cuInit: name the driver's libcuda.so.1");
  }
  std::string names;
  int lacking = 0;
  int newest = 0;
#define GPULOAN_CUDA(need, since, group, name, exported, params)                                                       \
  if (Need::need == Need::Required && driver.call.name == nullptr) {                                                   \
    if (++lacking <= kNamed) names += (names.empty() ? "" : ", ") + std::string(#exported);                            \
    newest = std::max(newest, since);                                                                                  \
  }
  enum class Need { Required, Optional };
#include <driver/symbols.inc>
#undef GPULOAN_CUDA
  if (lacking == 0) return {};
  if (lacking > kNamed) names += " and " + std::to_string(lacking - kNamed) + " more";
  return fail(GPULOAN_ERR_OLD_DRIVER, driver.describe() + " lacks " + names + ": install an NVIDIA driver for CUDA " +
                                          version_text(newest) + " or newer");
}

} // namespace gpuloan::driver
