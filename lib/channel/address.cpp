// SPDX-License-Identifier: MIT
//
// Socket files: listening at a path, accepting, connecting.
//
// A socket file outlives its process. So a path that is taken is asked: who answers is alive; who refuses left a stale
// file, which is replaced; anything that is no socket is somebody's file and is left alone. Between bind() and listen()
// a live owner refuses too; the owner keeps that moment short and the asker asks again before it calls a file stale.
#include <channel/socket.hpp>

#include <base/clock.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

namespace gpuloan::channel {
namespace {

constexpr std::size_t kPathMax = sizeof(sockaddr_un::sun_path) - 1;
constexpr int kBacklog = 128;
constexpr int kBindTries = 4; // a stale file may be replaced by another process in between
constexpr int kProbes = 3;
constexpr long kProbePauseNs = 5'000'000;
constexpr mode_t kMode = 0600;

static_assert(kPathMax == 107);

std::string at_path(const char* call, const char* path) { return std::string(call) + "(" + path + ")"; }

Result<sockaddr_un> make_address(const char* path) {
  const std::size_t length = path != nullptr ? std::strlen(path) : 0;
  if (length == 0) return fail(GPULOAN_ERR_INVALID, "the socket path is empty");
  if (length > kPathMax) {
    return fail(GPULOAN_ERR_INVALID, "the socket path has " + std::to_string(length) + " bytes, the limit is " +
                                         std::to_string(kPathMax) + ": " + path);
  }
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path, length);
  return address;
}

Result<UniqueFd> make_socket(int flags) {
  UniqueFd fd = UniqueFd::take(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!fd) return fail_errno("socket", errno);
  return fd;
}

// 0, or a positive errno.
int connect_once(int socket, const sockaddr_un& address) noexcept {
  return ::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ? 0 : errno;
}

int bind_once(int socket, const sockaddr_un& address) noexcept {
  return ::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ? 0 : errno;
}

// What connect() says about a path that is taken. A positive errno, 0 when somebody accepts.
Result<int> probe(const sockaddr_un& address) {
  int error = ECONNREFUSED;
  for (int i = 0; i < kProbes && error == ECONNREFUSED; ++i) {
    if (i != 0) {
      const timespec pause = {0, kProbePauseNs};
      ::nanosleep(&pause, nullptr);
    }
    auto socket = make_socket(SOCK_NONBLOCK);
    if (!socket) return forward(std::move(socket.error()));
    error = connect_once(socket->get(), address);
  }
  return error;
}

// Ok when the path is free, or likely to be, at the next bind.
Result<void> clear_stale(const char* path, const sockaddr_un& address) {
  struct stat before = {};
  if (::lstat(path, &before) != 0) {
    if (errno == ENOENT) return {};
    return fail_errno(at_path("lstat", path).c_str(), errno);
  }
  if (!S_ISSOCK(before.st_mode)) return fail(GPULOAN_ERR_INVALID, std::string(path) + " exists and is no socket");
  const auto answer = probe(address);
  if (!answer) return forward(Error(answer.error()));
  switch (*answer) {
    case 0:
    case EAGAIN:     // its backlog is full
    case EPROTOTYPE: // another type of socket
      return fail(GPULOAN_ERR_ADDRESS_IN_USE, std::string("somebody already listens at ") + path);
    case ENOENT:
      return {};
    case ECONNREFUSED:
      break;
    default:
      return fail_errno(at_path("connect", path).c_str(), *answer);
  }
  struct stat after = {};
  const bool same = ::lstat(path, &after) == 0 && after.st_dev == before.st_dev && after.st_ino == before.st_ino;
  if (same && ::unlink(path) != 0 && errno != ENOENT) return fail_errno(at_path("unlink", path).c_str(), errno);
  return {};
}

Result<void> bind_at(int socket, const char* path, const sockaddr_un& address) {
  for (int i = 0; i < kBindTries; ++i) {
    const int error = bind_once(socket, address);
    switch (error) {
      case 0:
        return {};
      case EADDRINUSE:
        GPULOAN_TRY(clear_stale(path, address));
        break;
      case ENOENT:
      case ENOTDIR:
      case EACCES:
      case EPERM:
      case EROFS:
      case ELOOP:
        return fail_errno(GPULOAN_ERR_INVALID, at_path("bind", path).c_str(), error);
      default:
        return fail_errno(at_path("bind", path).c_str(), error);
    }
  }
  return fail(GPULOAN_ERR_ADDRESS_IN_USE, std::string("others keep taking the path ") + path);
}

// bind() gives the file the mode of the socket, less the umask; chmod makes up for a umask that took too much or a
// kernel that does otherwise. Nobody can connect before listen().
Result<void> make_private(const char* path, SocketFile& file) {
  struct stat info = {};
  if (::lstat(path, &info) != 0) return fail_errno(at_path("lstat", path).c_str(), errno);
  if (!S_ISSOCK(info.st_mode)) return fail(GPULOAN_ERR_INVALID, std::string(path) + " was replaced by another file");
  file.name = path;
  file.device = info.st_dev;
  file.inode = info.st_ino;
  const std::size_t slash = file.name.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : file.name.substr(0, slash + 1);
  file.folder = UniqueFd::take(::open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!file.folder) return fail_errno(at_path("open", folder.c_str()).c_str(), errno);
  if (slash != std::string::npos) file.name.erase(0, slash + 1);
  if ((info.st_mode & 07777) == kMode) return {};
  if (::chmod(path, kMode) != 0) return fail_errno(at_path("chmod", path).c_str(), errno);
  return {};
}

// Our own socket may be denied for a moment, until its chmod().
Result<UniqueFd> denied(const char* path) {
  struct stat info = {};
  Error error{GPULOAN_ERR_INVALID, errno_text(at_path("connect", path).c_str(), EACCES)};
  if (::stat(path, &info) == 0) {
    error.status = info.st_uid == ::geteuid() ? GPULOAN_ERR_CONNECT : GPULOAN_ERR_UID;
    error.text += ": the file is user " + std::to_string(info.st_uid) + "'s, this process runs as user " + std::to_string(::geteuid());
  }
  return std::unexpected(std::move(error));
}

// A connect() that may block until then. 0 would mean for ever, so a deadline that has passed still gives one try.
Result<void> limit_blocking(int socket, std::uint64_t deadline_ns) {
  const std::uint64_t now = now_ns();
  const std::uint64_t left_us = now >= deadline_ns ? 1 : std::min<std::uint64_t>((deadline_ns - now) / 1000 + 1, 1ULL << 50);
  const timeval timeout = {static_cast<time_t>(left_us / 1'000'000U), static_cast<suseconds_t>(left_us % 1'000'000U)};
  if (::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) != 0) {
    return fail_errno("setsockopt(SO_SNDTIMEO)", errno);
  }
  return {};
}

} // namespace

void SocketFile::remove() const noexcept {
  const int at = folder ? folder.get() : AT_FDCWD;
  struct stat now = {};
  if (::fstatat(at, name.c_str(), &now, AT_SYMLINK_NOFOLLOW) != 0 || now.st_dev != device || now.st_ino != inode) return;
  ::unlinkat(at, name.c_str(), 0);
}

Result<Listener> listen_at(const char* path) {
  const auto address = make_address(path);
  if (!address) return forward(Error(address.error()));
  auto socket = make_socket(SOCK_NONBLOCK);
  if (!socket) return forward(std::move(socket.error()));
  // On the listening socket, since a connection may bring its first record before it is accepted.
  GPULOAN_TRY(enable_identity(socket->get()));
  if (::fchmod(socket->get(), kMode) != 0) return fail_errno("fchmod(socket)", errno);
  GPULOAN_TRY(bind_at(socket->get(), path, *address));
  SocketFile file;
  Result<void> ready = make_private(path, file);
  if (ready && ::listen(socket->get(), kBacklog) != 0) ready = fail_errno("listen", errno);
  if (ready) return Listener{std::move(*socket), std::move(file)};
  file.remove();
  return forward(std::move(ready.error()));
}

Result<UniqueFd> accept_one(int listener) {
  for (;;) {
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) return UniqueFd::take(fd);
    if (errno == EAGAIN) return UniqueFd();
    if (errno != EINTR && errno != ECONNABORTED) return fail_errno("accept4", errno);
  }
}

// Blocking, with a limit: a non-blocking connect() to a full backlog says EAGAIN and offers nothing to wait for.
Result<UniqueFd> connect_to(const char* path, std::uint64_t deadline_ns) {
  const auto address = make_address(path);
  if (!address) return forward(Error(address.error()));
  auto socket = make_socket(0);
  if (!socket) return socket;
  for (;;) {
    GPULOAN_TRY(limit_blocking(socket->get(), deadline_ns));
    const int error = connect_once(socket->get(), *address);
    if (error == 0) break;
    if (error == EACCES) return denied(path);
    if (error != EINTR && error != EAGAIN) {
      return fail_errno(GPULOAN_ERR_CONNECT, at_path("connect", path).c_str(), error);
    }
    if (now_ns() >= deadline_ns) {
      return fail(GPULOAN_ERR_TIMEOUT, std::string("the backlog of ") + path + " stayed full");
    }
  }
  GPULOAN_TRY(check_inherited(socket->get())); // makes it non-blocking
  return socket;
}

} // namespace gpuloan::channel
