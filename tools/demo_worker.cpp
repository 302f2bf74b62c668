// SPDX-License-Identifier: MIT
//
// The worker of `gpuloan demo`: takes the inherited end of the socketpair, borrows the input, asks for a result of the
// same size, copies on the device behind both READYs, says DONE for both, and ends when both loans have ended. With
// --fill there is no input and the result is filled on the device. Without a device both loans are host memory.
#include "commands.hpp"
#include "cuda.hpp"
#include "pattern.hpp"
#include "session.hpp"

#include <csignal>
#include <memory>

namespace gpuloan::tool {
namespace {

struct WorkerOptions {
  CommonOptions common;
  int fd = -1;
  std::uint32_t number = 1;
  std::uint64_t fill_bytes = 0, seed = 1;
  bool fill = false, cpu = false;
  std::string fault;
};

void add_options(Parser& parser, WorkerOptions& options) {
  options.common.add_to(parser);
  parser.value("fd", "N", "the inherited end",
               [&](const std::string& text) { options.fd = static_cast<int>(parse_number(text, 0, INT32_MAX)); });
  parser.value("number", "N", "of this worker", [&](const std::string& text) {
    options.number = static_cast<std::uint32_t>(parse_number(text, 1, UINT32_MAX));
  });
  parser.value("fill", "BYTES", "no input",
               [&](const std::string& text) { options.fill_bytes = parse_size(text), options.fill = true; });
  parser.value("seed", "N", "of --fill",
               [&](const std::string& text) { options.seed = parse_number(text, 0, UINT64_MAX); });
  parser.value("fault", "KIND", "misbehave", [&](const std::string& text) { options.fault = text; });
  parser.flag("cpu-worker", "use no device", options.cpu);
}

class Worker {
 public:
  explicit Worker(const WorkerOptions& options)
      : options_(options),
        deadline_(options.common.timeout_ms),
        session_(open_session(options.common, {}, GPULOAN_ROLE_IMPORTER, options.cpu)) {
    if (!options.cpu) cuda_ = std::make_unique<Cuda>(session_.driver, options.common.device);
  }

  void run() {
    peer_ = attempt("cannot join the parent", [&] { return session_.context.adopt(options_.fd, deadline_.left()); });
    Loan input;
    if (!options_.fill) input = wait_offer();
    const std::uint64_t bytes = options_.fill ? options_.fill_bytes : input.report().bytes;
    Loan result = request(bytes);
    const gpuloan_view from = input ? acquire(input) : init<gpuloan_view>();
    const gpuloan_view to = acquire(result);
    if (misbehave(result)) return;
    options_.fill ? fill(to) : copy(to, from);
    if (options_.fault == "corrupt") scribble(to);
    for (Loan* loan : {&input, &result}) {
      if (*loan) loan->done(stream());
    }
    for (Loan* loan : {&input, &result}) {
      if (*loan) wait_in_slices(deadline_, [&](Milliseconds slice) { loan->wait_end(slice); });
    }
  }

 private:
  [[nodiscard]] void* stream() const { return cuda_ ? static_cast<void*>(cuda_->stream()) : GPULOAN_STREAM_CPU; }

  Loan wait_offer() {
    while (auto event = next_event(session_.context, deadline_)) {
      if (event->type() == GPULOAN_EVENT_LOAN_OFFERED) return event->take_loan();
      if (event->type() == GPULOAN_EVENT_PEER_LOST)
        throw Failure(ExitPeerLost, std::string("the parent was lost: ") + event->text());
    }
    throw Failure(ExitTimeout, "the parent lent nothing within " + deadline_.text());
  }

  Loan request(std::uint64_t bytes) {
    const std::string metadata = "uint8[" + std::to_string(bytes) + "]";
    auto wish = init<gpuloan_request_options>();
    wish.bytes = bytes;
    wish.memory = options_.cpu ? GPULOAN_MEMORY_HOST : GPULOAN_MEMORY_DEVICE;
    wish.metadata = metadata.data();
    wish.metadata_bytes = metadata.size();
    return attempt("cannot ask for a result", [&] { return peer_.request(wish); });
  }

  gpuloan_view acquire(Loan& loan) {
    auto view = init<gpuloan_view>();
    wait_in_slices(deadline_, [&](Milliseconds slice) { view = loan.acquire(slice); }, "the turn was not ready");
    return view;
  }

  void copy(const gpuloan_view& to, const gpuloan_view& from) {
    if (cuda_) return cuda_->copy_on(to.pointer, from.pointer, to.bytes);
    if (to.bytes > 0) std::memcpy(to.host, from.host, to.bytes);
  }

  void fill(const gpuloan_view& to) {
    const Pattern pattern(to.bytes, options_.seed);
    for (std::uint64_t offset = 0; offset < to.bytes; offset += pattern.block_bytes()) {
      const std::uint64_t count = std::min(pattern.block_bytes(), to.bytes - offset);
      if (cuda_) {
        cuda_->fill32(to.pointer + offset, pattern.word(offset / pattern.block_bytes()), count / 4);
        for (std::uint64_t tail = offset + count / 4 * 4; tail < offset + count; ++tail) {
          cuda_->fill8(to.pointer + tail, static_cast<unsigned char>(pattern.at(tail)), 1);
        }
      } else {
        for (std::uint64_t place = offset; place < offset + count; ++place)
          static_cast<std::byte*>(to.host)[place] = pattern.at(place);
      }
    }
  }

  void scribble(const gpuloan_view& to) {
    if (to.bytes == 0) return;
    if (cuda_)
      return cuda_->fill8(to.pointer + to.bytes / 2, 0xA5, 1), cuda_->fill8(to.pointer + to.bytes - 1, 0x5A, 1);
    static_cast<unsigned char*>(to.host)[to.bytes / 2] ^= 0xFF;
  }

  // For tests of the parent: true when the worker is through.
  bool misbehave(Loan& result) {
    if (options_.fault == "crash") static_cast<void>(::raise(SIGKILL));
    if (options_.fault == "fail") {
      result.fail("told to fail by --fault fail");
      static_cast<void>(gpuloan_loan_wait_end(result.get(), detail::to_ms(deadline_.left()))); // until the parent knows
      return true;
    }
    if (options_.fault == "hang") {
      while (auto event = next_event(session_.context, deadline_)) {}
      return true;
    }
    return false;
  }

  const WorkerOptions& options_;
  Deadline deadline_;
  Session session_;
  std::unique_ptr<Cuda> cuda_;
  Peer peer_;
};

} // namespace

int demo_worker(Arguments arguments) {
  WorkerOptions options;
  Parser parser("demo-worker --fd N [OPTION]...", "Started by gpuloan demo; not for people.");
  add_options(parser, options);
  if (!parser.parse(arguments)) return ExitOk;
  if (options.fd < 0) throw Failure(ExitUsage, "this subcommand is started by 'gpuloan demo'; run that instead");
  Worker(options).run();
  return ExitOk;
}

} // namespace gpuloan::tool
