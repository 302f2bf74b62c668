// SPDX-License-Identifier: MIT
//
// Where the simulated driver lies. Installed, it is beside libgpuloan.so; a tool or a test that links the library
// statically finds it in the installed library folder or, run from a build tree, in that tree's lib/sim.
//
// The build tree is searched upwards, through folders that others may be able to write to. So a file found there counts
// only if it belongs to root or to the owner of the file that this code lies in.
#include <driver/library.hpp>

#include <driver/config.h>

#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <link.h>
#include <sys/stat.h>

namespace gpuloan::driver {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSimName = "libgpuloan-sim.so";
constexpr int kLevels = 3; // a test lies at most so deep in the build tree

// The library or program that contains this function.
fs::path own_file() {
  std::error_code ignored;
  Dl_info info = {};
  void* extra = nullptr;
  if (::dladdr1(reinterpret_cast<const void*>(&open_sim_library), &info, &extra, RTLD_DL_LINKMAP) == 0) return {};
  const char* name = static_cast<const link_map*>(extra)->l_name;
  // The main program's entry has no name, and dli_fname is only its argv[0].
  if (name == nullptr || *name == '\0') return fs::read_symlink("/proc/self/exe", ignored);
  return fs::canonical(name, ignored);
}

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

bool same_owner(const fs::path& path, const fs::path& own) {
  struct stat theirs = {};
  struct stat ours = {};
  if (::stat(path.c_str(), &theirs) != 0 || ::stat(own.c_str(), &ours) != 0) return false;
  return theirs.st_uid == 0 || theirs.st_uid == ours.st_uid;
}

// "" when no file is found, so that the loader's search is next.
fs::path find_file(const fs::path& own) {
  const fs::path folder = own.parent_path();
  if (is_file(folder / kSimName)) return folder / kSimName;
  if (is_file(fs::path(GPULOAN_LIBDIR) / kSimName)) return fs::path(GPULOAN_LIBDIR) / kSimName;
  if (const fs::path path = folder / "sim" / kSimName; is_file(path) && same_owner(path, own)) return path;
  fs::path above = folder;
  for (int level = 0; level < kLevels; ++level) {
    above = above.parent_path();
    const fs::path path = above / "lib" / "sim" / kSimName;
    if (is_file(path) && same_owner(path, own)) return path;
  }
  return {};
}

Result<Library> open_found(const std::string& path) {
  auto handle = open_path(path);
  if (!handle) return forward(std::move(handle.error()));
  return Library{*handle, "simulated"};
}

} // namespace

Result<Library> open_sim_library() {
  if (const char* named = ::secure_getenv("GPULOAN_SIM_LIBRARY"); named != nullptr && *named != '\0') {
    auto library = open_found(named);
    if (!library) library.error().text = "GPULOAN_SIM_LIBRARY: " + library.error().text;
    return library;
  }
  const fs::path own = own_file();
  if (const fs::path path = find_file(own); !path.empty()) return open_found(path.string());
  if (void* handle = ::dlopen(kSimName, RTLD_NOW | RTLD_LOCAL)) return Library{handle, "simulated"};
  return fail(GPULOAN_ERR_NO_DRIVER, std::string("no simulated driver: ") + kSimName + " is not beside " + own.string() +
                                         ", not in " GPULOAN_LIBDIR
                                         " and not found by the loader: install it, or set GPULOAN_SIM_LIBRARY to its path");
}

} // namespace gpuloan::driver
