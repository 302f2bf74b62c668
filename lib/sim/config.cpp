// SPDX-License-Identifier: MIT
//
// Parsing of the GPULOAN_SIM_* variables and of CUDA_VISIBLE_DEVICES. Everything here runs once, before any other part
// of the library looks at the result, so nothing of it is locked.
#include <sim/config.hpp>
#include <sim/device.hpp>
#include <sim/profile.hpp>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <type_traits>
#include <unistd.h>

namespace gpuloan::sim {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

template <typename Number>
bool parse_number(std::string_view text, Number& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

class Parser {
 public:
  Config run() {
    parse_profile();
    parse_state();
    number("GPULOAN_SIM_DEVICES", config_.devices, 0, kMaxDevices);
    std::uint64_t mebibytes = config_.memory_bytes >> 20;
    number("GPULOAN_SIM_MEMORY_MIB", mebibytes, 2, std::uint64_t{1} << 24);
    config_.memory_bytes = mebibytes << 20;
    std::uint64_t lag_us = config_.lag_ns / 1000;
    number("GPULOAN_SIM_LAG_US", lag_us, 0, 60'000'000);
    config_.lag_ns = lag_us * 1000;
    parse_import_limit();
    number("GPULOAN_SIM_VERSION", config_.version, 1000, 99'999);
    number("GPULOAN_SIM_MPS", config_.mps, 0, 1);
    parse_slices();
    parse_compute_mode();
    parse_peers();
    std::uint64_t kibibytes = 0;
    if (number("GPULOAN_SIM_PIN_LIMIT_KIB", kibibytes, 0, std::uint64_t{1} << 32)) config_.pin_limit = kibibytes << 10;
    CuResult code = Success;
    parse_visible();
    if (number("GPULOAN_SIM_INIT_RESULT", code, 0, 999)) config_.init_result = code;
    parse_without();
    parse_quirks();
    parse_faults();
    return std::move(config_);
  }

 private:
  void reject(const char* variable, std::string_view value, const char* expected) {
    complain(std::string(variable) + ": '" + std::string(value) + "' is not " + expected);
    config_.valid = false;
  }

  template <typename Number>
  bool number(const char* variable, Number& out, std::type_identity_t<Number> low, std::type_identity_t<Number> high) {
    const char* text = setting(variable);
    if (text == nullptr) return false;
    Number value{};
    if (!parse_number(text, value) || value < low || value > high) {
      reject(variable, text, ("a number from " + std::to_string(low) + " to " + std::to_string(high)).c_str());
      return false;
    }
    out = value;
    return true;
  }

  // As the environment says, else as the profile does; null: neither.
  [[nodiscard]] const char* setting(const char* variable) const {
    const char* text = std::getenv(variable);
    return text != nullptr && *text != '\0' ? text : profile_setting(profile_, variable);
  }

  void parse_profile() {
    const char* text = std::getenv("GPULOAN_SIM_PROFILE");
    if (text == nullptr || *text == '\0') return;
    if (is_profile(text)) profile_ = text;
    else reject("GPULOAN_SIM_PROFILE", text, ("one of " + profile_names()).c_str());
  }

  void parse_quirks() {
    const char* text = setting("GPULOAN_SIM_QUIRKS");
    if (text == nullptr) return;
    constexpr std::string_view kAttribute = "attribute:";
    for (const std::string_view part : split(text, ',')) {
      int attribute = 0;
      if (part == "integrated") config_.integrated = true;
      else if (part == "legacy-opens-once") config_.legacy_opens_once = true;
      else if (part == "pool-imports-die") config_.pool_imports_die = true;
      else if (part == "strands-exports") config_.strands_exports = true;
      else if (part == "calls-stand") config_.calls_stand = true;
      else if (part.starts_with(kAttribute) && parse_number(part.substr(kAttribute.size()), attribute)) config_.unknown_attributes.push_back(attribute);
      else reject("GPULOAN_SIM_QUIRKS", part, "one of integrated, legacy-opens-once, pool-imports-die, strands-exports, calls-stand, attribute:<number>");
    }
  }

  void parse_state() {
    const char* path = std::getenv("GPULOAN_SIM_STATE");
    config_.state_path =
        path != nullptr && *path != '\0' ? std::string(path) : "/dev/shm/gpuloan-sim-" + std::to_string(::geteuid());
  }

  // Each GPU in MIG mode: its slices are the devices of the machine, and share its memory evenly.
  void parse_slices() {
    if (!number("GPULOAN_SIM_MIG", config_.slices, 1, 7)) return;
    if (config_.devices * config_.slices > kMaxDevices) {
      reject("GPULOAN_SIM_MIG", std::getenv("GPULOAN_SIM_MIG"), "a number of slices that leaves the machine at most 8 devices");
      return;
    }
    config_.devices *= config_.slices;
    config_.memory_bytes = config_.memory_bytes / static_cast<unsigned>(config_.slices) >> 21 << 21;
  }

  void parse_compute_mode() {
    const char* text = std::getenv("GPULOAN_SIM_COMPUTE_MODE");
    if (text == nullptr || *text == '\0') return;
    constexpr std::pair<std::string_view, int> kModes[] = {
        {"default", ModeDefault}, {"prohibited", ModeProhibited}, {"exclusive", ModeExclusiveProcess}};
    for (const auto& [name, mode] : kModes) {
      if (text == name) {
        config_.compute_mode = mode;
        return;
      }
    }
    reject("GPULOAN_SIM_COMPUTE_MODE", text, "default, prohibited or exclusive");
  }

  // "all", "none", or pairs: 0-1 (each reaches the other's memory), 0>1 (0 reaches that of 1). Slices never reach others.
  void parse_peers() {
    const char* text = std::getenv("GPULOAN_SIM_PEERS");
    const std::string_view wish = text != nullptr && *text != '\0' ? text : "all";
    if (wish == "all") {
      if (config_.slices == 0) config_.peers.fill(~0U);
      return;
    }
    if (wish == "none") return;
    for (const std::string_view part : split(wish, ',')) {
      const std::size_t mark = part.find_first_of("->");
      int from = 0;
      int to = 0;
      const bool good = mark != std::string_view::npos && parse_number(part.substr(0, mark), from) &&
                        parse_number(part.substr(mark + 1), to) && from >= 0 && to >= 0 && from < config_.devices &&
                        to < config_.devices && config_.slices == 0;
      if (!good) {
        reject("GPULOAN_SIM_PEERS", part, "all, none, or a pair of whole devices as 0-1 or 0>1");
        return;
      }
      config_.peers[static_cast<std::size_t>(from)] |= 1U << to;
      if (part[mark] == '-') config_.peers[static_cast<std::size_t>(to)] |= 1U << from;
    }
  }

  void parse_import_limit() {
    const char* text = std::getenv("GPULOAN_SIM_IMPORT_LIMIT_MIB");
    if (text == nullptr || *text == '\0') return;
    constexpr std::pair<std::string_view, TooLarge> kEnds[] = {
        {"dies", TooLarge::Dies}, {"fails", TooLarge::Fails}, {"hangs", TooLarge::Hangs}, {"wavers", TooLarge::Wavers}};
    const auto fields = split(text, ':');
    const auto* end = std::find_if(std::begin(kEnds), std::end(kEnds),
                                   [&](const auto& entry) { return fields.size() == 2 && entry.first == fields[1]; });
    std::uint64_t mebibytes = 0;
    const bool good = parse_number(fields[0], mebibytes) && mebibytes <= std::uint64_t{1} << 24 && fields.size() <= 2 &&
                      (fields.size() == 1 || end != std::end(kEnds));
    if (!good) {
      reject("GPULOAN_SIM_IMPORT_LIMIT_MIB", text, "a number from 0 to 16777216, which :dies, :fails, :hangs or :wavers may follow");
      return;
    }
    config_.import_limit = mebibytes << 20;
    if (end != std::end(kEnds)) config_.too_large = end->second;
  }

  void parse_without() {
    const char* text = setting("GPULOAN_SIM_WITHOUT");
    if (text == nullptr) return;
    constexpr std::pair<std::string_view, Group> kNames[] = {{"vmm", Group::Vmm},
                                                             {"memops", Group::MemOps},
                                                             {"ipc-events", Group::IpcEvents},
                                                             {"host-register", Group::HostRegister},
                                                             {"capture", Group::Capture},
                                                             {"ipc-memory", Group::IpcMemory},
                                                             {"pools", Group::Pools}};
    constexpr std::string_view kSymbols = "symbols:";
    for (const std::string_view part : split(text, ',')) {
      if (part.starts_with(kSymbols)) {
        const Row row = row_by_name(part.substr(kSymbols.size()));
        if (row == Row::Count) reject("GPULOAN_SIM_WITHOUT", part, "symbols:<a function of the driver>");
        config_.hidden.push_back(row);
        continue;
      }
      const auto* found =
          std::find_if(std::begin(kNames), std::end(kNames), [&](const auto& entry) { return entry.first == part; });
      if (found == std::end(kNames)) {
        reject("GPULOAN_SIM_WITHOUT", part,
               "one of vmm, memops, ipc-events, host-register, capture, ipc-memory, pools, symbols:<name>");
      } else {
        config_.without |= 1U << static_cast<unsigned>(found->second);
      }
    }
  }

  void parse_faults() {
    const char* text = setting("GPULOAN_SIM_FAIL");
    if (text == nullptr) return;
    for (const std::string_view part : split(text, ',')) {
      const auto fields = split(part, ':');
      FaultRule rule;
      bool good = fields.size() == 3;
      if (good) {
        std::string_view nth = fields[1];
        rule.row = row_by_name(fields[0]);
        rule.onwards = nth.ends_with('+');
        if (rule.onwards) nth.remove_suffix(1);
        good = rule.row != Row::Count && parse_number(nth, rule.first) && rule.first > 0 &&
               parse_number(fields[2], rule.code);
      }
      if (good) {
        config_.faults.push_back(rule);
      } else {
        reject("GPULOAN_SIM_FAIL", part, "<function>:<n or n+>:<result>, the function by its base name");
      }
    }
  }

  // As the real driver: all ordinals or all UUIDs (a unique prefix will do), as the first entry says; what follows the
  // first bad one is not visible; and naming a device twice is an error of cuInit. Of slices a process sees one: the first
  // that is named, or that there is.
  void parse_visible() {
    const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
    if (text == nullptr) {
      for (int ordinal = 0; ordinal < seen_at_once(); ++ordinal) config_.visible.push_back(ordinal);
      return;
    }
    const bool by_uuid = is_uuid(text);
    for (const std::string_view part : split(text, ',')) {
      const int ordinal = is_uuid(part) == by_uuid ? find_device(part) : -1;
      if (ordinal < 0 || static_cast<int>(config_.visible.size()) == seen_at_once()) return;
      if (std::find(config_.visible.begin(), config_.visible.end(), ordinal) != config_.visible.end()) {
        config_.init_result = InvalidDevice;
        return;
      }
      config_.visible.push_back(ordinal);
    }
  }

  [[nodiscard]] static bool is_uuid(std::string_view text) { return text.starts_with("GPU-") || text.starts_with("MIG-"); }
  [[nodiscard]] int seen_at_once() const { return config_.slices != 0 ? std::min(config_.devices, 1) : config_.devices; }

  [[nodiscard]] int find_device(std::string_view part) const {
    int ordinal = -1;
    if (parse_number(part, ordinal)) { // of the GPU: its first slice
      ordinal *= std::max(config_.slices, 1);
      return ordinal >= 0 && ordinal < config_.devices ? ordinal : -1;
    }
    if (!is_uuid(part)) return -1;
    int found = -1;
    for (int candidate = 0; candidate < config_.devices; ++candidate) {
      if (!uuid_text(device_uuid(candidate), config_.slices != 0).starts_with(part)) continue;
      if (found >= 0) return -1;
      found = candidate;
    }
    return found;
  }

  Config config_;
  std::string_view profile_;
};

} // namespace

const Config& config() {
  static const Config* instance = new Config(Parser().run()); // never destroyed: used until the process is gone
  return *instance;
}

void complain(const std::string& text) noexcept { std::fprintf(stderr, "gpuloan-sim: %s\n", text.c_str()); }

} // namespace gpuloan::sim
