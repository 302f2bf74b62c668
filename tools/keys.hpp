// SPDX-License-Identifier: MIT
//
// How the key of a connection travels from lend to borrow: a file with mode 0600 (by default beside the socket), an
// inherited FD, or, at the borrower, the environment variable GPULOAN_KEY. Never an argument: those are public.
#pragma once

#include "options.hpp"
#include "wait.hpp"

#include <optional>
#include <string>
#include <sys/types.h>

namespace gpuloan::tool {

struct KeyOptions {
  std::string file;
  int fd = -1;
  void add_to(Parser& parser, bool borrower);
  [[nodiscard]] std::string file_for(const std::string& socket) const { return file.empty() ? socket + ".key" : file; }
};

// Lender: the key is written to a temporary file that then takes the path, so that no reader sees half a key; removed
// at the end of this object's life if the path still is this file.
class KeyFile {
 public:
  KeyFile(std::string path, const gpuloan_key& key, const Deadline& deadline);
  KeyFile(const KeyFile&) = delete;
  KeyFile& operator=(const KeyFile&) = delete;
  ~KeyFile();
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};
void write_key(int fd, const gpuloan_key& key, const Deadline& deadline);

// Borrower: where the key comes from, in this order: --key-file, --key-fd, GPULOAN_KEY, the file beside the socket.
class KeySource {
 public:
  KeySource(const KeyOptions& options, const std::string& socket, const Deadline& deadline);
  // Reads it, afresh each time for a file. Empty while the file does not exist. Throws Failure (key).
  [[nodiscard]] std::optional<gpuloan_key> read() const;
  [[nodiscard]] bool is_file() const { return !path_.empty(); }
  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  [[nodiscard]] gpuloan_key parse(const std::string& text) const;
  std::string path_, name_;
  const Deadline& deadline_;
  std::optional<gpuloan_key> fixed_;
};

} // namespace gpuloan::tool
