// SPDX-License-Identifier: MIT
//
// Where bytes come from and go to. Sources know their size and can be read at any offset; an output file appears at its
// path complete or not at all. What may keep the command waiting (a pipe, a terminal, a device) does so until the
// deadline at most: a Failure (timeout) then.
#pragma once

#include "wait.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <sys/types.h>

namespace gpuloan::tool {

// A descriptor of the command's own, closed at the end of its life.
class Fd {
 public:
  Fd() noexcept = default;
  explicit Fd(int fd) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd();
  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] int release() noexcept {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_ = -1;
};

class Source {
 public:
  virtual ~Source() = default;
  [[nodiscard]] virtual std::uint64_t size() const = 0;
  [[nodiscard]] virtual std::string name() const = 0;
  // Fills `bytes` from `offset` on; the range lies within size(). Throws Failure (file).
  virtual void read(std::uint64_t offset, std::span<std::byte> bytes) = 0;
};

// A file, or standard input for "-"; what is not a regular file is first copied to an unnamed temporary file.
[[nodiscard]] std::unique_ptr<Source> open_file(const std::string& path, const Deadline& deadline);
// The same pseudo-random bytes for the same seed.
[[nodiscard]] std::unique_ptr<Source> random_bytes(std::uint64_t size, std::uint64_t seed);

class Output {
 public:
  // Creates a temporary file beside `path`, with the mode of the file that is there; takes standard output for "-"; opens what exists and is not a regular file,
  // such as a pipe, as it is. Throws Failure (file).
  Output(std::string path, const Deadline& deadline);
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  ~Output(); // removes the temporary file unless commit() was called
  void write(std::span<const std::byte> bytes);
  void commit();

 private:
  void create_temporary();
  std::string path_, temporary_;
  std::optional<mode_t> mode_; // of the file that will be replaced
  const Deadline& deadline_;
  Fd fd_;
};

// Throws Failure (file): "cannot open 'PATH': No such file or directory; …".
[[noreturn]] void file_failure(const char* action, const std::string& path, int code);
// Opens without waiting for the other end of a pipe: a reader is there at once, a writer as soon as somebody reads.
[[nodiscard]] Fd open_patiently(const std::string& path, int flags, const Deadline& deadline);
// All bytes or a Failure (file) that names `path`.
void write_all(int fd, std::span<const std::byte> bytes, const std::string& path, const Deadline& deadline);
// Some bytes; 0 at the end of the file.
[[nodiscard]] std::size_t read_some(int fd, std::span<std::byte> bytes, const std::string& path, const Deadline& deadline);
// At most `limit` bytes up to the end of the file or pipe.
[[nodiscard]] std::string read_text(int fd, std::size_t limit, const std::string& path, const Deadline& deadline);

} // namespace gpuloan::tool
