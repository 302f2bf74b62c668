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
constexpr std::uint64_t kAnyVersion = ~(std::uint64_t{0xFF} << 56); // of a magic, without the digit
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
  complain("GPULOAN_SIM_STATE, the state file " + path + ": " + why);
  return OperatingSystem;
}

// What open(2) said of a path.
std::string unopened(int error) {
  switch (error) {
    case ELOOP: return "it is a symbolic link: name the file itself";
    case EISDIR: return "it is a folder: name a file in it";
    case ENOENT:
    case ENOTDIR: return "its folder does not exist: make it, or name another path";
    case EACCES: return "it, or its folder, is not open to this user: name another path";
    case ENOSPC: return "no space is left for it: name a path on another file system";
    default: return std::strerror(error);
  }
}

// A table never has more entries in use than it holds.
bool damaged(const StateLayout& layout) noexcept {
  return layout.allocation_limit > kMaxAllocations || layout.event_limit > kMaxEvents || layout.claim_limit > kMaxClaims;
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
  if (!first) return refuse(path, unopened(errno));
  Fd fd(duplicate(first.get())); // away from the standard streams, should the process have closed them
  struct stat info = {};
  if (!fd || ::fstat(fd.get(), &info) != 0) return refuse(path, std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return refuse(path, "it is no regular file: name another path");
  if (info.st_uid != ::geteuid()) return refuse(path, "it belongs to another user: name another path");
  if ((info.st_mode & 077) != 0) return refuse(path, "it is open to other users: remove it, and it is made again with the mode 0600; or name another path");
  std::uint64_t magic = 0; // 0: of a new file
  if (::pread(fd.get(), &magic, sizeof magic, 0) < 0) return refuse(path, std::strerror(errno));
  if (magic != 0 && ((magic ^ kMagic) & kAnyVersion) != 0) return refuse(path, "the simulated driver did not make it, or it is damaged: remove it if nobody needs it, or name another path");
  // Growing is harmless whoever comes first; the size never changes again.
  if (static_cast<std::size_t>(info.st_size) < sizeof(StateLayout) &&
      ::ftruncate(fd.get(), static_cast<off_t>(sizeof(StateLayout))) != 0) {
    return refuse(path, unopened(errno));
  }
  void* address = ::mmap(nullptr, sizeof(StateLayout), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (address == MAP_FAILED) return refuse(path, std::strerror(errno));
  instance_ = new StateFile(std::move(fd), {info.st_dev, info.st_ino}, static_cast<StateLayout*>(address));
  const char* const refused = instance_->prepare();
  if (refused == nullptr) return Success;
  ::munmap(address, sizeof(StateLayout));
  delete instance_;
  instance_ = nullptr;
  return refuse(path, refused);
}

// Null, or why the file is left as it is. One that nobody uses begins anew where it cannot be read.
const char* StateFile::prepare() {
  const Guard guard(*this);
  const std::uint64_t magic = layout_->magic;
  if (magic == kMagic && !damaged(*layout_)) return nullptr;
  if (magic != 0) {
    if (locked_by_others(fd_.get(), kFirstHeldByte, kMutexByte - kFirstHeldByte)) {
      return magic == kMagic ? "it is damaged, and processes use it: end them, or name another path"
                             : "another version of the simulated driver made it, and its processes use it: end them, or name another path";
    }
    std::memset(static_cast<void*>(layout_), 0, sizeof *layout_);
  }
  layout_->magic = kMagic;
  return nullptr;
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
