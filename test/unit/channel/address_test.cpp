// SPDX-License-Identifier: MIT
//
// Socket files: listening, taking over a stale one, leaving others' files alone, connecting, the limit on a path.
#include "support.hpp"

#include <base/clock.hpp>

#include <cstdlib>
#include <sys/stat.h>
#include <sys/un.h>

using namespace gpuloan;
using namespace gpuloan::channel;

namespace {

constexpr std::uint64_t kMillisecond = 1'000'000;
std::uint64_t soon() { return now_ns() + 10'000 * kMillisecond; }

// A directory of its own, removed with what the tests leave in it.
class Directory {
 public:
  Directory() {
    const char* base = std::getenv("TMPDIR");
    path_ = std::string(base != nullptr && std::strlen(base) < 40 ? base : "/tmp") + "/gpuloan-XXXXXX";
    REQUIRE(::mkdtemp(path_.data()) != nullptr);
  }
  ~Directory() {
    for (const std::string& file : files_) ::unlink(file.c_str());
    CHECK(::rmdir(path_.c_str()) == 0);
  }
  std::string file(const std::string& name) { return files_.emplace_back(path_ + "/" + name); }
  // A file whose whole path has `bytes` bytes.
  std::string file_of_length(std::size_t bytes) { return file(std::string(bytes - path_.size() - 1, 'p')); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::vector<std::string> files_;
};

UniqueFd bind_other(const std::string& path, int type, bool listening) {
  UniqueFd fd = UniqueFd::take(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  REQUIRE(fd);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  REQUIRE(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  if (listening) REQUIRE(::listen(fd.get(), 1) == 0);
  return fd;
}

struct stat status_of(const std::string& path) {
  struct stat info = {};
  REQUIRE(::lstat(path.c_str(), &info) == 0);
  return info;
}

} // namespace

TEST_CASE("listen, connect, accept, and a record in both directions") {
  const DescriptorGuard guard;
  Directory directory;
  const std::string path = directory.file("socket");
  const auto listener = listen_at(path.c_str());
  REQUIRE_MESSAGE(listener.has_value(), listener.error().text);
  CHECK(has_flags(listener->socket.get(), FD_CLOEXEC, O_NONBLOCK));
  auto nobody = accept_one(listener->socket.get());
  REQUIRE(nobody.has_value());
  CHECK_FALSE(*nobody);

  const auto client = connect_to(path.c_str(), soon());
  REQUIRE_MESSAGE(client.has_value(), client.error().text);
  CHECK(has_flags(client->get(), FD_CLOEXEC, O_NONBLOCK));
  // Before it is accepted: the exporter must know who says this.
  REQUIRE(send_record(client->get(), make_record(Type::Done)) == SendResult::Sent);
  const auto server = accept_one(listener->socket.get());
  REQUIRE(server.has_value());
  REQUIRE(*server);
  CHECK(has_flags(server->get(), FD_CLOEXEC, O_NONBLOCK));
  Letter letter;
  receive(server->get(), letter);
  const auto received = decode(letter.message());
  REQUIRE(received.has_value());
  CHECK(received->sender.known);
  CHECK(received->sender.pid == ::getpid());

  REQUIRE(send_record(server->get(), make_record(Type::Ready)) == SendResult::Sent);
  Letter answer;
  receive(client->get(), answer);
  CHECK(decode(answer.message()).has_value());
}

// E10
TEST_CASE("the socket file has mode 0600 whatever the umask") {
  const DescriptorGuard guard;
  Directory directory;
  for (const mode_t mask : {mode_t{0}, mode_t{022}, mode_t{0777}}) {
    const std::string path = directory.file("mode" + std::to_string(mask));
    const mode_t before = ::umask(mask);
    const auto listener = listen_at(path.c_str());
    ::umask(before);
    REQUIRE_MESSAGE(listener.has_value(), listener.error().text);
    CHECK((status_of(path).st_mode & 07777) == 0600);
  }
}

TEST_CASE("a stale file is replaced, a live one is not") {
  const DescriptorGuard guard;
  Directory directory;
  const std::string path = directory.file("socket");
  { REQUIRE(listen_at(path.c_str()).has_value()); } // the file stays
  REQUIRE(S_ISSOCK(status_of(path).st_mode));
  const auto listener = listen_at(path.c_str());
  REQUIRE_MESSAGE(listener.has_value(), listener.error().text);
  const ino_t inode = status_of(path).st_ino;
  check_fails(listen_at(path.c_str()), GPULOAN_ERR_ADDRESS_IN_USE, path);
  CHECK(status_of(path).st_ino == inode);
  CHECK(connect_to(path.c_str(), soon()).has_value());
}

TEST_CASE("live sockets of other kinds, and a full backlog, count as live") {
  const DescriptorGuard guard;
  Directory directory;
  const std::string stream = directory.file("stream");
  const UniqueFd other = bind_other(stream, SOCK_STREAM, true);
  check_fails(listen_at(stream.c_str()), GPULOAN_ERR_ADDRESS_IN_USE, "already listens");
  const std::string full = directory.file("full");
  const UniqueFd busy = bind_other(full, SOCK_SEQPACKET, true);
  std::vector<UniqueFd> waiting;
  for (auto client = connect_to(full.c_str(), 0); client; client = connect_to(full.c_str(), 0)) {
    waiting.push_back(std::move(*client));
  }
  CHECK(waiting.size() >= 1);
  check_fails(listen_at(full.c_str()), GPULOAN_ERR_ADDRESS_IN_USE, "already listens");
  check_fails(connect_to(full.c_str(), now_ns() + 20 * kMillisecond), GPULOAN_ERR_TIMEOUT, "backlog");
}

TEST_CASE("a stale socket of another kind is replaced") {
  const DescriptorGuard guard;
  Directory directory;
  const std::string path = directory.file("stale");
  bind_other(path, SOCK_STREAM, true).reset();
  CHECK(listen_at(path.c_str()).has_value());
}

TEST_CASE("a file that is no socket is left alone") {
  const DescriptorGuard guard;
  Directory directory;
  const std::string path = directory.file("precious");
  UniqueFd::take(::open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0644)).reset();
  const ino_t inode = status_of(path).st_ino;
  check_fails(listen_at(path.c_str()), GPULOAN_ERR_INVALID, path + " exists and is no socket");
  CHECK(status_of(path).st_ino == inode);
  check_fails(listen_at(directory.path().c_str()), GPULOAN_ERR_INVALID, "is no socket");

  const std::string link = directory.file("link"); // to a path that is free: bind() does not follow it
  REQUIRE(::symlink(directory.file("nowhere").c_str(), link.c_str()) == 0);
  check_fails(listen_at(link.c_str()), GPULOAN_ERR_INVALID, "is no socket");
}

// E8
TEST_CASE("paths: empty, in no directory, of 107 and of 108 bytes") {
  const DescriptorGuard guard;
  Directory directory;
  check_fails(listen_at(""), GPULOAN_ERR_INVALID, "empty");
  check_fails(connect_to("", soon()), GPULOAN_ERR_INVALID, "empty");
  check_fails(listen_at((directory.path() + "/none/socket").c_str()), GPULOAN_ERR_INVALID, "ENOENT");

  const std::string longest = directory.file_of_length(107);
  const auto listener = listen_at(longest.c_str());
  REQUIRE_MESSAGE(listener.has_value(), listener.error().text);
  CHECK(connect_to(longest.c_str(), soon()).has_value());
  const std::string too_long = directory.file_of_length(108);
  check_fails(listen_at(too_long.c_str()), GPULOAN_ERR_INVALID, "has 108 bytes, the limit is 107");
  check_fails(connect_to(too_long.c_str(), soon()), GPULOAN_ERR_INVALID, "has 108 bytes, the limit is 107");
}

// E5
TEST_CASE("connect: nobody there") {
  const DescriptorGuard guard;
  Directory directory;
  const std::string path = directory.file("socket");
  check_fails(connect_to(path.c_str(), soon()), GPULOAN_ERR_CONNECT, "ENOENT");
  { REQUIRE(listen_at(path.c_str()).has_value()); }
  check_fails(connect_to(path.c_str(), soon()), GPULOAN_ERR_CONNECT, "ECONNREFUSED");
  const std::string stream = directory.file("stream");
  const UniqueFd other = bind_other(stream, SOCK_STREAM, true);
  check_fails(connect_to(stream.c_str(), soon()), GPULOAN_ERR_CONNECT, "EPROTOTYPE");
}

TEST_CASE("accept_one: errors are errors") {
  const DescriptorGuard guard;
  const UniqueFd event = make_eventfd();
  check_fails(accept_one(event.get()), GPULOAN_ERR_SYSTEM, "ENOTSOCK");
}
