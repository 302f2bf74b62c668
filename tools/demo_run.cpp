// SPDX-License-Identifier: MIT
#include "demo.hpp"

#include "pattern.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/socket.h>

namespace gpuloan::tool {
namespace {

constexpr std::uint64_t kCheckAllUpTo = std::uint64_t{1} << 30U;
constexpr std::uint64_t kSpots = 4096;

std::string array_text(std::uint64_t bytes) { return "uint8[" + std::to_string(bytes) + "]"; }

} // namespace

DemoRun::DemoRun(const DemoOptions& options, Session& session)
    : options_(options),
      session_(session),
      deadline_(options.common.timeout_ms),
      cuda_(session.driver, options.common.device),
      io_(&cuda_),
      source_(options.file.empty() ? random_bytes(options.size, options.seed) : open_file(options.file, deadline_)),
      workers_(options.workers) {
  for (std::uint32_t index = 0; index < options.workers; ++index) workers_[index].number = index + 1;
}

void DemoRun::start(DemoWorker& worker) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw Failure(ExitSystem, std::string("socketpair: ") + std::strerror(errno));
  }
  Fd ours(ends[0]);
  const Fd theirs(ends[1]);
  std::vector<std::string> arguments = {
      "demo-worker", "--fd",          std::to_string(Child::kInheritedFd), "--number", std::to_string(worker.number),
      "--timeout",   deadline_.text()};
  arguments.back().resize(arguments.back().find(' '));
  const auto add = [&](const char* name, const std::string& value) {
    arguments.insert(arguments.end(), {name, value});
  };
  add("--device", std::to_string(options_.worker_device >= 0 ? options_.worker_device : options_.common.device));
  if (!options_.common.driver.empty()) add("--driver", options_.common.driver);
  if (options_.fill) add("--fill", std::to_string(options_.size)), add("--seed", std::to_string(options_.seed));
  if (options_.cpu_worker) arguments.emplace_back("--cpu-worker");
  if (!options_.fault.empty() && worker.number == 1) add("--fault", options_.fault);
  worker.child = Child::start(arguments, theirs.get());
  session_.context.attach(ours.get(), ("worker-" + std::to_string(worker.number)).c_str());
  static_cast<void>(ours.release());
}

void DemoRun::run() {
  for (DemoWorker& worker : workers_) attempt("cannot start a worker", [&] { start(worker); });
  while (!all_finished() && !deadline_.passed()) {
    check_interrupted();
    if (auto event = session_.context.next_event(deadline_.slice())) handle(*event);
    watch_children();
  }
  if (!all_finished()) give_up();
  for (DemoWorker& worker : workers_) {
    collect(worker);
    if (!worker.failed) worker.child.wait(deadline_);
    if (!worker.failed && !worker.child.succeeded()) fail(worker, ExitLoanFailed, worker.child.status_text());
  }
  cuda_.synchronize(); // the regions end before the stream that used them
}

bool DemoRun::all_finished() const {
  return std::all_of(workers_.begin(), workers_.end(), [](const DemoWorker& worker) { return worker.finished(); });
}

DemoWorker* DemoRun::by_peer(const gpuloan_peer* peer) {
  const auto found =
      std::find_if(workers_.begin(), workers_.end(), [&](DemoWorker& worker) { return worker.peer.get() == peer; });
  return peer == nullptr || found == workers_.end() ? nullptr : &*found;
}

DemoWorker* DemoRun::by_loan(const gpuloan_loan* loan) {
  const auto found = std::find_if(workers_.begin(), workers_.end(), [&](DemoWorker& worker) {
    return worker.input_loan.get() == loan || worker.result_loan.get() == loan;
  });
  return loan == nullptr || found == workers_.end() ? nullptr : &*found;
}

void DemoRun::fail(DemoWorker& worker, int code, const std::string& text) {
  if (worker.failed) return;
  worker.failed = true;
  worker.code = code;
  worker.failure =
      "worker " + std::to_string(worker.number) + " (pid " + std::to_string(worker.child.pid()) + "): " + text;
}

void DemoRun::handle(Event& event) {
  if (event.type() == GPULOAN_EVENT_PEER_REFUSED) { // does not say which; its process will end
    refusal_.emplace(exit_code(event.status()), std::string("was refused: ") + event.text());
    return;
  }
  if (event.type() == GPULOAN_EVENT_PEER_READY) return welcome(event.take_peer());
  DemoWorker* worker = by_peer(event.peer());
  if (worker == nullptr) worker = by_loan(event.loan());
  if (worker == nullptr) return;
  switch (event.type()) {
    case GPULOAN_EVENT_PEER_LOST:
      if (!worker->finished()) fail(*worker, ExitPeerLost, std::string("was lost: ") + event.text());
      break;
    case GPULOAN_EVENT_REQUEST:
      serve(*worker, "cannot grant a result", [&] { on_request(*worker, event.take_request()); });
      break;
    case GPULOAN_EVENT_LOAN_DONE:
      if (event.loan() == worker->result_loan.get() && event.status() == GPULOAN_OK) check_result(*worker);
      break;
    case GPULOAN_EVENT_LOAN_ENDED: on_ended(*worker, event); break;
    default: break;
  }
}

void DemoRun::welcome(Peer peer) {
  const std::string account = peer.info().account;
  for (DemoWorker& worker : workers_) {
    if (account != "worker-" + std::to_string(worker.number)) continue;
    worker.peer = std::move(peer);
    return serve(worker, "cannot lend the input", [&] { on_ready(worker); });
  }
}

// What the library refuses for one worker ends that worker only.
template <typename Step>
void DemoRun::serve(DemoWorker& worker, const char* what, Step&& step) {
  try {
    step();
  } catch (const StatusError& error) {
    fail(worker, exit_code(error.status()), std::string(what) + ": " + error.what());
  }
}

void DemoRun::on_ready(DemoWorker& worker) {
  if (options_.fill) {
    worker.input_ended = true;
    return;
  }
  auto region = init<gpuloan_region_options>();
  region.bytes = bytes();
  region.access = GPULOAN_ACCESS_READ;
  worker.input = worker.peer.create_region(region);
  fill_input(worker);
  const std::string metadata = array_text(bytes());
  auto lend = init<gpuloan_lend_options>();
  lend.access = GPULOAN_ACCESS_READ;
  lend.memory = options_.cpu_worker ? GPULOAN_MEMORY_HOST : GPULOAN_MEMORY_DEVICE;
  lend.stream = cuda_.stream();
  lend.metadata = metadata.data();
  lend.metadata_bytes = metadata.size();
  worker.input_loan = worker.peer.lend(worker.input.pointer(), bytes(), lend);
}

// The file is read once; the other workers' inputs are copies of the first one's on the device.
void DemoRun::fill_input(DemoWorker& worker) {
  if (uploaded_ != nullptr && uploaded_->input) {
    cuda_.copy_on(worker.input.pointer(), uploaded_->input.pointer(), bytes());
    return uploaded_->input.used_on(cuda_.stream());
  }
  source_sha256_ = io_.upload(*source_, {worker.input.pointer(), nullptr, bytes()});
  uploaded_ = &worker;
}

void DemoRun::on_request(DemoWorker& worker, Request request) {
  const gpuloan_request_info info = request.info();
  const std::uint64_t expected = options_.fill ? options_.size : bytes();
  worker.request_metadata.assign(static_cast<const char*>(info.metadata), info.metadata_bytes);
  if (info.bytes != expected || worker.result) {
    request.deny("not what this demo hands out");
    return fail(worker, ExitLoanFailed,
                "asked for " + std::to_string(info.bytes) + " bytes, expected " + std::to_string(expected));
  }
  auto lend = init<gpuloan_lend_options>();
  lend.access = GPULOAN_ACCESS_WRITE;
  lend.memory = info.memory;
  lend.stream = cuda_.stream();
  Request::Grant grant = request.grant(&lend);
  worker.result = std::move(grant.region);
  worker.result_loan = std::move(grant.loan);
}

void DemoRun::on_ended(DemoWorker& worker, Event& event) {
  const bool result = event.loan() == worker.result_loan.get();
  (result ? worker.result_ended : worker.input_ended) = true;
  if (event.status() != GPULOAN_OK) {
    return fail(worker, exit_code(event.status()),
                std::string(result ? "its result loan" : "its input loan") + " failed with " +
                    gpuloan_status_name(event.status()) + ": " + event.text());
  }
  if (result) check_result(worker);
}

void DemoRun::check_result(DemoWorker& worker) {
  if (worker.checked || worker.failed) return;
  worker.checked = true;
  const Memory memory = {worker.result.pointer(), nullptr, worker.result.bytes()};
  if (options_.fill) return check_pattern(worker, memory);
  worker.result_sha256 = io_.download(memory, [](std::uint64_t, std::span<const std::byte>) {});
  worker.check = "SHA-256 of all bytes";
  if (worker.result_sha256 != source_sha256_)
    fail(worker, ExitLoanFailed, "the result's SHA-256 is " + worker.result_sha256 + ", expected " + source_sha256_);
}

void DemoRun::check_pattern(DemoWorker& worker, const Memory& memory) {
  const Pattern pattern(memory.bytes, options_.seed);
  std::uint64_t bad = UINT64_MAX;
  const auto look = [&](std::uint64_t offset, std::span<const std::byte> bytes) {
    if (bad == UINT64_MAX && !pattern.matches(offset, bytes)) bad = offset;
  };
  if (memory.bytes <= kCheckAllUpTo) {
    worker.result_sha256 = io_.download(memory, look);
    worker.check = "pattern of all bytes";
  } else {
    std::array<std::byte, 64> spot;
    const std::uint64_t last = memory.bytes - spot.size();
    for (std::uint64_t index = 0; index < kSpots && bad == UINT64_MAX; ++index) {
      // Evenly spread, moved by the seed within each stride, the first at the very beginning and the last at the very
      // end.
      const std::uint64_t stride = last / (kSpots - 1);
      const std::uint64_t jitter = index == 0 || index + 1 == kSpots ? 0 : pattern.word(index) % stride;
      const std::uint64_t offset = index + 1 == kSpots ? last : std::min(last, index * stride + jitter);
      io_.peek(memory, offset, spot);
      look(offset, spot);
    }
    worker.check = "pattern at " + std::to_string(kSpots) + " spots of 64 bytes";
  }
  if (bad != UINT64_MAX)
    fail(worker, ExitLoanFailed, "the result is not the worker's pattern at or after byte " + std::to_string(bad));
}

// The library reports a lost peer; this is for a worker that ends before it ever spoke.
void DemoRun::watch_children() {
  for (DemoWorker& worker : workers_) {
    if (worker.finished() || worker.peer || !worker.child.ended()) continue;
    if (!worker.child_grace) worker.child_grace.emplace(1000U);
    if (!worker.child_grace->passed()) continue;
    const std::string text = worker.child.status_text() + " before its loans ended";
    const int own = worker.child.exit_code(); // of this very program
    const int code = own > ExitOk && own < ExitInterrupted ? own : refusal_ ? refusal_->code() : ExitPeerLost;
    fail(worker, code, refusal_ ? std::string(refusal_->what()) + "; it " + text : text);
  }
}

void DemoRun::give_up() {
  for (DemoWorker& worker : workers_) {
    if (worker.finished()) continue;
    const char* missing = !worker.peer          ? "it never connected"
                          : !worker.result_loan ? "it never asked for its result"
                          : !worker.checked     ? "its result never became DONE"
                                                : "its loans were not given back";
    fail(worker, ExitTimeout, "did not finish within " + deadline_.text() + ": " + missing);
    for (Loan* loan : {&worker.input_loan, &worker.result_loan}) {
      if (*loan) static_cast<void>(gpuloan_loan_cancel(loan->get(), "the demo's timeout passed"));
    }
  }
}

void DemoRun::collect(DemoWorker& worker) {
  if (worker.input_loan) worker.reports.push_back({"input", worker.input_loan.report()});
  if (worker.result_loan) worker.reports.push_back({"result", worker.result_loan.report()});
  for (const LoanRow& loan : worker.reports) {
    const std::string problem = check_loan(loan, GPULOAN_STEP_RELEASE);
    if (!worker.failed && !problem.empty()) fail(worker, ExitLoanFailed, problem);
  }
  if (!worker.child.ended() && worker.failed) worker.child.end();
}

} // namespace gpuloan::tool
