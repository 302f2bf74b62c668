// SPDX-License-Identifier: MIT
//
// Faults below libgpuloan: the n-th call of a libc function, or the n-th allocation, that comes from the library fails. The
// functions are interposed by being in a shared library that is searched before libc; a call counts only if its return
// address lies in libgpuloan.so, or if it was made by libstdc++ on behalf of it (std::string, std::thread). What the test and
// the simulated driver call themselves is passed on.
#pragma once

#include <cstdint>

namespace fault {

// The functions that can fail, by index. The last is operator new, which throws std::bad_alloc.
inline constexpr const char* kCalls[] = {"memfd_create", "mmap", "ftruncate", "fcntl", "fstat", "sendmsg", "recvmmsg", "epoll_create1",
                                         "epoll_ctl", "epoll_pwait2", "eventfd", "setsockopt", "getsockopt", "getpeername", "pidfd_open",
                                         "pthread_create", "new"};
inline constexpr int kCallCount = sizeof kCalls / sizeof *kCalls;

extern "C" {
// Counts begin at 0; from now on the n-th call of function `index` fails with `error`. index -1: none, only count.
void fault_arm(int index, std::uint64_t n, int error);
void fault_disarm(); // no further fault, no further counts
std::uint64_t fault_count(int index);
bool fault_fired();
}

} // namespace fault
