// SPDX-License-Identifier: MIT
//
// Opening, checking and locking the file. The layout never moves: a process maps it once, whole, and keeps it.
#include <sim/config.hpp>
#include <sim/state_file.hpp>

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace gpuloan::sim {
namespace {

constexpr std::uint64_t kMagic = 0x336d69736e616f6cU; // "loansim3"; the digit counts versions of the layout
constexpr off_t kMutexByte = off_t{1} << 43;
constexpr off_t kFirstHeldByte = off_t{1} << 40;

int lock_byte(int fd, int command, short type, off_t byte) noexcept {
  struct flock request = {};
  request.l_type = type;
  request.l_whence = SEEK_SET;
  request.l_start = byte;
  request.l_len = 1;
  int result = 0;
  do {
    result = ::fcntl(fd, command, &request);
  } while (result != 0 && errno == EINTR);
  return result;
}

// Whether another open file description holds any byte of [first, first + length); length 0 means to the end.
bool locked_by_others(int fd, off_t first, off_t length) noexcept {
  struct flock request = {};
  request.l_type = F_WRLCK;
  request.l_whence = SEEK_SET;
  request.l_start = first;
  request.l_len = length;
  if (::fcntl(fd, F_OFD_GETLK, &request) != 0) return true; // never free what we know nothing about
  return request.l_type != F_UNLCK;
}

CuResult refuse(const std::string& path, const std::string& why) {
  complain("state file " + path + ": " + why);
  return OperatingSystem;
}

} // namespace

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

int duplicate(int fd) noexcept { return ::fcntl(fd, F_DUPFD_CLOEXEC, 3); }

StateFile* StateFile::instance_ = nullptr;

StateFile::Guard::Guard(StateFile& file) : file_(file), lock_(file.mutex_) {
  lock_byte(file_.fd_.get(), F_SETLKW, F_WRLCK, kMutexByte);
}

StateFile::Guard::~Guard() { lock_byte(file_.fd_.get(), F_SETLK, F_UNLCK, kMutexByte); }

CuResult StateFile::open(const std::string& path) {
  const Fd first(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!first) return refuse(path, std::strerror(errno));
  Fd fd(duplicate(first.get())); // away from the standard streams, should the process have closed them
  struct stat info = {};
  if (!fd || ::fstat(fd.get(), &info) != 0) return refuse(path, std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return refuse(path, "not a regular file");
  if (info.st_uid != ::geteuid()) return refuse(path, "owned by another user");
  if ((info.st_mode & 077) != 0) return refuse(path, "open to other users: its mode must be 0600");
  // Growing is harmless whoever comes first; the size never changes again.
  if (static_cast<std::size_t>(info.st_size) < sizeof(StateLayout) &&
      ::ftruncate(fd.get(), static_cast<off_t>(sizeof(StateLayout))) != 0) {
    return refuse(path, std::strerror(errno));
  }
  void* address = ::mmap(nullptr, sizeof(StateLayout), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (address == MAP_FAILED) return refuse(path, std::strerror(errno));
  instance_ = new StateFile(std::move(fd), {info.st_dev, info.st_ino}, static_cast<StateLayout*>(address));
  const CuResult result = instance_->prepare();
  if (result == Success) return Success;
  ::munmap(address, sizeof(StateLayout));
  delete instance_;
  instance_ = nullptr;
  return refuse(path, "made by another version of the simulated driver and still in use");
}

CuResult StateFile::prepare() {
  const Guard guard(*this);
  if (layout_->magic == kMagic) return Success;
  if (layout_->magic != 0) {
    if (locked_by_others(fd_.get(), kFirstHeldByte, kMutexByte - kFirstHeldByte)) return OperatingSystem;
    std::memset(static_cast<void*>(layout_), 0, sizeof *layout_);
  }
  layout_->magic = kMagic;
  return Success;
}

void StateFile::hold(off_t byte) {
  unsigned& count = counts_[byte];
  if (count++ == 0) lock_byte(fd_.get(), F_OFD_SETLK, F_RDLCK, byte);
}

void StateFile::drop(off_t byte) noexcept {
  const auto found = counts_.find(byte);
  if (found == counts_.end() || --found->second > 0) return;
  counts_.erase(found);
  lock_byte(fd_.get(), F_OFD_SETLK, F_UNLCK, byte);
}

bool StateFile::held(off_t byte) const noexcept {
  return counts_.contains(byte) || locked_by_others(fd_.get(), byte, 1);
}

Fd StateFile::make_holder(off_t byte) const {
  Fd fd(::open(("/proc/self/fd/" + std::to_string(fd_.get())).c_str(), O_RDWR | O_CLOEXEC));
  if (!fd || ::lseek(fd.get(), byte, SEEK_SET) != byte) return Fd();
  lock_byte(fd.get(), F_OFD_SETLK, F_RDLCK, byte);
  return fd;
}

bool StateFile::held_by_others(off_t byte) const noexcept { return locked_by_others(fd_.get(), byte, 1); }

} // namespace gpuloan::sim
