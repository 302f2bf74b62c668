// SPDX-License-Identifier: MIT
//
// The test's handle of a worker and of the loans that it has.
#include "bench.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/socket.h>

namespace loan_test {
namespace {

void set_text(char (&to)[256], std::string_view text) { to[text.copy(to, sizeof to - 1)] = '\0'; }

} // namespace

Worker::Worker(const Bench& bench, const Options& options) : bench_(bench), options_(options) {
  SocketPair control = make_socketpair();
  SocketPair loans = make_socketpair();
  control_ = std::move(control.left);
  loan_end_ = std::move(loans.left);
  if (options.keep_end) kept_end_ = Fd(::fcntl(loans.right.get(), F_DUPFD_CLOEXEC, 3));
  start(std::move(control.right), std::move(loans.right));
}

void Worker::start(Fd control, Fd loan_end) {
  if (bench_.habitat == Habitat::Thread) {
    thread_ = std::thread([control = control.release(), loan_end = loan_end.release()] { serve(control, loan_end, Habitat::Thread); });
    return;
  }
  process_ = Process({"--worker", std::to_string(control.get()), std::to_string(loan_end.get())}, {control.get(), loan_end.get()});
}

Worker::~Worker() {
  ::shutdown(control_.get(), SHUT_RDWR); // a thread ends with it
  loan_end_.reset();
  process_.kill();
  if (thread_.joinable()) thread_.join();
}

void Worker::post(const Command& command, Where where) {
  if (::send(control_.get(), &command, sizeof command, MSG_NOSIGNAL) != sizeof command) fail("the worker is gone", where);
}

Reply Worker::reply(Where where) {
  Reply reply;
  ssize_t length = 0;
  do {
    length = ::recv(control_.get(), &reply, sizeof reply, 0);
  } while (length < 0 && errno == EINTR);
  if (length != sizeof reply) fail("the worker ended without an answer", where);
  if (reply.trouble[0] != '\0') fail(std::string("worker: ") + reply.trouble, where);
  return reply;
}

Reply Worker::call(const Command& command, Where where) {
  post(command, where);
  return reply(where);
}

namespace {

// An answer whose status has to be OK; the text is the worker's, not that of this thread.
void expect_answer(const Reply& reply, std::string_view what, Where where) {
  if (reply.status == GPULOAN_OK) return;
  fail(std::string(what) + " at the worker: " + gpuloan_status_name(reply.status) + " (" + reply.text + ")", where);
}

} // namespace

Command Worker::open_command() const {
  Command command;
  command.op = Op::Open;
  command.flags = options_.flags;
  command.wait_limit = options_.wait_limit;
  command.device = options_.device;
  command.gate = bench_.cell.gate;
  command.rungs = bench_.cell.rung;
  set_text(command.text, bench_.cell.driver);
  return command;
}

Borrowed Worker::offered(gpuloan_loan* lent, Where where) {
  auto report = init<gpuloan_loan_report>();
  expect_ok(gpuloan_loan_report_get(lent, &report), "gpuloan_loan_report_get", where);
  return offered(report.id, where);
}

Borrowed Worker::offered(std::uint64_t id, Where where) {
  Command command;
  command.op = Op::Offered;
  command.loan = next_loan_++;
  command.id = id;
  expect_answer(call(command, where), "LOAN_OFFERED", where);
  return {*this, command.loan};
}

Borrowed Worker::request(std::uint64_t bytes, std::uint32_t metadata_bytes, std::uint64_t seed, gpuloan_memory memory, Where where) {
  Command command;
  command.op = Op::Request;
  command.loan = next_loan_++;
  command.bytes = bytes;
  command.memory = memory;
  command.metadata_bytes = metadata_bytes;
  command.seed = seed;
  expect_answer(call(command, where), "gpuloan_request_send", where);
  return {*this, command.loan};
}

gpuloan_stats Worker::stats(Where where) {
  Command command;
  command.op = Op::Stats;
  return call(command, where).stats;
}

std::int64_t Worker::calls(std::string_view function) {
  Command command;
  command.op = Op::Calls;
  set_text(command.text, function);
  return static_cast<std::int64_t>(call(command).value);
}

std::int64_t Worker::live(std::string_view what) {
  Command command;
  command.op = Op::Live;
  set_text(command.text, what);
  return static_cast<std::int64_t>(call(command).value);
}

bool Worker::idle(unsigned stream) {
  Command command;
  command.op = Op::Idle;
  command.stream = stream;
  return call(command).value != 0;
}

void Worker::hold(unsigned stream) {
  Command command;
  command.op = Op::Hold;
  command.stream = stream;
  call(command);
}

void Worker::release(unsigned stream) {
  Command command;
  command.op = Op::Release;
  command.stream = stream;
  call(command);
}

void Worker::delay(unsigned stream) {
  Command command;
  command.op = Op::Delay;
  command.stream = stream;
  call(command);
}

void Worker::fail_context() {
  Command command;
  command.op = Op::FailContext;
  call(command);
}

pid_t Worker::fork_sleeper() {
  Command command;
  command.op = Op::Fork;
  return static_cast<pid_t>(call(command).value);
}

std::string Worker::event(gpuloan_event_type type, gpuloan_status wanted, Where where) {
  Command command;
  command.op = Op::Event;
  command.value = static_cast<std::uint64_t>(type);
  command.timeout_ms = kWaitMs;
  const Reply reply = call(command, where);
  expect_answer(reply, "the event", where);
  expect_equal(-static_cast<std::int64_t>(reply.value), static_cast<std::int64_t>(wanted), "status of the worker's event", where);
  return reply.text;
}

void Worker::kill() noexcept { process_.kill(); }

void Worker::close(Where where) {
  Command command;
  command.op = Op::Close;
  call(command, where);
  if (thread_.joinable()) thread_.join();
  if (process_.pid() > 0) expect_equal(process_.wait(), 0, "exit status of the worker", where);
}

// ---- Borrowed -----------------------------------------------------------------------------------------------------

Command Borrowed::command(Op op) const {
  Command command;
  command.op = op;
  command.loan = number_;
  command.timeout_ms = kWaitMs;
  return command;
}

Reply Borrowed::acquire(Where where) {
  const Reply reply = worker_->call(command(Op::Acquire), where);
  expect_answer(reply, "gpuloan_loan_acquire", where);
  return reply;
}

Reply Borrowed::try_acquire(std::uint32_t timeout_ms, Where where) {
  Command what = command(Op::Acquire);
  what.timeout_ms = timeout_ms;
  return worker_->call(what, where);
}

Reply Borrowed::try_acquire_on(unsigned stream, std::uint32_t timeout_ms, Where where) {
  Command what = command(Op::AcquireOn);
  what.stream = stream;
  what.timeout_ms = timeout_ms;
  return worker_->call(what, where);
}

Reply Borrowed::device_of(Where where) { return worker_->call(command(Op::DeviceOf), where); }

void Borrowed::check(std::uint64_t seed, unsigned stream, Where where) {
  Command what = command(Op::Check);
  what.seed = seed;
  what.stream = stream;
  worker_->call(what, where);
}

void Borrowed::fill(std::uint64_t seed, unsigned stream, Where where) {
  Command what = command(Op::Fill);
  what.seed = seed;
  what.stream = stream;
  worker_->call(what, where);
}

void Borrowed::metadata(std::uint32_t bytes, std::uint64_t seed, Where where) {
  Command what = command(Op::Metadata);
  what.metadata_bytes = bytes;
  what.seed = seed;
  worker_->call(what, where);
}

void Borrowed::used_on(unsigned stream, Where where) {
  Command what = command(Op::UsedOn);
  what.stream = stream;
  expect_answer(worker_->call(what, where), "gpuloan_loan_used_on", where);
}

Reply Borrowed::try_done(std::uint32_t stream, Where where) {
  Command what = command(Op::Done);
  what.stream = stream;
  return worker_->call(what, where);
}

void Borrowed::done(std::uint32_t stream, Where where) { expect_answer(try_done(stream, where), "gpuloan_loan_done", where); }

void Borrowed::give_back(Where where) { expect_answer(worker_->call(command(Op::Return), where), "gpuloan_loan_return", where); }

void Borrowed::fail_with(std::string_view reason, Where where) {
  Command what = command(Op::Fail);
  set_text(what.text, reason);
  expect_answer(worker_->call(what, where), "gpuloan_loan_fail", where);
}

Reply Borrowed::wait_done(Where where) { return worker_->call(command(Op::WaitDone), where); }
Reply Borrowed::wait_end(Where where) { return worker_->call(command(Op::WaitEnd), where); }
gpuloan_loan_report Borrowed::report(Where where) { return worker_->call(command(Op::Report), where).report; }

} // namespace loan_test
