// SPDX-License-Identifier: MIT
//
// One thread. With a caller-driven context it turns the library's loop exactly as an application's event loop would: it
// polls the context's descriptor beside its own, and dispatches when that is readable or 10 ms have passed; its waits are
// calls that only look.
#include "serve.hpp"

#include "check.hpp"
#include "gpu.hpp"
#include "host.hpp"
#include "pattern.hpp"
#include "wire.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <optional>
#include <poll.h>
#include <span>
#include <sys/socket.h>
#include <unistd.h>
#include <unordered_map>
#include <vector>

namespace loan_test {
namespace {

constexpr int kDispatchMs = 10;

void copy_text(char* to, std::size_t room, std::string_view text) {
  const std::size_t length = std::min(text.size(), room - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

// What Check and Fill look at.
gpuloan_view part_of(gpuloan_view view, const Command& command) {
  if (command.bytes == 0) return view;
  expect(command.value <= view.bytes && command.bytes <= view.bytes - command.value, "the part lies in the view");
  view.pointer += command.value;
  if (view.host != nullptr) view.host = static_cast<unsigned char*>(view.host) + command.value;
  view.bytes = command.bytes;
  return view;
}

// A child that does nothing but live, with everything that a fork inherits; not for ever.
pid_t fork_sleeper() {
  const pid_t child = ::fork();
  expect(child >= 0, "fork");
  if (child > 0) return child;
  ::alarm(120);
  while (true) ::pause();
}

class Server {
 public:
  Server(int control, int loan_end, Habitat habitat) : control_(control), loan_end_(loan_end), habitat_(habitat) {}
  ~Server() { gpuloan_context_destroy(context_); }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  int run();

 private:
  struct Loan {
    gpuloan_loan* handle = nullptr;
    gpuloan_view view = {};
  };
  [[nodiscard]] bool next(Command& command);
  void handle(const Command& command, Reply& reply);
  void handle_loan(const Command& command, Reply& reply);
  void open(const Command& command, Reply& reply);
  void offered(const Command& command, Reply& reply);
  void request(const Command& command, Reply& reply);
  void keep_view(Loan& loan, const gpuloan_view& view, Reply& reply);
  void check(const Loan& loan, const Command& command);
  void fill(const Loan& loan, const Command& command);
  void check_metadata(const Loan& loan, const Command& command) const;
  void event(const Command& command, Reply& reply);
  void close(Reply& reply);
  [[nodiscard]] Gpu& gpu() const;
  [[nodiscard]] void* stream(std::uint32_t index) const;
  [[nodiscard]] bool caller_driven() const noexcept { return (flags_ & OpenCallerLoop) != 0; }
  void turn(std::uint64_t end_ms);
  template <typename Call>
  [[nodiscard]] gpuloan_status waiting(std::uint32_t timeout_ms, Call call);

  const Fd control_;
  Fd loan_end_;
  const Habitat habitat_;
  std::uint32_t flags_ = 0;
  std::unique_ptr<Gpu> gpu_;
  gpuloan_context* context_ = nullptr;
  gpuloan_peer* peer_ = nullptr;
  std::unordered_map<std::uint64_t, Loan> loans_;
  std::vector<gpuloan_event> events_; // that nobody asked for yet
  std::set<std::string> fds_;
  std::map<std::string, std::int64_t> live_;
  std::string driver_ = "sim";
};

// ---- The loop -----------------------------------------------------------------------------------------------------

// Lets the library work until its descriptor says so, 10 ms have passed, or `end_ms`.
void Server::turn(std::uint64_t end_ms) {
  const std::uint64_t now = now_ms();
  const int limit = end_ms <= now ? 0 : std::min(kDispatchMs, static_cast<int>(end_ms - now));
  pollfd what = {gpuloan_context_fd(context_), POLLIN, 0};
  ::poll(&what, 1, limit);
  expect_ok(gpuloan_context_dispatch(context_, 0), "gpuloan_context_dispatch");
}

// A call with a timeout. A caller-driven context only ever looks, and its loop is turned in between.
template <typename Call>
gpuloan_status Server::waiting(std::uint32_t timeout_ms, Call call) {
  if (!caller_driven()) return call(timeout_ms);
  const std::uint64_t end = now_ms() + timeout_ms;
  while (true) {
    const gpuloan_status status = call(0);
    if (status != GPULOAN_ERR_TIMEOUT || now_ms() >= end) return status;
    turn(end);
  }
}

bool Server::next(Command& command) {
  while (true) {
    const bool turns = context_ != nullptr && caller_driven();
    pollfd both[] = {{control_.get(), POLLIN, 0}, {turns ? gpuloan_context_fd(context_) : -1, POLLIN, 0}};
    if (::poll(both, 2, turns ? kDispatchMs : -1) < 0 && errno != EINTR) return false;
    if (both[0].revents != 0) return ::recv(control_.get(), &command, sizeof command, 0) == sizeof command;
    if (turns) expect_ok(gpuloan_context_dispatch(context_, 0), "gpuloan_context_dispatch");
  }
}

int Server::run() {
  Command command;
  try {
    while (next(command)) {
      Reply reply;
      try {
        handle(command, reply);
      } catch (const Failure& failure) {
        copy_text(reply.trouble, sizeof reply.trouble, failure.text);
      }
      if (reply.status != GPULOAN_OK && reply.text[0] == '\0') copy_text(reply.text, sizeof reply.text, gpuloan_error_text());
      if (::send(control_.get(), &reply, sizeof reply, MSG_NOSIGNAL) != sizeof reply) return 1;
      if (command.op == Op::Close) break;
    }
  } catch (const Failure& failure) {
    std::fprintf(stderr, "worker: %s\n", failure.text.c_str());
    return 1;
  }
  return 0;
}

void Server::handle(const Command& command, Reply& reply) {
  switch (command.op) {
    case Op::Open:
      return open(command, reply);
    case Op::Offered:
      return offered(command, reply);
    case Op::Request:
      return request(command, reply);
    case Op::Hold:
      return gpu().hold(command.stream);
    case Op::Release:
      return gpu().release(command.stream);
    case Op::Delay:
      return gpu().delay(command.stream);
    case Op::Idle:
      reply.value = gpu().idle(command.stream) ? 1 : 0;
      return;
    case Op::Event:
      return event(command, reply);
    case Op::Stats:
      reply.stats.size = sizeof reply.stats;
      reply.status = gpuloan_context_stats(context_, &reply.stats);
      return;
    case Op::Calls:
      reply.value = gpu().simulated() ? static_cast<std::uint64_t>(gpu().call.sim_calls(command.text)) : UINT64_MAX;
      return;
    case Op::Live:
      reply.value = static_cast<std::uint64_t>(sim_live(driver_.c_str(), command.text));
      return;
    case Op::FailContext:
      expect(gpu().call.sim_context_fail(cuda::IllegalAddress) == 0, "gpuloan_sim_context_fail");
      return;
    case Op::Fork:
      reply.value = static_cast<std::uint64_t>(fork_sleeper());
      return;
    case Op::ClosePeer:
      gpuloan_peer_close(peer_);
      return;
    case Op::Close:
      return close(reply);
    default:
      return handle_loan(command, reply);
  }
}

void Server::handle_loan(const Command& command, Reply& reply) {
  const auto found = loans_.find(command.loan);
  expect(found != loans_.end(), "the worker was told of no such loan");
  Loan& loan = found->second;
  gpuloan_view view = init<gpuloan_view>();
  const bool driver_work = command.op == Op::Check || command.op == Op::Fill || command.op == Op::DeviceOf;
  std::optional<OtherContext> bare;
  if ((flags_ & OpenBare) != 0 && !driver_work) bare.emplace(gpu(), nullptr);
  switch (command.op) {
    case Op::Acquire:
      reply.status = waiting(command.timeout_ms, [&](std::uint32_t ms) { return gpuloan_loan_acquire(loan.handle, ms, &view); });
      return keep_view(loan, view, reply);
    case Op::AcquireOn:
      reply.status = gpuloan_loan_acquire_on(loan.handle, stream(command.stream), command.timeout_ms, &view);
      return keep_view(loan, view, reply);
    case Op::DeviceOf:
      reply.value = static_cast<std::uint64_t>(gpu().device_of(loan.view.pointer));
      copy_text(reply.text, sizeof reply.text, uuid_of(gpu().info().path, static_cast<int>(reply.value)));
      return;
    case Op::Check:
      return check(loan, command);
    case Op::Fill:
      return fill(loan, command);
    case Op::Metadata:
      return check_metadata(loan, command);
    case Op::Done:
      reply.status = gpuloan_loan_done(loan.handle, stream(command.stream));
      return;
    case Op::UsedOn:
      reply.status = gpuloan_loan_used_on(loan.handle, stream(command.stream));
      return;
    case Op::Return:
      reply.status = gpuloan_loan_return(loan.handle);
      return;
    case Op::Fail:
      reply.status = gpuloan_loan_fail(loan.handle, command.text);
      return;
    case Op::WaitDone:
      reply.status = waiting(command.timeout_ms, [&](std::uint32_t ms) { return gpuloan_loan_wait_done(loan.handle, ms); });
      return;
    case Op::WaitEnd:
      reply.status = waiting(command.timeout_ms, [&](std::uint32_t ms) { return gpuloan_loan_wait_end(loan.handle, ms); });
      return;
    case Op::Report:
      reply.report.size = sizeof reply.report;
      reply.status = gpuloan_loan_report_get(loan.handle, &reply.report);
      return;
    case Op::Unref:
      gpuloan_loan_unref(loan.handle);
      loans_.erase(found);
      return;
    default:
      fail("the worker does not know this command");
  }
}

// ---- Context and events -------------------------------------------------------------------------------------------

void Server::open(const Command& command, Reply& reply) {
  flags_ = command.flags;
  const bool device = (flags_ & OpenNoDevice) == 0;
  driver_ = command.text;
  if (device && (flags_ & OpenLate) == 0 && gpu_ == nullptr) gpu_ = std::make_unique<Gpu>(command.text, command.device);
  if (device && gpu_ == nullptr) { // it opens the driver, which keeps descriptors
    auto info = init<gpuloan_driver_info>();
    expect_ok(gpuloan_driver_probe(command.text, &info), "gpuloan_driver_probe");
  }
  const Fd loan_end = std::move(loan_end_);
  fds_ = open_fds();
  std::erase_if(fds_, [&](const std::string& entry) { return entry.starts_with(std::to_string(loan_end.get()) + " "); });
  if (gpu_ != nullptr && (flags_ & OpenBare) != 0) static_cast<void>(gpu_->stream()); // made while there is a context
  if (gpu_ != nullptr) live_ = gpu_->live();
  auto options = init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_IMPORTER;
  options.loop = caller_driven() ? GPULOAN_LOOP_CALLER : GPULOAN_LOOP_THREAD;
  options.flags = device ? 0 : static_cast<std::uint32_t>(GPULOAN_CONTEXT_NO_DEVICE);
  options.driver = device ? command.text : nullptr;
  options.device = command.device;
  options.gate = command.gate;
  options.rungs = command.rungs;
  options.gpu_wait_limit = command.wait_limit;
  reply.status = gpuloan_context_create(&options, &context_);
  if (reply.status != GPULOAN_OK) return;
  const int fd = ::fcntl(loan_end.get(), F_DUPFD_CLOEXEC, 3); // adopt takes it on success only
  reply.status = gpuloan_context_adopt(context_, fd, kWaitMs, &peer_);
  if (reply.status != GPULOAN_OK) Fd(fd).reset();
}

void Server::event(const Command& command, Reply& reply) {
  const auto wanted = [&](const gpuloan_event& event) { return event.type == command.value; };
  const std::uint64_t end = now_ms() + command.timeout_ms;
  while (std::none_of(events_.begin(), events_.end(), wanted)) {
    auto event = init<gpuloan_event>();
    const std::uint64_t now = now_ms();
    const std::uint32_t left = end > now ? static_cast<std::uint32_t>(end - now) : 0;
    reply.status = waiting(left, [&](std::uint32_t ms) { return gpuloan_context_next_event(context_, ms, &event); });
    if (reply.status != GPULOAN_OK) return;
    events_.push_back(event);
  }
  const auto found = std::find_if(events_.begin(), events_.end(), wanted);
  reply.value = static_cast<std::uint64_t>(-found->status); // 0 for OK
  copy_text(reply.text, sizeof reply.text, found->text);
  events_.erase(found);
}

void Server::offered(const Command& command, Reply& reply) {
  const auto is_it = [&](const gpuloan_event& event) {
    if (event.type != GPULOAN_EVENT_LOAN_OFFERED) return false;
    auto report = init<gpuloan_loan_report>();
    return gpuloan_loan_report_get(event.loan, &report) == GPULOAN_OK && report.id == command.id;
  };
  for (const std::uint64_t end = now_ms() + kWaitMs; now_ms() < end;) {
    if (const auto found = std::find_if(events_.begin(), events_.end(), is_it); found != events_.end()) {
      loans_[command.loan].handle = found->loan; // the event's reference
      events_.erase(found);
      return;
    }
    auto event = init<gpuloan_event>();
    reply.status = waiting(kWaitMs, [&](std::uint32_t ms) { return gpuloan_context_next_event(context_, ms, &event); });
    if (reply.status != GPULOAN_OK) return;
    events_.push_back(event);
  }
  fail("the loan was not offered");
}

void Server::request(const Command& command, Reply& reply) {
  std::vector<unsigned char> metadata(command.metadata_bytes);
  write_pattern(metadata, command.seed);
  auto options = init<gpuloan_request_options>();
  options.bytes = command.bytes;
  options.memory = command.memory;
  options.metadata = metadata.empty() ? nullptr : metadata.data();
  options.metadata_bytes = metadata.size();
  gpuloan_loan* handle = nullptr;
  reply.status = gpuloan_request_send(peer_, &options, &handle);
  if (reply.status == GPULOAN_OK) loans_[command.loan].handle = handle;
}

void Server::close(Reply&) {
  if ((flags_ & OpenKeepHandles) == 0) {
    for (const gpuloan_event& event : events_) {
      if (event.type == GPULOAN_EVENT_LOAN_OFFERED) gpuloan_loan_unref(event.loan);
    }
    for (const auto& [number, loan] : loans_) gpuloan_loan_unref(loan.handle);
  }
  events_.clear();
  loans_.clear();
  gpuloan_context_destroy(context_);
  context_ = nullptr;
  if (habitat_ == Habitat::Thread) return; // what this process holds is the test's business
  std::string fds;
  const bool closed = becomes([&] { return (fds = added(fds_, open_fds())).empty(); }, kSettleMs);
  expect(closed, "descriptors of the worker stayed open: " + fds);
  if (gpu_ == nullptr) return;
  for (const auto& [what, count] : gpu_->live()) {
    expect(count == live_[what], "the worker's " + what + " were " + std::to_string(live_[what]) + ", are " + std::to_string(count));
  }
}

// ---- Loans --------------------------------------------------------------------------------------------------------

Gpu& Server::gpu() const {
  expect(gpu_ != nullptr, "this worker has no device");
  return *gpu_;
}

void* Server::stream(std::uint32_t index) const {
  return index == kCpuStream ? GPULOAN_STREAM_CPU : static_cast<void*>(gpu().stream(index));
}

void Server::keep_view(Loan& loan, const gpuloan_view& view, Reply& reply) {
  if (reply.status != GPULOAN_OK) return;
  loan.view = view;
  reply.turn = view.turn;
  reply.access = view.access;
  reply.bytes = view.bytes;
  reply.host = view.host != nullptr ? 1 : 0;
  expect(view.bytes == 0 || view.pointer != 0 || view.host != nullptr, "the view has no address");
}

void Server::check(const Loan& loan, const Command& command) {
  std::string wrong;
  const gpuloan_view view = part_of(loan.view, command);
  if (view.host != nullptr) {
    const std::span bytes(static_cast<const unsigned char*>(view.host), view.bytes);
    if (pattern_mismatch(bytes, command.seed) != bytes.size()) wrong = "the host bytes are not pattern " + std::to_string(command.seed);
  } else {
    wrong = gpu_ != nullptr ? gpu_->mismatch(view.pointer, view.bytes, command.seed, command.stream) : "";
  }
  expect(wrong.empty(), "what the worker sees: " + wrong);
}

void Server::fill(const Loan& loan, const Command& command) {
  const gpuloan_view view = part_of(loan.view, command);
  if (view.host != nullptr) {
    write_pattern({static_cast<unsigned char*>(view.host), view.bytes}, command.seed);
  } else if (view.bytes > 0) {
    gpu().upload(view.pointer, view.bytes, command.seed, command.stream);
  }
}

void Server::check_metadata(const Loan& loan, const Command& command) const {
  expect_equal(loan.view.metadata_bytes, command.metadata_bytes, "bytes of metadata at the worker");
  const std::span bytes(static_cast<const unsigned char*>(loan.view.metadata), loan.view.metadata_bytes);
  expect(pattern_mismatch(bytes, command.seed) == bytes.size(), "the metadata at the worker is not what was sent");
}

} // namespace

int serve(int control, int loan_end, Habitat habitat) { return Server(control, loan_end, habitat).run(); }

} // namespace loan_test
