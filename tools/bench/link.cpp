// SPDX-License-Identifier: MIT
#include "link.hpp"

#include "run.hpp"

#include <cerrno>
#include <cstring>
#include <sys/socket.h>

namespace gpuloan::tool::bench {
namespace {

struct Ends {
  Fd ours, theirs;
};

Ends socket_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw Failure(ExitSystem, std::string("socketpair: ") + std::strerror(errno));
  }
  return {Fd(ends[0]), Fd(ends[1])};
}

} // namespace

Link start_worker(const BenchOptions& options) {
  Ends control = socket_pair();
  std::vector<std::string> arguments = {"bench-worker", "--fd", std::to_string(Child::kInheritedFd), "--device", std::to_string(options.common.device),
                                        "--timeout", std::to_string(options.common.timeout_ms / 1000 + 1)};
  if (options.loans.loop == GPULOAN_LOOP_CALLER) arguments.insert(arguments.end(), {"--loop", "caller"});
  if (options.loans.sleep != 0) arguments.insert(arguments.end(), {"--wait", "sleep"});
  if (!options.common.driver.empty()) arguments.insert(arguments.end(), {"--driver", options.common.driver});
  Link link;
  link.child = Child::start(arguments, control.theirs.get());
  link.channel = std::make_unique<Channel>(std::move(control.ours), options.common.timeout_ms);
  static_cast<void>(link.channel->expect(Op::Hello));
  return link;
}

void join(Link& link, Context& context, const Deadline& deadline) {
  Ends library = socket_pair();
  context.attach(library.ours.get(), "bench");
  static_cast<void>(library.ours.release());
  link.channel->send({.op = Op::Hello}, library.theirs.get());
  while (!link.peer) {
    auto event = next_event(context, deadline);
    if (!event) throw Failure(ExitTimeout, "the worker did not join within " + deadline.text());
    if (event->type() == GPULOAN_EVENT_PEER_READY) link.peer = event->take_peer();
    else if (event->type() == GPULOAN_EVENT_PEER_REFUSED) throw Failure(exit_code(event->status()), std::string("the worker was refused: ") + event->text());
  }
}

} // namespace gpuloan::tool::bench
