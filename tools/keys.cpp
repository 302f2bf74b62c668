// SPDX-License-Identifier: MIT
#include "keys.hpp"

#include "files.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

namespace gpuloan::tool {
namespace {

constexpr std::size_t kMaxKeyText = 256; // a key with a good deal of white space around it

[[noreturn]] void refuse(const std::string& text) { throw Failure(ExitKeyRefused, text); }

std::optional<gpuloan_key> key_in(const std::string& text) {
  gpuloan_key key;
  const bool whole = text.find('\0') == std::string::npos && gpuloan_key_parse(text.c_str(), &key) == GPULOAN_OK; // which stops at one
  return whole ? std::optional(key) : std::nullopt;
}

// Up to a newline or the end, but not for ever: the other end may hold the pipe open.
std::string read_line(int fd, const std::string& name, const Deadline& deadline) {
  std::string text;
  while (text.size() < kMaxKeyText && text.find('\n') == std::string::npos) {
    check_interrupted();
    pollfd ready = {fd, POLLIN, 0};
    const int count = ::poll(&ready, 1, static_cast<int>(deadline.slice().count()));
    if (count == 0 && deadline.passed())
      throw Failure(ExitTimeout, "no key came through " + name + " within " + deadline.text());
    if (count < 1) continue;
    if ((ready.revents & POLLNVAL) != 0) refuse(name + " is not an open descriptor; pass the key's FD to this process");
    char buffer[kMaxKeyText];
    const ssize_t size = ::read(fd, buffer, sizeof buffer);
    if (size == 0) break;
    if (size < 0 && errno != EINTR && errno != EAGAIN) refuse("cannot read " + name + ": " + std::strerror(errno));
    if (size > 0) text.append(buffer, static_cast<std::size_t>(size));
  }
  text.resize(std::min(text.find('\n'), text.size())); // how much comes at once is the pipe's business
  return text;
}

} // namespace

void KeyOptions::add_to(Parser& parser, bool borrower) {
  parser.value("key-file", "FILE",
               borrower ? "read the key from FILE; default: GPULOAN_KEY, else PATH.key"
                        : "write the key to FILE (0600) until it is used; replaces only a key; default: PATH.key",
               [this](const std::string& text) {
                 if (text.empty()) throw Failure(ExitUsage, "is empty; name a file");
                 file = text;
               });
  parser.value("key-fd", "N",
               borrower ? "read the key from this inherited FD" : "write the key to this inherited FD instead",
               [this](const std::string& text) { fd = static_cast<int>(parse_number(text, 0, INT32_MAX)); });
}

void write_key(int fd, const gpuloan_key& key, const Deadline& deadline) {
  const std::string text = format_key(key) + "\n";
  write_all(fd, std::as_bytes(std::span(text)), "FD " + std::to_string(fd), deadline);
}

namespace {

// Only the key of an earlier lender, or an empty file, is replaced: any other file is somebody's.
void check_replaceable(const std::string& path, const Deadline& deadline) {
  struct stat info = {};
  if (::lstat(path.c_str(), &info) != 0) return;
  if (S_ISREG(info.st_mode) && static_cast<std::size_t>(info.st_size) < kMaxKeyText) {
    const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
    if (fd.get() < 0) file_failure("open", path, errno);
    const std::string text = read_text(fd.get(), kMaxKeyText, path, deadline);
    if (text.empty() || key_in(text)) return;
  }
  throw Failure(ExitFile, "the key would replace '" + path +
                              "', which holds no key; name another file with --key-file, or remove it");
}

} // namespace

KeyFile::KeyFile(std::string path, const gpuloan_key& key, const Deadline& deadline) : path_(std::move(path)) {
  check_replaceable(path_, deadline);
  std::string temporary = path_ + ".XXXXXX";
  const Fd fd(::mkostemp(temporary.data(), O_CLOEXEC)); // mode 0600
  if (fd.get() < 0) file_failure("create the key file", path_, errno);
  struct stat info = {};
  try {
    write_key(fd.get(), key, deadline);
    if (::fstat(fd.get(), &info) != 0 || ::rename(temporary.c_str(), path_.c_str()) != 0) {
      file_failure("create the key file", path_, errno);
    }
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  device_ = info.st_dev;
  inode_ = info.st_ino;
}

KeyFile::~KeyFile() {
  struct stat info = {};
  if (::stat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_) ::unlink(path_.c_str());
}

KeySource::KeySource(const KeyOptions& options, const std::string& socket, const Deadline& deadline)
    : deadline_(deadline) {
  const char* variable = std::getenv("GPULOAN_KEY");
  if (options.fd >= 0) {
    name_ = "the key's FD " + std::to_string(options.fd);
    fixed_ = parse(read_line(options.fd, name_, deadline));
  } else if (options.file.empty() && variable != nullptr && *variable != '\0') {
    name_ = "GPULOAN_KEY";
    fixed_ = parse(variable);
  } else {
    path_ = options.file_for(socket);
    name_ = "the key file '" + path_ + "'";
  }
}

gpuloan_key KeySource::parse(const std::string& text) const {
  if (const auto key = key_in(text)) return *key;
  refuse(name_ + " does not hold a key: 64 hexadecimal digits, as 'gpuloan lend' wrote them");
}

std::optional<gpuloan_key> KeySource::read() const {
  if (!is_file()) return fixed_;
  const Fd fd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0 && errno == ENOENT) return std::nullopt;
  if (fd.get() < 0) refuse("cannot open " + name_ + ": " + std::strerror(errno));
  struct stat info = {};
  const Deadline at_once(1000); // a file is never waited for: it is not the key that was too late
  const bool waits = ::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode);
  return parse(read_text(fd.get(), kMaxKeyText, path_, waits ? deadline_ : at_once));
}

} // namespace gpuloan::tool
