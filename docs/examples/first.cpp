// SPDX-License-Identifier: MIT
//
// The program of first.c with gpuloan.hpp: a parent lends a worker memory, the worker writes into it in place, and the
// parent reads the result. Compile with: g++ first.cpp -o first $(pkg-config --cflags --libs gpuloan)
#include <gpuloan/gpuloan.hpp>

#include <cstdio>
#include <iostream>
#include <sys/socket.h>
#include <unistd.h>

using namespace std::chrono_literals;

namespace {

// The event of this type, others are passed over.
gpuloan::Event wait_for(gpuloan::Context& context, gpuloan_event_type type) {
  for (;;) {
    auto event = context.next_event(5s);
    if (!event) throw gpuloan::StatusError(GPULOAN_ERR_TIMEOUT, "the other side did not answer");
    if (event->type() == type) return std::move(*event);
  }
}

int worker() {
  auto options = gpuloan::init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_IMPORTER;
  options.flags = GPULOAN_CONTEXT_NO_DEVICE; // no GPU here: loans are host memory
  auto context = gpuloan::Context::create(options);
  const auto parent = context.adopt(STDIN_FILENO, 5s);
  auto loan = wait_for(context, GPULOAN_EVENT_LOAN_OFFERED).take_loan();
  const gpuloan_view view = loan.acquire(5s);
  std::snprintf(static_cast<char*>(view.host), view.bytes, "written in place by process %d",
                static_cast<int>(getpid()));
  loan.done(GPULOAN_STREAM_CPU);
  loan.wait_end(5s);
  return 0;
}

int parent(char* name) {
  auto options = gpuloan::init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_EXPORTER;
  auto context = gpuloan::Context::create(options);
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return 1;
  if (fork() == 0) {
    dup2(ends[1], STDIN_FILENO);
    execl("/proc/self/exe", name, "worker", static_cast<char*>(nullptr));
    _exit(127);
  }
  close(ends[1]);
  context.attach(ends[0], "worker");
  auto peer = wait_for(context, GPULOAN_EVENT_PEER_READY).take_peer();

  auto place = gpuloan::init<gpuloan_region_options>();
  place.bytes = 64;
  place.access = GPULOAN_ACCESS_WRITE;
  place.memory = GPULOAN_MEMORY_HOST;
  auto region = peer.create_region(place);
  auto terms = gpuloan::init<gpuloan_lend_options>();
  terms.access = GPULOAN_ACCESS_WRITE;
  terms.memory = GPULOAN_MEMORY_HOST;
  auto loan = peer.lend(region.pointer(), region.bytes(), terms);
  loan.wait_end(5s);
  std::cout << "process " << getpid() << " reads: " << static_cast<char*>(region.host()) << '\n';
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return argc > 1 ? worker() : parent(argv[0]);
  } catch (const gpuloan::StatusError& error) {
    std::cerr << gpuloan_status_name(error.status()) << ": " << error.what() << '\n';
    return 1;
  }
}
