// SPDX-License-Identifier: MIT
//
// The worker of `gpuloan bench`: does what the parent's messages ask for, the bare floors and the loans alike.
#include "../commands.hpp"
#include "bare_pool.hpp"
#include "control_worker.hpp"
#include "run.hpp"

namespace gpuloan::tool {
namespace bench {
namespace {

struct WorkerOptions {
  CommonOptions common;
  LoanOptions loans;
  int fd = -1;
  bool control = false;
};

int code_of(const std::exception& error) {
  if (const auto* failure = dynamic_cast<const Failure*>(&error)) return failure->code();
  if (const auto* status = dynamic_cast<const StatusError*>(&error)) return exit_code(status->status());
  return ExitLoanFailed;
}

class Worker {
 public:
  explicit Worker(const WorkerOptions& options)
      : options_(options),
        deadline_(options.common.timeout_ms),
        channel_(Fd(options.fd), options.common.timeout_ms),
        session_(open_session(options.common, options.loans, GPULOAN_ROLE_IMPORTER)),
        cuda_(session_.driver, options.common.device),
        calls_(session_.driver) {}

  void run() {
    channel_.send({.op = Op::Hello});
    for (;;) {
      Fd fd;
      const Message message = channel_.receive(&fd);
      if (message.op == Op::Bye) return;
      Message answer{.op = message.op};
      try {
        answer.value = serve(message, std::move(fd), answer);
      } catch (const std::exception& error) {
        answer.op = Op::Failed;
        answer.value = static_cast<std::uint64_t>(code_of(error));
        std::string(error.what()).copy(answer.text, sizeof answer.text - 1);
      }
      if (message.op != Op::Hello && message.op != Op::BareSocket && message.op != Op::BarePool) channel_.send(answer);
      else if (answer.op == Op::Failed) channel_.send(answer);
    }
  }

 private:
  // Returns what the last turn wrote.
  std::uint64_t serve(const Message& message, Fd fd, Message& answer) {
    switch (message.op) {
      case Op::Hello: peer_ = session_.context.adopt(fd.release(), deadline_.left()); return 0;
      case Op::Words: words_ = std::make_unique<BarePages>(calls_, std::move(fd), message.bytes); return 0;
      case Op::Chunk:
        chunk_.reset();
        chunk_ = std::make_unique<BareChunk>(calls_, options_.common.device, message.bytes, std::move(fd));
        return 0;
      case Op::Drop: chunk_.reset(); return 0;
      case Op::Drain: drain(); return 0;
      case Op::BareFill: return bare_fill(message, answer);
      case Op::BareProbe: return probe(chunk_->pointer(), message);
      case Op::BareSpin: return bare_spin(message);
      case Op::BareSocket: return bare_records(message, [this](std::uint64_t value, std::uint64_t bytes) { fill_bare(chunk_->pointer(), value, bytes); });
      case Op::Pool: pool_ = std::make_unique<BarePoolImport>(cuda_, options_.common.device, message, fd); return 0;
      case Op::BarePool:
        return bare_records(message, [this](std::uint64_t value, std::uint64_t bytes) {
          const cuda::DevicePtr pointer = pool_->open();
          fill_bare(pointer, value, bytes);
          pool_->close(pointer);
        });
      case Op::Turns: return turns(message);
      case Op::Loans: return loans(message);
      case Op::LoanProbe: return loan_probe(message);
      case Op::WholeLoan: return whole_loan(answer);
      case Op::Copies: return copies(message);
      default: throw Failure(ExitInternal, "the parent asked for something unknown");
    }
  }

  // The parent's library recalls what it has no use for; the caller's loop has to be turned for that.
  void drain() {
    while (session_.context.stats().imported_bytes > 0) {
      check_interrupted();
      if (deadline_.passed()) throw Failure(ExitTimeout, "the parent did not recall its memory within " + deadline_.text());
      static_cast<void>(session_.context.next_event(Milliseconds(1)));
    }
  }

  std::uint64_t bare_fill(const Message& message, Message& answer) {
    const std::uint64_t start = clock_ns();
    fill_bare(chunk_->pointer(), message.value, message.bytes);
    answer.bytes = clock_ns() - start;
    return message.value;
  }

  std::uint64_t bare_spin(const Message& message) {
    std::uint64_t value = message.value;
    for (std::uint32_t turn = 0; turn < message.count; ++turn) {
      spin_until(words_->word(kReadyWord), ++value, deadline_);
      cuda_.fill32(chunk_->pointer(), static_cast<std::uint32_t>(value), message.bytes / 4);
      calls_.check("cuStreamWriteValue64", calls_.write_value(cuda_.stream(), words_->pointer(kDoneWord), value, cuda::WriteDefault));
    }
    return value;
  }

  void fill_bare(cuda::DevicePtr pointer, std::uint64_t value, std::uint64_t bytes) {
    cuda_.fill32(pointer, static_cast<std::uint32_t>(value), bytes / 4);
    cuda_.synchronize();
  }

  template <typename Work>
  std::uint64_t bare_records(const Message& message, Work&& work) {
    std::uint64_t value = 0;
    for (std::uint32_t turn = 0; turn < message.count; ++turn) {
      value = channel_.receive().value;
      work(value, message.bytes);
      channel_.send({.op = message.op, .value = value});
    }
    return value;
  }

  Loan offered() {
    while (auto event = next_event(session_.context, deadline_)) {
      if (event->type() == GPULOAN_EVENT_LOAN_OFFERED) return event->take_loan();
      if (event->type() == GPULOAN_EVENT_PEER_LOST) throw Failure(ExitPeerLost, std::string("the parent was lost: ") + event->text());
    }
    throw Failure(ExitTimeout, "the parent lent nothing within " + deadline_.text());
  }

  gpuloan_view acquired(Loan& loan) {
    auto view = init<gpuloan_view>();
    wait_in_slices(deadline_, [&](Milliseconds slice) { view = loan.acquire(slice); });
    return view;
  }

  void fill(const gpuloan_view& view, std::uint64_t value) {
    cuda_.fill32(view.pointer, static_cast<std::uint32_t>(value), view.bytes / 4);
  }

  std::uint64_t turns(const Message& message) {
    Loan loan = offered();
    for (std::uint32_t turn = 0; turn < message.count; ++turn) {
      fill(acquired(loan), ++value_);
      loan.done(cuda_.stream());
    }
    wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
    return value_;
  }

  std::uint64_t loans(const Message& message) {
    for (std::uint32_t turn = 0; turn < message.count; ++turn) {
      Loan loan = offered();
      fill(acquired(loan), ++value_);
      cuda_.synchronize(); // as the floor does: whoever waits for its work itself needs nobody else for it
      loan.done(cuda_.stream());
      if (turn + 1 == message.count) wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
    }
    return value_;
  }

  std::uint64_t whole_loan(Message& answer) {
    Loan loan = offered();
    const gpuloan_view view = acquired(loan);
    answer.bytes = clock_ns();
    fill(view, ++value_);
    loan.done(cuda_.stream());
    wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
    return value_;
  }

  std::uint64_t probe(cuda::DevicePtr pointer, const Message& message) {
    const auto value = static_cast<std::uint32_t>(message.value);
    const std::uint64_t filled = message.count == 0 ? message.bytes : std::min(message.bytes, kMiB), last = message.bytes - filled;
    cuda_.fill32(pointer, value, filled / 4);
    if (last > 0) cuda_.fill32(pointer + last, value, filled / 4);
    std::uint32_t word = 0;
    cuda_.copy_out(&word, pointer + message.bytes - sizeof word, sizeof word);
    cuda_.synchronize();
    if (word != value) throw Failure(ExitLoanFailed, "the last word is not what was filled");
    return message.value;
  }

  std::uint64_t loan_probe(const Message& message) {
    Loan loan = offered();
    const std::uint64_t value = probe(acquired(loan).pointer, message);
    loan.done(cuda_.stream());
    wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
    return value;
  }

  std::uint64_t copies(const Message& message) {
    Loan loan = offered();
    const gpuloan_view view = acquired(loan);
    std::uint32_t first = 0, last = 0;
    cuda_.copy_out(&first, view.pointer, sizeof first);
    cuda_.copy_out(&last, view.pointer + view.bytes - sizeof last, sizeof last);
    cuda_.synchronize();
    if (first != message.value || last != message.value) throw Failure(ExitLoanFailed, "the copy is not what was lent");
    loan.done(GPULOAN_STREAM_CPU);
    wait_in_slices(deadline_, [&](Milliseconds slice) { loan.wait_end(slice); });
    return message.value;
  }

  const WorkerOptions& options_;
  Deadline deadline_;
  Channel channel_;
  Session session_;
  Cuda cuda_;
  BareCalls calls_;
  std::unique_ptr<BarePages> words_;
  std::unique_ptr<BareChunk> chunk_;
  std::unique_ptr<BarePoolImport> pool_;
  Peer peer_;
  std::uint64_t value_ = 0;
};

} // namespace
} // namespace bench

int bench_worker(Arguments arguments) {
  bench::WorkerOptions options;
  Parser parser("bench-worker --fd N [OPTION]...", "Started by gpuloan bench; not for people.");
  options.common.add_to(parser);
  parser.value("fd", "N", "the inherited end", [&](const std::string& text) { options.fd = static_cast<int>(parse_number(text, 0, INT32_MAX)); });
  parser.value("loop", "WHOSE", "thread or caller", [&](const std::string& text) { options.loans.loop = parse_choice(text, bench::BenchOptions::kLoops); });
  parser.value("wait", "HOW", "spin or sleep", [&](const std::string& text) { options.loans.sleep = parse_choice(text, bench::BenchOptions::kWaits); });
  parser.flag("control", "no device: the cases of the control plane", options.control);
  if (!parser.parse(arguments)) return ExitOk;
  if (options.fd < 0) throw Failure(ExitUsage, "this subcommand is started by 'gpuloan bench'; run that instead");
  if (options.control) {
    bench::run_control_worker(options.fd, options.common.timeout_ms);
    return ExitOk;
  }
  bench::Worker(options).run();
  return ExitOk;
}

} // namespace gpuloan::tool
