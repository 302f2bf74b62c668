// SPDX-License-Identifier: MIT
//
// The importer's side.
#include "side.hpp"

namespace fault {
namespace {

class Importer : public SideBase {
 public:
  explicit Importer(const Plan& plan) : SideBase(plan, Side::Importer) {}
  int run(const int (&ends)[2]);

 private:
  void play(int end);
  void read_loan();
  void write_loan();
  void turn(std::uint64_t seed);
  gpuloan_peer* peer_ = nullptr;
  gpuloan_loan* loan_ = nullptr;
};

void Importer::read_loan() {
  loan_ = next(GPULOAN_EVENT_LOAN_OFFERED, "LOAN_OFFERED").loan;
  auto view = init<gpuloan_view>();
  step(gpuloan_loan_acquire(loan_, kStepMs, &view), "acquire of the read loan");
  same(view.pointer, kReadSeed, "what was lent for read");
  step(gpuloan_loan_done(loan_, gpu_->stream()), "done of the read loan");
  step(gpuloan_loan_wait_end(loan_, kStepMs), "wait_end of the read loan");
  gpuloan_loan_unref(std::exchange(loan_, nullptr));
}

void Importer::turn(std::uint64_t seed) {
  auto view = init<gpuloan_view>();
  step(gpuloan_loan_acquire(loan_, kStepMs, &view), "acquire of the write loan");
  own([&] { gpu_->upload(view.pointer, kBytes, seed); });
  step(gpuloan_loan_done(loan_, gpu_->stream()), "done of the write loan");
  step(gpuloan_loan_wait_done(loan_, kStepMs), "wait_done of the write loan");
}

void Importer::write_loan() {
  auto wanted = init<gpuloan_request_options>();
  wanted.bytes = kBytes;
  step(gpuloan_request_send(peer_, &wanted, &loan_), "gpuloan_request_send");
  turn(kFirstSeed);
  turn(kSecondSeed);
  step(gpuloan_loan_wait_end(loan_, kStepMs), "wait_end of the write loan");
}

void Importer::play(int end) {
  Fd own_end(end);
  const bool good = round([&] {
    make_context(GPULOAN_ROLE_IMPORTER);
    const gpuloan_status adopted = gpuloan_context_adopt(context_, own_end.get(), kStepMs * 2, &peer_);
    if (adopted != GPULOAN_ERR_INVALID) static_cast<void>(own_end.release()); // else it is still ours
    step(adopted, "gpuloan_context_adopt");
    read_loan();
    write_loan();
  });
  if (loan_ != nullptr) gpuloan_loan_unref(std::exchange(loan_, nullptr));
  if (peer_ != nullptr) gpuloan_peer_close(std::exchange(peer_, nullptr));
  static_cast<void>(round([&] { own([&] { gpu_->sync(); }); }));
  if (!good) throw Stopped();
}

int Importer::run(const int (&ends)[2]) {
  begin();
  const bool first = round([&] { play(ends[0]); });
  report_counts("kept");
  if (plan_.fresh) gpuloan_context_destroy(std::exchange(context_, nullptr));
  report_counts("fresh");
  first_over();
  const bool second = round([&] { play(ends[1]); });
  gpuloan_context_destroy(std::exchange(context_, nullptr));
  fault_disarm();
  look_for_leaks(false);
  finish(first, second);
  return 0;
}

} // namespace

int run_importer(const Plan& plan, const int (&ends)[2]) { return Importer(plan).run(ends); }

} // namespace fault
