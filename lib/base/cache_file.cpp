// SPDX-License-Identifier: MIT
#include <base/cache_file.hpp>

#include <base/unique_fd.hpp>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace gpuloan {
namespace {

// An absolute path (others are to be ignored, says the XDG specification), and no path in a set-user-ID program.
std::string folder_named_by(const char* value) { return value != nullptr && *value == '/' ? value : ""; }

Result<void> write_all(int fd, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) return fail_errno("write", errno);
    if (count > 0) done += static_cast<std::size_t>(count);
  }
  if (::fsync(fd) != 0) return fail_errno("fsync", errno);
  return {};
}

Result<void> make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) return {};
  return fail_errno(("mkdir " + path).c_str(), errno);
}

} // namespace

std::string cache_file_path(const std::string& name) {
  std::string folder = folder_named_by(::secure_getenv("XDG_CACHE_HOME"));
  if (folder.empty()) {
    folder = folder_named_by(::secure_getenv("HOME"));
    if (folder.empty()) return "";
    folder += "/.cache";
  }
  return folder + "/gpuloan/" + name;
}

Result<std::optional<std::string>> read_cache_file(const std::string& path) {
  const int raw = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
  if (raw < 0 && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  if (raw < 0) return fail_errno("open", errno);
  const UniqueFd fd = UniqueFd::take(raw);
  struct stat info = {};
  if (::fstat(raw, &info) != 0) return fail_errno("fstat", errno);
  if (!S_ISREG(info.st_mode)) return fail(GPULOAN_ERR_INVALID, "it is not a regular file");
  if (info.st_uid != ::geteuid()) return fail(GPULOAN_ERR_INVALID, "it belongs to user " + std::to_string(info.st_uid));
  if ((info.st_mode & 0077) != 0) return fail(GPULOAN_ERR_INVALID, "others may read or write it (mode 0600 is wanted)");
  std::string text(kCacheFileMax + 1, '\0');
  std::size_t length = 0;
  while (length < text.size()) {
    const ssize_t count = ::read(raw, text.data() + length, text.size() - length);
    if (count == 0) break;
    if (count < 0 && errno != EINTR) return fail_errno("read", errno);
    if (count > 0) length += static_cast<std::size_t>(count);
  }
  if (length > kCacheFileMax) return fail(GPULOAN_ERR_INVALID, "it is longer than " + std::to_string(kCacheFileMax) + " bytes");
  text.resize(length);
  return text;
}

Result<void> write_cache_file(const std::string& path, const std::string& text) {
  const std::size_t slash = path.rfind('/');
  const std::string folder = path.substr(0, slash);
  GPULOAN_TRY(make_folder(folder.substr(0, folder.rfind('/'))));
  GPULOAN_TRY(make_folder(folder));
  std::string fresh = path + ".XXXXXX";
  const int raw = ::mkostemp(fresh.data(), O_CLOEXEC); // mode 0600
  if (raw < 0) return fail_errno(("creating a file in " + folder).c_str(), errno);
  UniqueFd fd = UniqueFd::take(raw);
  auto done = write_all(raw, text);
  fd.reset();
  if (done && ::rename(fresh.c_str(), path.c_str()) != 0) done = fail_errno("rename", errno);
  if (!done) ::unlink(fresh.c_str());
  return done;
}

} // namespace gpuloan
