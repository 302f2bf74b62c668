// SPDX-License-Identifier: MIT
//
// The worker of bench's control plane cases: one process with the other ends of all peers. An importer blocks, and turns its loop itself.
#include "control_worker.hpp"

#include <algorithm>
#include <map>
#include <sys/epoll.h>
#include <sys/socket.h>

namespace gpuloan::tool::bench {
namespace {

class ControlWorker {
 public:
  ControlWorker(int fd, std::uint32_t timeout_ms) : deadline_(timeout_ms), channel_(Fd(fd), timeout_ms) { raise_descriptor_limit(); }

  void run() {
    channel_.send({.op = Op::Hello});
    for (;;) {
      // What the socket did not take yet leaves when its loop is turned.
      while (!channel_.waits(Milliseconds(1)) && used_ != nullptr) used_->context.dispatch(Milliseconds(0));
      Fd fd;
      const Message message = channel_.receive(&fd);
      if (message.op == Op::Bye) return;
      Message answer{.op = message.op};
      try {
        serve(message, std::move(fd));
      } catch (const std::exception& error) {
        answer.op = Op::Failed;
        std::string(error.what()).copy(answer.text, sizeof answer.text - 1);
      }
      channel_.send(answer);
    }
  }

 private:
  struct Side {
    Context context;
    std::vector<Peer> peers;
    std::vector<Loan> kept;
  };

  void serve(const Message& message, Fd fd) {
    switch (message.op) {
      case Op::Join: return join(side(message.value), std::move(fd), message.count != 0);
      case Op::Plain: plain_.push_back(std::move(fd)); return;
      case Op::Answer: return answer(side(message.value), message.count);
      case Op::Trips: return trips(side(message.value), message.count);
      case Op::Keep: return keep(side(message.value), message.count);
      case Op::GiveBack: return give_back(side(message.value), message.count);
      case Op::PlainAnswer: return plain_answer(message.count);
      case Op::Pin: return pin(message.count != 0 ? std::optional<std::size_t>(message.value) : std::nullopt);
      case Op::PlainTrips: return plain_trips(message.count);
      default: throw Failure(ExitInternal, "the parent asked for something unknown");
    }
  }

  Side& side(std::uint64_t number) {
    used_ = &sides_[number];
    return *used_;
  }

  void join(Side& side, Fd fd, bool sleeps) {
    if (side.context.get() == nullptr) {
      auto options = init<gpuloan_context_options>();
      options.role = GPULOAN_ROLE_IMPORTER;
      options.loop = GPULOAN_LOOP_CALLER;
      options.flags = GPULOAN_CONTEXT_NO_DEVICE;
      if (sleeps) options.flags |= GPULOAN_CONTEXT_SLEEP;
      side.context = Context::create(options);
    }
    side.peers.push_back(side.context.adopt(fd.release(), deadline_.left()));
  }

  Loan acquired(Side& side) {
    while (auto event = next_event(side.context, deadline_)) {
      if (event->type() == GPULOAN_EVENT_PEER_LOST) throw Failure(ExitPeerLost, std::string("the parent was lost: ") + event->text());
      if (event->type() != GPULOAN_EVENT_LOAN_OFFERED) continue;
      Loan loan = event->take_loan();
      static_cast<void>(loan.acquire(deadline_.slice()));
      return loan;
    }
    throw Failure(ExitTimeout, "the parent lent nothing within " + deadline_.text());
  }

  // What is there is given back together, peer by peer as it came.
  void answer(Side& side, std::uint32_t count) {
    std::vector<Loan> loans;
    for (std::uint32_t done = 0; done < count; done += static_cast<std::uint32_t>(loans.size())) {
      loans.clear();
      loans.push_back(acquired(side));
      while (done + loans.size() < count) {
        auto event = side.context.next_event(Milliseconds(0));
        if (!event) break;
        if (event->type() != GPULOAN_EVENT_LOAN_OFFERED) continue;
        loans.push_back(event->take_loan());
        static_cast<void>(loans.back().acquire(deadline_.slice()));
      }
      Loan::done_many(loans, GPULOAN_STREAM_CPU);
    }
  }

  void trips(Side& side, std::uint32_t count) {
    for (std::uint32_t at = 0; at < count; ++at) acquired(side).done(GPULOAN_STREAM_CPU);
  }

  void keep(Side& side, std::uint32_t count) {
    for (std::uint32_t at = 0; at < count; ++at) side.kept.push_back(acquired(side));
  }

  void give_back(Side& side, std::size_t rest) {
    for (; side.kept.size() > rest; side.kept.pop_back()) side.kept.back().done(GPULOAN_STREAM_CPU);
  }

  // As fast as a worker of the floor can be: it takes and answers what is there in one call each.
  void plain_answer(std::uint32_t count) {
    constexpr std::size_t kBatch = 16;
    const Fd epoll(::epoll_create1(EPOLL_CLOEXEC));
    for (std::size_t at = 0; at < plain_.size(); ++at) {
      epoll_event event = {.events = EPOLLIN, .data = {.u64 = at}};
      if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, plain_[at].get(), &event) != 0) throw Failure(ExitSystem, "epoll_ctl failed");
    }
    std::array<std::array<std::byte, 128>, kBatch> records = {};
    std::array<iovec, kBatch> parts = {};
    std::array<mmsghdr, kBatch> messages = {};
    for (std::size_t at = 0; at < kBatch; ++at) {
      parts[at] = {records[at].data(), records[at].size()};
      messages[at].msg_hdr.msg_iov = &parts[at];
      messages[at].msg_hdr.msg_iovlen = 1;
    }
    std::array<epoll_event, 64> events = {};
    for (std::uint32_t done = 0; done < count;) {
      check_interrupted();
      const int ready = ::epoll_wait(epoll.get(), events.data(), static_cast<int>(events.size()), 100);
      if (deadline_.passed()) throw Failure(ExitTimeout, "the parent sent nothing within " + deadline_.text());
      for (int at = 0; at < ready; ++at) {
        const int end = plain_[events[static_cast<std::size_t>(at)].data.u64].get();
        const int came = ::recvmmsg(end, messages.data(), kBatch, MSG_DONTWAIT, nullptr);
        for (int sent = 0; sent < came;) {
          const int now = ::sendmmsg(end, messages.data() + sent, static_cast<unsigned>(came - sent), MSG_NOSIGNAL);
          if (now <= 0) throw Failure(ExitSystem, "sendmmsg failed");
          sent += now;
        }
        done += static_cast<std::uint32_t>(std::max(came, 0));
      }
    }
  }

  void plain_trips(std::uint32_t count) {
    alignas(16) std::array<std::byte, 128> record = {};
    for (std::uint32_t trip = 0; trip < count; ++trip) {
      plain_receive(plain_.back(), record);
      plain_send(plain_.back(), record);
    }
  }

  Deadline deadline_;
  Channel channel_;
  std::map<std::uint64_t, Side> sides_;
  Side* used_ = nullptr; // last
  std::vector<Fd> plain_;
};

} // namespace

void run_control_worker(int fd, std::uint32_t timeout_ms) { ControlWorker(fd, timeout_ms).run(); }

} // namespace gpuloan::tool::bench
