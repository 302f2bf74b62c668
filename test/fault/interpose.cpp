// SPDX-License-Identifier: MIT
#include "interpose.hpp"

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <new>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <unwind.h>

#define FAULT_PUBLIC extern "C" __attribute__((visibility("default")))

namespace {

using namespace fault;

struct Range {
  std::uintptr_t from = 0, to = 0;
  [[nodiscard]] bool has(const void* address) const noexcept {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    return at >= from && at < to;
  }
};
Range library, runtime, own;

std::atomic<bool> counting{false};
std::atomic<std::uint64_t> counts[kCallCount];
std::atomic<int> armed_index{-1};
std::atomic<std::uint64_t> armed_n{0};
std::atomic<int> armed_error{0};
std::atomic<bool> fired{false};

int note_range(dl_phdr_info* info, std::size_t, void*) {
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* name = slash != nullptr ? slash + 1 : info->dlpi_name;
  Range* out = std::strncmp(name, "libgpuloan.so", 13) == 0           ? &library
               : std::strncmp(name, "libstdc++.so", 12) == 0          ? &runtime
               : std::strncmp(name, "libgpuloan-fault", 16) == 0      ? &own
                                                                      : nullptr;
  if (out == nullptr) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
    out->from = info->dlpi_addr + part.p_vaddr;
    out->to = out->from + part.p_memsz;
  }
  return 0;
}

// The first frame that is neither ours nor libstdc++'s.
_Unwind_Reason_Code step(_Unwind_Context* context, void* result) {
  const auto at = reinterpret_cast<const void*>(_Unwind_GetIP(context));
  if (own.has(at) || runtime.has(at)) return _URC_NO_REASON;
  *static_cast<bool*>(result) = library.has(at);
  return _URC_END_OF_STACK;
}

bool from_library(const void* caller) noexcept {
  if (library.has(caller)) return true;
  if (!runtime.has(caller)) return false;
  bool is = false;
  _Unwind_Backtrace(step, &is);
  return is;
}

thread_local bool inside = false; // unwinding may call us

// Whether this call has to fail; errno is set then.
bool fails(int index, const void* caller) noexcept {
  if (!counting.load(std::memory_order_relaxed) || inside) return false;
  inside = true;
  const int saved = errno;
  const bool counts_here = from_library(caller);
  bool fail = false;
  if (counts_here) {
    const std::uint64_t number = counts[index].fetch_add(1) + 1;
    fail = index == armed_index.load() && number == armed_n.load();
  }
  if (fail) {
    fired = true;
    if (std::getenv("FAULT_TRACE") != nullptr) {
      void* frames[24];
      const int depth = ::backtrace(frames, 24);
      ::backtrace_symbols_fd(frames, depth, STDERR_FILENO);
    }
  }
  errno = fail ? armed_error.load() : saved;
  inside = false;
  return fail;
}

template <typename Function>
Function next(Function, const char* name) noexcept {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

constexpr int index_of(const char* name) {
  for (int i = 0; i < kCallCount; ++i) {
    if (std::string_view(kCalls[i]) == name) return i;
  }
  return -1;
}

} // namespace

#define FAULT_HERE(name) fails(index_of(name), __builtin_return_address(0))

FAULT_PUBLIC void fault_arm(int index, std::uint64_t n, int error) {
  if (library.to == 0) ::dl_iterate_phdr(note_range, nullptr);
  void* warm[2];
  static_cast<void>(::backtrace(warm, 2)); // loads the unwinder, which allocates
  for (auto& count : counts) count = 0;
  armed_index = index;
  armed_n = n;
  armed_error = error;
  counting = true;
}
FAULT_PUBLIC void fault_disarm() { counting = false; }
FAULT_PUBLIC std::uint64_t fault_count(int index) { return counts[index].load(); }
FAULT_PUBLIC bool fault_fired() { return fired.load(); }

// Each passes on with the real function, looked up once.
#define FAULT_FORWARD(result, failure, name, params, args)                        \
  FAULT_PUBLIC result name params {                                               \
    static const auto real = next(static_cast<result(*) params>(nullptr), #name); \
    return FAULT_HERE(#name) ? (failure) : real args;                             \
  }

FAULT_FORWARD(int, -1, memfd_create, (const char* name, unsigned flags), (name, flags))
FAULT_FORWARD(int, -1, epoll_create1, (int flags), (flags))
FAULT_FORWARD(int, -1, epoll_ctl, (int set, int operation, int fd, epoll_event* event), (set, operation, fd, event))
FAULT_FORWARD(int, -1, epoll_pwait2, (int set, epoll_event* events, int room, const timespec* timeout, const sigset_t* mask),
              (set, events, room, timeout, mask))
FAULT_FORWARD(int, -1, eventfd, (unsigned count, int flags), (count, flags))
FAULT_FORWARD(ssize_t, -1, sendmsg, (int socket, const msghdr* message, int flags), (socket, message, flags))
FAULT_FORWARD(int, -1, recvmmsg, (int socket, mmsghdr* messages, unsigned room, int flags, timespec* timeout),
              (socket, messages, room, flags, timeout))
FAULT_FORWARD(int, -1, setsockopt, (int socket, int level, int name, const void* value, socklen_t size), (socket, level, name, value, size))
FAULT_FORWARD(int, -1, getsockopt, (int socket, int level, int name, void* value, socklen_t* size), (socket, level, name, value, size))
FAULT_FORWARD(int, -1, getpeername, (int socket, sockaddr* address, socklen_t* size), (socket, address, size))
FAULT_FORWARD(int, armed_error.load(), pthread_create,
              (pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument),
              (thread, attributes, body, argument))

// With 64-bit offsets libc has them under other names.
#define FAULT_FORWARD64(result, failure, name, name64, params, args)              \
  FAULT_PUBLIC result name64 params {                                             \
    static const auto real = next(static_cast<result(*) params>(nullptr), #name64); \
    return FAULT_HERE(#name) ? (failure) : real args;                             \
  }
FAULT_FORWARD64(void*, MAP_FAILED, mmap, mmap64, (void* at, std::size_t bytes, int access, int flags, int fd, off64_t offset),
                (at, bytes, access, flags, fd, offset))
FAULT_FORWARD64(int, -1, ftruncate, ftruncate64, (int fd, off64_t bytes), (fd, bytes))
FAULT_FORWARD64(int, -1, fstat, fstat64, (int fd, struct stat64* out), (fd, out))

FAULT_PUBLIC int fcntl64(int fd, int command, ...) {
  static const auto real = next(static_cast<int (*)(int, int, ...)>(nullptr), "fcntl64");
  va_list rest;
  va_start(rest, command);
  const long argument = va_arg(rest, long);
  va_end(rest);
  return FAULT_HERE("fcntl") ? -1 : real(fd, command, argument);
}

FAULT_PUBLIC long syscall(long number, ...) {
  static const auto real = next(static_cast<long (*)(long, ...)>(nullptr), "syscall");
  va_list rest;
  va_start(rest, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(rest, long);
  va_end(rest);
  if (number == SYS_pidfd_open && FAULT_HERE("pidfd_open")) return -1; // others are libstdc++'s futexes
  return real(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}

// ---- Allocations --------------------------------------------------------------------------------------------------

__attribute__((visibility("default"))) void* operator new(std::size_t bytes) {
  void* made = FAULT_HERE("new") ? nullptr : std::malloc(bytes != 0 ? bytes : 1);
  if (made == nullptr) throw std::bad_alloc();
  return made;
}

__attribute__((visibility("default"))) void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return FAULT_HERE("new") ? nullptr : std::malloc(bytes != 0 ? bytes : 1);
}

__attribute__((visibility("default"))) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((visibility("default"))) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
