// SPDX-License-Identifier: MIT
#include <sim/profile.hpp>

#include <algorithm>

namespace gpuloan::sim {
namespace {

struct Setting {
  std::string_view profile, variable;
  const char* value;
};

constexpr std::string_view kFail = "GPULOAN_SIM_FAIL", kInit = "GPULOAN_SIM_INIT_RESULT", kMps = "GPULOAN_SIM_MPS", kPin = "GPULOAN_SIM_PIN_LIMIT_KIB",
                           kQuirks = "GPULOAN_SIM_QUIRKS", kVersion = "GPULOAN_SIM_VERSION", kWithout = "GPULOAN_SIM_WITHOUT";

constexpr Setting kSettings[] = {
    {"wsl2", kQuirks, "attribute:102,attribute:103,attribute:115,attribute:119,attribute:122,attribute:125"},
    {"wsl2", kFail, "cuIpcGetMemHandle:1+:801,cuIpcOpenMemHandle:1+:801,cuIpcGetEventHandle:1+:801,cuIpcOpenEventHandle:1+:801"},
    {"vgpu", kFail, "cuMemGetAllocationGranularity:1+:801"},
    {"integrated", kQuirks, "integrated"},
    {"integrated", kWithout, "vmm"},
    {"integrated", kFail, "cuIpcOpenMemHandle:1+:801"},
    {"legacy-opens-once", kQuirks, "legacy-opens-once"},
    {"pid-namespaces", kFail, "cuIpcOpenMemHandle:1+:400"},
    {"unknown-error", kFail, "cuIpcOpenMemHandle:1+:999,cuMemPoolImportFromShareableHandle:1+:999"},
    {"pool-imports-die", kQuirks, "pool-imports-die"},
    {"cuda-11.4", kVersion, "11040"},
    {"cuda-11.4", kQuirks, "attribute:122,attribute:125,attribute:133"},
    {"cuda-11.4", kWithout, "memops"},
    {"old-abi", kWithout, "symbols:cuMemGetAddressRange"},
    {"no-memops", kWithout, "memops"},
    {"events-fail", kWithout, "memops"},
    {"events-fail", kFail, "cuIpcOpenEventHandle:1+:801"},
    {"no-host-register", kWithout, "host-register"},
    {"pinning-fails", kFail, "cuMemHostRegister:1+:801"},
    {"memlock", kPin, "512"},
    {"mps", kMps, "1"},
    {"stub", kInit, "34"},
    {"no-device", kInit, "100"},
    {"compat-mismatch", kInit, "803"},
    {"compat-device", kInit, "804"},
};

} // namespace

const char* profile_setting(std::string_view profile, std::string_view variable) noexcept {
  const auto* found = std::find_if(std::begin(kSettings), std::end(kSettings),
                                   [&](const Setting& setting) { return setting.profile == profile && setting.variable == variable; });
  return found != std::end(kSettings) ? found->value : nullptr;
}

bool is_profile(std::string_view name) noexcept {
  return std::any_of(std::begin(kSettings), std::end(kSettings), [&](const Setting& setting) { return setting.profile == name; });
}

std::string profile_names() {
  std::string names;
  std::string_view last;
  for (const Setting& setting : kSettings) {
    if (setting.profile == last) continue;
    last = setting.profile;
    names += (names.empty() ? "" : ", ") + std::string(last);
  }
  return names;
}

} // namespace gpuloan::sim
