// SPDX-License-Identifier: MIT
#include "plan.hpp"

#include <algorithm>
#include <cstdlib>

namespace fault {
namespace {

const char* side_name(Side side) { return side == Side::Exporter ? "exporter" : "importer"; }

} // namespace

std::string Plan::name() const {
  std::string text = std::string(gpuloan_rung_name(rung)) + "/" + gpuloan_gate_name(gate) + (fresh ? "/fresh " : "/kept ");
  if (kind == Kind::None) return text + "without a fault";
  return text + side_name(side) + " " + function + " " + std::to_string(n) + " -> " + std::to_string(code);
}

std::vector<std::string> Plan::words() const {
  const auto number = [](auto value) { return std::to_string(static_cast<unsigned long long>(value)); };
  return {number(rung), number(gate), number(fresh), number(side), number(kind), function.empty() ? "-" : function, number(n), number(code), state};
}

Plan Plan::parse(const char* const* words) {
  Plan plan;
  plan.rung = static_cast<gpuloan_rung>(std::atoi(words[0]));
  plan.gate = static_cast<gpuloan_gate>(std::atoi(words[1]));
  plan.fresh = std::atoi(words[2]) != 0;
  plan.side = static_cast<Side>(std::atoi(words[3]));
  plan.kind = static_cast<Kind>(std::atoi(words[4]));
  plan.function = words[5];
  plan.n = std::strtoull(words[6], nullptr, 10);
  plan.code = std::atoi(words[7]);
  plan.state = words[8];
  return plan;
}

bool Plan::keeps_something() const {
  constexpr const char* kGivingBack[] = {"cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuStreamDestroy", "cuEventDestroy", "cuMemHostUnregister",
                                         "cuMemFree", "cuMemFreeAsync", "cuIpcCloseMemHandle", "cuDevicePrimaryCtxRelease", "cuMemPoolDestroy",
                                         "cuCtxPopCurrent",
                                         // Without these nothing can be given back at all.
                                         "cuCtxGetCurrent", "cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"};
  return kind == Kind::Driver && std::find(std::begin(kGivingBack), std::end(kGivingBack), function) != std::end(kGivingBack);
}

const std::vector<std::string>& driver_functions() {
  static const std::vector<std::string> names = {
#define GPULOAN_CUDA(need, since, group, name, exported, params) #name,
#include <driver/symbols.inc>
#undef GPULOAN_CUDA
  };
  return names;
}

} // namespace fault
