// SPDX-License-Identifier: MIT
#include "files.hpp"

#include "exit_codes.hpp"
#include "wait.hpp"

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace gpuloan::tool {

void file_failure(const char* action, const std::string& path, int code) {
  throw Failure(ExitFile, std::string("cannot ") + action + " '" + path + "': " + std::strerror(code));
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

namespace {

[[noreturn]] void too_late(const char* action, const std::string& path, const Deadline& deadline) {
  throw Failure(ExitTimeout, std::string("cannot ") + action + " '" + path + "' within " + deadline.text() +
                                 ": the other end is too slow, or there is none; raise --timeout");
}

// Until `fd` is ready for `events`; a regular file always is.
void wait_ready(int fd, short events, const char* action, const std::string& path, const Deadline& deadline) {
  for (;;) {
    check_interrupted();
    if (deadline.passed()) too_late(action, path, deadline);
    pollfd ready = {fd, events, 0};
    const int count = ::poll(&ready, 1, static_cast<int>(deadline.slice().count()));
    if (count > 0) return;
    if (count < 0 && errno != EINTR) file_failure(action, path, errno);
  }
}

bool is_regular(int fd) {
  struct stat info = {};
  return ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

} // namespace

Fd open_patiently(const std::string& path, int flags, const Deadline& deadline) {
  for (;;) {
    check_interrupted();
    Fd fd(::open(path.c_str(), flags | O_NONBLOCK | O_CLOEXEC));
    if (fd.get() >= 0) return fd;
    if (errno != ENXIO && errno != EINTR) file_failure("open", path, errno);
    if (deadline.passed()) too_late("open", path, deadline);
    std::this_thread::sleep_for(std::min(deadline.left(), Milliseconds(10)));
  }
}

void write_all(int fd, std::span<const std::byte> bytes, const std::string& path, const Deadline& deadline) {
  const bool regular = is_regular(fd);
  // What one write() can take without waiting once poll() said that it may.
  const std::size_t piece = regular || (::fcntl(fd, F_GETFL) & O_NONBLOCK) != 0 ? SIZE_MAX : PIPE_BUF;
  while (!bytes.empty()) {
    regular ? check_interrupted() : wait_ready(fd, POLLOUT, "write", path, deadline);
    const ssize_t count = ::write(fd, bytes.data(), std::min(bytes.size(), piece));
    if (count > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(count));
    } else if (errno != EINTR && errno != EAGAIN) {
      file_failure("write", path, errno);
    }
  }
}

std::size_t read_some(int fd, std::span<std::byte> bytes, const std::string& path, const Deadline& deadline) {
  for (;;) {
    wait_ready(fd, POLLIN, "read", path, deadline);
    const ssize_t count = ::read(fd, bytes.data(), bytes.size());
    if (count >= 0) return static_cast<std::size_t>(count);
    if (errno != EINTR && errno != EAGAIN) file_failure("read", path, errno);
  }
}

std::string read_text(int fd, std::size_t limit, const std::string& path, const Deadline& deadline) {
  std::string text;
  char buffer[256];
  while (text.size() < limit) {
    const auto room = std::as_writable_bytes(std::span(buffer)).first(std::min(sizeof buffer, limit - text.size()));
    const std::size_t count = read_some(fd, room, path, deadline);
    if (count == 0) break;
    text.append(buffer, count);
  }
  return text;
}

namespace {

class FileSource : public Source {
 public:
  FileSource(Fd fd, std::uint64_t size, std::string path) : fd_(std::move(fd)), size_(size), path_(std::move(path)) {}
  std::uint64_t size() const override { return size_; }
  std::string name() const override { return path_; }
  void read(std::uint64_t offset, std::span<std::byte> bytes) override {
    while (!bytes.empty()) {
      check_interrupted();
      const ssize_t count = ::pread(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) file_failure("read", path_, errno);
      if (count == 0)
        throw Failure(ExitFile, "'" + path_ + "' became shorter while it was read; leave it alone and try again");
      offset += static_cast<std::uint64_t>(count);
      bytes = bytes.subspan(static_cast<std::size_t>(count));
    }
  }

 private:
  Fd fd_;
  std::uint64_t size_;
  std::string path_;
};

// splitmix64 of the word's index: any offset can be made without the words before it.
class RandomSource : public Source {
 public:
  RandomSource(std::uint64_t size, std::uint64_t seed) : size_(size), seed_(seed) {}
  std::uint64_t size() const override { return size_; }
  std::string name() const override { return "pseudo-random bytes"; }
  void read(std::uint64_t offset, std::span<std::byte> bytes) override {
    check_interrupted();
    for (std::size_t done = 0; done < bytes.size();) {
      const std::uint64_t word = word_at((offset + done) / 8);
      const std::size_t skip = (offset + done) % 8;
      const std::size_t count = std::min(8 - skip, bytes.size() - done);
      std::byte raw[8];
      std::memcpy(raw, &word, sizeof raw);
      std::memcpy(bytes.data() + done, raw + skip, count);
      done += count;
    }
  }

 private:
  [[nodiscard]] std::uint64_t word_at(std::uint64_t index) const {
    std::uint64_t value = seed_ + (index + 1) * 0x9E3779B97F4A7C15U;
    value = (value ^ (value >> 30U)) * 0xBF58476D1CE4E5B9U;
    value = (value ^ (value >> 27U)) * 0x94D049BB133111EBU;
    return value ^ (value >> 31U);
  }
  std::uint64_t size_, seed_;
};

Fd unnamed_file() {
  const char* folder = std::getenv("TMPDIR");
  if (folder == nullptr || *folder == '\0') folder = "/tmp";
  Fd fd(::open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (fd.get() < 0) file_failure("make a temporary file in", folder, errno);
  return fd;
}

std::unique_ptr<Source> spool(int from, const std::string& path, const Deadline& deadline) {
  Fd fd = unnamed_file();
  std::vector<std::byte> buffer(1U << 20U);
  std::uint64_t size = 0;
  while (const std::size_t count = read_some(from, buffer, path, deadline)) {
    write_all(fd.get(), std::span(buffer).first(count), "a temporary file", deadline);
    size += count;
  }
  return std::make_unique<FileSource>(std::move(fd), size, path);
}

} // namespace

std::unique_ptr<Source> open_file(const std::string& path, const Deadline& deadline) {
  if (path == "-") return spool(STDIN_FILENO, "standard input", deadline);
  Fd fd = open_patiently(path, O_RDONLY, deadline);
  struct stat info = {};
  if (::fstat(fd.get(), &info) != 0) file_failure("open", path, errno);
  if (S_ISDIR(info.st_mode)) file_failure("read", path, EISDIR);
  // Files such as those of /proc say that they are empty and are not.
  if (!S_ISREG(info.st_mode) || info.st_size == 0) return spool(fd.get(), path, deadline);
  return std::make_unique<FileSource>(std::move(fd), static_cast<std::uint64_t>(info.st_size), path);
}

std::unique_ptr<Source> random_bytes(std::uint64_t size, std::uint64_t seed) {
  return std::make_unique<RandomSource>(size, seed);
}

Output::Output(std::string path, const Deadline& deadline) : path_(std::move(path)), deadline_(deadline) {
  if (path_ == "-") {
    fd_ = Fd(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
    if (fd_.get() < 0) file_failure("use", "standard output", errno);
    return;
  }
  struct stat info = {};
  const bool exists = ::stat(path_.c_str(), &info) == 0;
  if (exists) mode_ = info.st_mode & 0777;
  if (exists && S_ISDIR(info.st_mode)) file_failure("write", path_, EISDIR);
  if (exists && !S_ISREG(info.st_mode)) {
    fd_ = open_patiently(path_, O_WRONLY, deadline_); // a pipe waits here for its reader
  } else {
    create_temporary();
  }
}

void Output::create_temporary() {
  temporary_ = path_ + ".XXXXXX";
  fd_ = Fd(::mkostemp(temporary_.data(), O_CLOEXEC));
  if (fd_.get() < 0) {
    temporary_.clear();
    file_failure("create", path_, errno);
  }
  if (!mode_) { // as any program would make it; mkostemp made it 0600
    const mode_t mask = ::umask(0);
    ::umask(mask);
    mode_ = 0666 & ~mask;
  }
  static_cast<void>(::fchmod(fd_.get(), *mode_));
}

Output::~Output() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void Output::write(std::span<const std::byte> bytes) {
  write_all(fd_.get(), bytes, path_ == "-" ? "standard output" : path_, deadline_);
}

void Output::commit() {
  if (temporary_.empty()) return;
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) file_failure("replace", path_, errno);
  temporary_.clear();
}

} // namespace gpuloan::tool
