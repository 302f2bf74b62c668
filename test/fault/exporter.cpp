// SPDX-License-Identifier: MIT
//
// The exporter's side: a read loan, then what the importer asks for, with two turns. It starts the importer and outlives it.
#include "side.hpp"

#include <atomic>
#include <cstring>

namespace fault {
namespace {

// Memory of the test's own, which may be freed once the library says so.
struct Own {
  std::uint64_t pointer = 0;
  bool lent = false;
  std::atomic<bool> released{false};
};

class Exporter : public SideBase {
 public:
  explicit Exporter(const Plan& plan) : SideBase(plan, Side::Exporter) {}
  int run();

 private:
  struct Held {
    gpuloan_region* region = nullptr;
    Own* own = nullptr;
    gpuloan_loan* loan = nullptr;
  };
  [[nodiscard]] bool own_memory() const { return plan_.rung == GPULOAN_RUNG_IPC || plan_.rung == GPULOAN_RUNG_POOL; }
  void play(Fd end);
  void read_loan(Held& held);
  void write_loan(Held& held);
  void lend_read(Held& held);
  void grant(gpuloan_request* request, Held& held);
  gpuloan_lend_options options(Held& held, gpuloan_access access);
  void end(Held& held);
  void wrap_up(Held& read, Held& write);
  [[nodiscard]] Own* allocate();
  void free_own();

  gpuloan_peer* peer_ = nullptr;
  std::vector<std::unique_ptr<Own>> memory_;
};

Own* Exporter::allocate() {
  auto made = std::make_unique<Own>();
  own([&] { made->pointer = gpu_->alloc(kBytes); });
  memory_.push_back(std::move(made));
  return memory_.back().get();
}

gpuloan_lend_options Exporter::options(Held& held, gpuloan_access access) {
  auto options = init<gpuloan_lend_options>();
  options.access = access;
  options.stream = gpu_->stream();
  if (held.own != nullptr) {
    options.release = [](void* user) { static_cast<Own*>(user)->released = true; };
    options.release_user = held.own;
  }
  return options;
}

void Exporter::lend_read(Held& held) {
  std::uint64_t pointer = 0;
  if (own_memory()) {
    held.own = allocate();
    pointer = held.own->pointer;
  } else {
    auto wanted = init<gpuloan_region_options>();
    wanted.bytes = kBytes;
    wanted.access = GPULOAN_ACCESS_READ;
    step(gpuloan_region_create(peer_, &wanted, &held.region), "gpuloan_region_create");
    pointer = gpuloan_region_pointer(held.region);
  }
  own([&] { gpu_->upload(pointer, kBytes, kReadSeed); });
  const auto how = options(held, GPULOAN_ACCESS_READ);
  step(gpuloan_lend(peer_, pointer, kBytes, &how, &held.loan), "gpuloan_lend");
  if (held.own != nullptr) held.own->lent = true;
}

void Exporter::grant(gpuloan_request* request, Held& held) {
  if (own_memory()) held.own = allocate();
  auto how = options(held, GPULOAN_ACCESS_WRITE);
  how.keep_open = 1;
  const gpuloan_status status = own_memory() ? gpuloan_request_grant_with(request, held.own->pointer, &how, &held.loan)
                                             : gpuloan_request_grant(request, &how, &held.region, &held.loan);
  if (status != GPULOAN_OK) {
    judge(status, "gpuloan_request_grant", gpuloan_error_text());
    step(gpuloan_request_deny(request, "no memory for it"), "gpuloan_request_deny");
    throw Stopped();
  }
  if (held.own != nullptr) held.own->lent = true;
}

void Exporter::read_loan(Held& held) {
  lend_read(held);
  step(gpuloan_loan_wait_end(held.loan, kStepMs), "wait_end of the read loan");
}

void Exporter::write_loan(Held& held) {
  gpuloan_request* request = next(GPULOAN_EVENT_REQUEST, "REQUEST").request;
  grant(request, held);
  const std::uint64_t pointer = held.own != nullptr ? held.own->pointer : gpuloan_region_pointer(held.region);
  step(gpuloan_loan_wait_done(held.loan, kStepMs), "wait_done of the first turn");
  same(pointer, kFirstSeed, "the result of the first turn");
  gpuloan_status again = gpuloan_loan_ready(held.loan, gpu_->stream());
  auto report = init<gpuloan_loan_report>();
  step(gpuloan_loan_report_get(held.loan, &report), "gpuloan_loan_report_get");
  if (again == GPULOAN_ERR_STATE && report.ended != 0) { // the loan ended meanwhile, for a reason that its outcome or PEER_LOST gives
    if (report.outcome == GPULOAN_OK) next(GPULOAN_EVENT_PEER_LOST, "PEER_LOST after the loan's good end");
    if (report.outcome == GPULOAN_OK) throw Stopped();
    again = report.outcome;
  }
  step(again, "gpuloan_loan_ready");
  step(gpuloan_loan_wait_done(held.loan, kStepMs), "wait_done of the second turn");
  same(pointer, kSecondSeed, "the result of the second turn");
  step(gpuloan_reclaim(held.loan, kStepMs), "gpuloan_reclaim");
}

void Exporter::play(Fd end) {
  Held read, write;
  const bool good = round([&] {
    make_context(GPULOAN_ROLE_EXPORTER);
    step(gpuloan_context_attach(context_, end.get(), "tester"), "gpuloan_context_attach");
    static_cast<void>(end.release());
    peer_ = next(GPULOAN_EVENT_PEER_READY, "PEER_READY").peer;
    read_loan(read);
    write_loan(write);
    wrap_up(read, write);
  });
  if (!good) static_cast<void>(round([&] { wrap_up(read, write); }));
  if (!good) throw Stopped();
}

void Exporter::end(Held& held) {
  if (held.loan != nullptr) {
    const gpuloan_status over = gpuloan_loan_wait_end(held.loan, kStepMs);
    if (over != GPULOAN_OK) judge(over, "the end of a loan", gpuloan_error_text());
    gpuloan_loan_unref(std::exchange(held.loan, nullptr));
  }
  if (held.region != nullptr) step(gpuloan_region_destroy(std::exchange(held.region, nullptr)), "gpuloan_region_destroy");
  if (held.own != nullptr && !held.own->lent) held.own->released = true;
}

void Exporter::wrap_up(Held& read, Held& write) {
  if (peer_ != nullptr) gpuloan_peer_close(std::exchange(peer_, nullptr));
  own([&] { gpu_->sync(); }); // where a lend failed, the library does not know of the upload
  end(read);
  end(write);
}

void Exporter::free_own() {
  for (const auto& memory : memory_) {
    if (!becomes([&] { return memory->released.load(); }, kStepMs)) wrong("memory that was lent is not released after the importer's end");
    else own([&] { gpu_->free(memory->pointer); });
  }
}

int Exporter::run() {
  SocketPair rounds[2] = {make_socketpair(), make_socketpair()};
  std::vector<std::string> words = {"--importer", std::to_string(rounds[0].right.get()), std::to_string(rounds[1].right.get())};
  const auto more = plan_.words();
  words.insert(words.end(), more.begin(), more.end());
  Process importer(words, {rounds[0].right.get(), rounds[1].right.get()});
  for (SocketPair& pair : rounds) pair.right.reset();
  Fd first_end = std::move(rounds[0].left), second_end = std::move(rounds[1].left);
  begin();
  const bool first = round([&] { play(std::move(first_end)); });
  report_counts("kept");
  if (plan_.fresh) gpuloan_context_destroy(std::exchange(context_, nullptr));
  report_counts("fresh");
  first_over();
  const bool second = round([&] { play(std::move(second_end)); });
  const int status = importer.wait();
  if (status != 0) wrong("the importer's exit status is " + std::to_string(status));
  static_cast<void>(round([&] { free_own(); }));
  gpuloan_context_destroy(std::exchange(context_, nullptr));
  fault_disarm();
  look_for_leaks(true);
  finish(first, second);
  return 0;
}

} // namespace

int run_exporter(const Plan& plan) { return Exporter(plan).run(); }

} // namespace fault
