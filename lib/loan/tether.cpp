// SPDX-License-Identifier: MIT
#include <loan/tether.hpp>

#include <base/log.hpp>
#include <base/mapping.hpp>
#include <base/thread.hpp>

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <poll.h>

namespace gpuloan::loan {
namespace {

void await_death(int pidfd) noexcept {
  pollfd death = {pidfd, POLLIN, 0};
  while (::poll(&death, 1, -1) < 0 && errno == EINTR) {
  }
}

} // namespace

Result<Tether> Tether::create() {
  auto fd = create_memfd("gpuloan-tether", kTetherBytes);
  if (!fd) return forward(std::move(fd.error()));
  Tether made;
  made.fd_ = std::move(*fd);
  return made;
}

bool Tether::let_go() const noexcept { return ::fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_WRITE) == 0; }

void keep_until_gone(UniqueFd pidfd, std::shared_ptr<const Tether> tether, std::function<void()> gone) noexcept {
  if (!pidfd) return;
  try {
    start_thread("gpuloan-keep", [pidfd = std::move(pidfd), tether = std::move(tether), gone = std::move(gone)] {
      await_death(pidfd.get());
      for (auto pause = kTetherFirstPause; !tether->let_go(); pause = std::min(pause * 2, kTetherLongestPause)) std::this_thread::sleep_for(pause);
      gone();
    }).detach();
  } catch (...) {
    GPULOAN_LOG(GPULOAN_LOG_WARNING, "no thread to watch for the end of a lost peer: what it may still touch is kept for ever");
  }
}

} // namespace gpuloan::loan
