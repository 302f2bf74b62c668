// SPDX-License-Identifier: MIT
//
// Threads of the library: named, and deaf to signals, which belong to the program's own threads.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <thread>
#include <utility>

namespace gpuloan {

// `name`: at most 15 bytes.
template <typename Body>
[[nodiscard]] std::thread start_thread(const char* name, Body&& body) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before); // inherited by the new thread
  struct Restore {
    const sigset_t& mask;
    ~Restore() { ::pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
  } restore{before};
  std::thread thread(std::forward<Body>(body));
  ::pthread_setname_np(thread.native_handle(), name);
  return thread;
}

} // namespace gpuloan
