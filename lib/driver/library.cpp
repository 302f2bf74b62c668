// SPDX-License-Identifier: MIT
//
// The choice, and the order for "real": a libcuda.so.1 that the process already has (its own runtime opened it, so it is
// the driver that the caller's contexts live in), then libcuda.so.1 by the loader's search.
//
// The bare name libcuda.so is never tried: on machines with a toolkit it is the stub that programs are linked against.
// Libraries are opened with RTLD_LOCAL, so the simulated driver never answers for the real one in other libraries.
#include <driver/library.hpp>

#include <algorithm>
#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <link.h>
#include <string_view>

namespace gpuloan::driver {
namespace {

namespace fs = std::filesystem;

constexpr const char* kName = "libcuda.so.1";

// The loader's last complaint. It is per thread and cleared by reading it.
std::string dl_error() {
  const char* text = ::dlerror();
  return text != nullptr ? text : "unknown loader error";
}

bool is_dangling(const fs::path& path) {
  std::error_code ignored;
  return fs::is_symlink(path, ignored) && !fs::exists(path, ignored);
}

std::string dangling_text(const fs::path& path) {
  std::error_code ignored;
  return path.string() + " is a dangling link to " + fs::read_symlink(path, ignored).string();
}

// Looks where drivers are put by distributions, WSL2, container runtimes and NixOS, for the remedy only: a library is
// never opened from there, since the caller's own runtime would not have found it either.
std::string search_hint() {
  std::string folders;
  if (const char* listed = ::secure_getenv("LD_LIBRARY_PATH")) folders = std::string(listed) + ":";
  folders += "/usr/lib/x86_64-linux-gnu:/usr/lib/aarch64-linux-gnu:/usr/lib64:/usr/lib:/usr/lib/wsl/lib:"
             "/usr/local/nvidia/lib64:/run/opengl-driver/lib";
  for (std::size_t start = 0; start < folders.size();) {
    const std::size_t end = std::min(folders.find(':', start), folders.size());
    const fs::path path = fs::path(folders.substr(start, end - start)) / kName;
    start = end + 1;
    std::error_code ignored;
    if (is_dangling(path)) return "; " + dangling_text(path) + ": install the driver again";
    if (fs::exists(path, ignored)) return "; " + path.string() + " exists: add its folder to LD_LIBRARY_PATH";
  }
  return "; install the NVIDIA driver (in a container: start it with the GPU, such as --gpus all), or choose the "
         "simulated driver with GPULOAN_DRIVER=sim";
}

Result<Library> open_real() {
  if (void* handle = ::dlopen(kName, RTLD_NOW | RTLD_NOLOAD)) return Library{handle, "already loaded"};
  if (void* handle = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL)) return Library{handle, kName};
  const std::string cause = dl_error();
  return fail(GPULOAN_ERR_NO_DRIVER, "no CUDA driver: " + cause + search_hint());
}

} // namespace

Result<void*> open_path(const std::string& path) {
  if (void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  const std::string cause = dl_error();
  if (is_dangling(path)) {
    return fail(GPULOAN_ERR_NO_DRIVER, "no CUDA driver: " + dangling_text(path) + ": correct the link or the path");
  }
  return fail(GPULOAN_ERR_NO_DRIVER, "no CUDA driver: " + cause + ": name the driver's libcuda.so.1, \"real\" or \"sim\"");
}

Result<Library> open_library(const char* choice) {
  const char* origin = "the driver";
  if (choice == nullptr) {
    origin = "GPULOAN_DRIVER";
    choice = ::secure_getenv("GPULOAN_DRIVER");
    if (choice == nullptr || *choice == '\0') choice = "real";
  }
  const std::string_view wanted = choice;
  if (wanted == "real") return open_real();
  if (wanted == "sim") return open_sim_library();
  if (wanted.find('/') == std::string_view::npos) {
    return fail(GPULOAN_ERR_INVALID,
                std::string(origin) + " is \"" + choice + "\": it must be \"real\", \"sim\" or a path with a '/'");
  }
  auto handle = open_path(choice);
  if (!handle) return forward(std::move(handle.error()));
  return Library{*handle, "caller's path"};
}

std::string loaded_path(void* handle) {
  std::string path;
  // Where cuInit really is: a library that only forwards to the driver is not the driver.
  Dl_info info = {};
  link_map* map = nullptr;
  if (const void* entry = ::dlsym(handle, "cuInit"); entry != nullptr && ::dladdr(entry, &info) != 0) {
    path = info.dli_fname;
  } else if (::dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0) {
    path = map->l_name;
  }
  std::error_code failed;
  const fs::path resolved = fs::canonical(path, failed);
  return failed ? path : resolved.string();
}

} // namespace gpuloan::driver
