// SPDX-License-Identifier: MIT
#include "side.hpp"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <unistd.h>

namespace fault {
namespace {

std::size_t memfd_mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:gpuloan") != std::string::npos ? 1U : 0U;
  return count;
}

// The environment decides what the simulated driver of this process does, and is read at its first call.
void set_environment(const Plan& plan, bool mine) {
  ::setenv("GPULOAN_SIM_STATE", plan.state.c_str(), 1);
  ::setenv("GPULOAN_SIM_LAG_US", "30", 1);
  const std::string fail = plan.function + ":" + std::to_string(plan.n) + ":" + std::to_string(plan.code);
  if (mine && plan.kind == Kind::Driver) ::setenv("GPULOAN_SIM_FAIL", fail.c_str(), 1);
  else ::unsetenv("GPULOAN_SIM_FAIL");
}

} // namespace

SideBase::SideBase(const Plan& plan, Side side) : plan_(plan), side_(side), mine_(plan.side == side && plan.kind != Kind::None) {
  set_environment(plan, mine_);
  gpu_ = std::make_unique<Gpu>("sim");
  gpu_->warm_up();
  if (plan.rung == GPULOAN_RUNG_POOL && side == Side::Exporter) gpu_->alloc_from_pool();
  const std::uint64_t scratch = gpu_->alloc(kBytes); // so that the pinned buffers are there
  gpu_->upload(scratch, kBytes, 1);
  static_cast<void>(gpu_->mismatch(scratch, kBytes, 1));
  gpu_->sync();
  gpu_->free(scratch);
  for (int i = 0; mine_ && plan.kind == Kind::Call && i < kCallCount; ++i) {
    if (plan.function == kCalls[i]) index_ = i;
  }
}

void SideBase::begin() {
  fds_ = open_fds();
  live_ = gpu_->live();
  maps_ = memfd_mappings();
  used_ = gpu_->used_bytes();
  for (const std::string& name : driver_functions()) base_[name] = static_cast<std::uint64_t>(gpu_->call.sim_calls(name.c_str()));
  fault_arm(index_, plan_.n, plan_.code);
}

bool SideBase::fired() const {
  if (!mine_) return false;
  return plan_.kind == Kind::Call ? fault_fired() : static_cast<std::uint64_t>(gpu_->call.sim_calls(plan_.function.c_str())) >= plan_.n;
}

void SideBase::wrong(const std::string& what) {
  ++wrongs_;
  std::printf("WRONG %s: %s\n", side_ == Side::Exporter ? "exporter" : "importer", what.c_str());
}

void SideBase::judge(gpuloan_status status, const char* what, const std::string& text) {
  const std::string said = std::string(what) + " says " + gpuloan_status_name(status) + ": " + text;
  std::printf("note %s %s\n", side_ == Side::Exporter ? "exporter" : "importer", said.c_str());
  constexpr gpuloan_status kNever[] = {GPULOAN_ERR_INTERNAL, GPULOAN_ERR_TIMEOUT, GPULOAN_ERR_INVALID, GPULOAN_ERR_BUSY, GPULOAN_ERR_STATE,
                                       GPULOAN_ERR_FORKED, GPULOAN_ERR_CAPTURE, GPULOAN_ERR_WAIT_LIMIT};
  const bool unknown = std::string_view(gpuloan_status_name(status)) == "GPULOAN_ERR_UNKNOWN";
  if (unknown || std::find(std::begin(kNever), std::end(kNever), status) != std::end(kNever)) wrong(said);
}

void SideBase::step(gpuloan_status status, const char* what) {
  if (status == GPULOAN_OK) return;
  judge(status, what, gpuloan_error_text());
  throw Stopped();
}

void SideBase::make_context(gpuloan_role role) {
  if (context_ != nullptr) return;
  auto options = init<gpuloan_context_options>();
  options.role = role;
  options.engine = GPULOAN_ENGINE_EPOLL;
  options.driver = "sim";
  options.rungs = plan_.rung;
  options.gate = plan_.gate;
  options.canary_timeout_ms = kCanaryMs;
  if (role == GPULOAN_ROLE_IMPORTER) options.engine = GPULOAN_ENGINE_AUTO;
  step(gpuloan_context_create(&options, &context_), "gpuloan_context_create");
  report_counts("made");
}

gpuloan_event SideBase::next(gpuloan_event_type wanted, const char* what) {
  while (true) {
    auto event = init<gpuloan_event>();
    gpuloan_status status = gpuloan_context_next_event(context_, kStepMs, &event);
    if (status == GPULOAN_ERR_NO_MEMORY) status = gpuloan_context_next_event(context_, kStepMs, &event); // the event waits for that
    step(status, what);
    if (event.type == static_cast<std::uint32_t>(wanted)) return event;
    if (event.type == GPULOAN_EVENT_LOAN_OFFERED) gpuloan_loan_unref(event.loan);
    if (event.type == GPULOAN_EVENT_PEER_LOST || event.type == GPULOAN_EVENT_PEER_REFUSED) {
      judge(event.status, what, event.text);
      throw Stopped();
    }
  }
}

void SideBase::same(std::uint64_t pointer, std::uint64_t seed, const char* what) {
  own([&] {
    const std::string bad = gpu_->mismatch(pointer, kBytes, seed);
    if (!bad.empty()) wrong(std::string(what) + ": " + bad);
  });
}

void SideBase::report_counts(const char* when) {
  if (plan_.kind != Kind::None) return;
  const char* side = side_ == Side::Exporter ? "0" : "1";
  for (const std::string& name : driver_functions()) {
    const auto now = static_cast<std::uint64_t>(gpu_->call.sim_calls(name.c_str()));
    std::printf("count %s %s 1 %s %llu %llu\n", when, side, name.c_str(), static_cast<unsigned long long>(base_[name]), static_cast<unsigned long long>(now));
  }
  for (int i = 0; i < kCallCount; ++i) std::printf("count %s %s 2 %s 0 %llu\n", when, side, kCalls[i], static_cast<unsigned long long>(fault_count(i)));
}

void SideBase::look_for_leaks(bool device) {
  if (plan_.keeps_something() || own_failed_) return; // what the driver refused to take back stays
  std::string fds; // a pool gives back what lies idle in it when a stream is synchronised
  if (!becomes([&] { return gpu_->sync(), (fds = added(fds_, open_fds())).empty(); }, kSettleMs)) wrong("descriptors stayed open: " + fds);
  if (!becomes([&] { return memfd_mappings() <= maps_; }, kSettleMs)) {
    wrong("mappings: " + std::to_string(maps_) + " before, " + std::to_string(memfd_mappings()) + " after");
  }
  for (const auto& [what, before] : live_) {
    if (!becomes([&] { return gpu_->live().at(what) == before; }, kSettleMs)) {
      wrong(what + " of the driver: " + std::to_string(before) + " before, " + std::to_string(gpu_->live().at(what)) + " after");
    }
  }
  if (device && !becomes([&] { return gpu_->used_bytes() <= used_; }, kSettleMs)) {
    wrong("device memory: " + std::to_string(gpu_->used_bytes() - used_) + " bytes more than before");
  }
}

void SideBase::finish(bool first, bool second) {
  std::printf("end %d %d %d %d %d %d\n", static_cast<int>(side_), first, second, fired_in_first_, fired(), own_failed_);
}

void SideBase::first_over() { fired_in_first_ = fired(); }

} // namespace fault
