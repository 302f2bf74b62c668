// SPDX-License-Identifier: MIT
//
// What all subcommands share: the common options, opening a driver and a context with them, and the lines that say
// which driver and which engine ran.
#pragma once

#include "json.hpp"
#include "options.hpp"
#include "wait.hpp"

#include <string>

namespace gpuloan::tool {

struct CommonOptions {
  std::string driver; // empty: GPULOAN_DRIVER, else "real"
  std::int32_t device = 0;
  std::uint32_t timeout_ms = 60'000;
  bool json = false;

  void add_to(Parser& parser);
  [[nodiscard]] const char* driver_or_null() const { return driver.empty() ? nullptr : driver.c_str(); }
};

struct LoanOptions {
  std::uint32_t loop = GPULOAN_LOOP_THREAD;
  std::uint32_t sleep = 0; // GPULOAN_CONTEXT_SLEEP
  std::uint32_t engine = GPULOAN_ENGINE_AUTO;
  std::uint32_t rungs = 0; // all
  std::uint32_t gate = GPULOAN_GATE_AUTO;
  std::uint32_t canary_timeout_ms = 0; // the library's default
  std::uint64_t idle_bytes = 0;        // likewise
  void add_engine_to(Parser& parser);
  void add_to(Parser& parser);
  // Where memory of the arena is lent: throws Failure for a rung that cannot carry it, before anybody is waited for.
  void check_arena() const;
};

// One side of the command at work: its context and what it runs on.
struct Session {
  gpuloan_driver_info driver = init<gpuloan_driver_info>(); // unset without a device
  gpuloan_device_info device = init<gpuloan_device_info>();
  bool has_device = false;
  Context context;
};

// Probes the driver and the device. Throws Failure that says what to do where there is none.
[[nodiscard]] gpuloan_driver_info probe_driver(const char* driver);
// A context of `role`, with a device unless `no_device`.
[[nodiscard]] Session open_session(const CommonOptions& common, const LoanOptions& loans, gpuloan_role role,
                                   bool no_device = false);

[[nodiscard]] std::string driver_line(const gpuloan_driver_info& info);
[[nodiscard]] std::string device_line(const gpuloan_device_info& info);
// "driver … / device … / engine …" as aligned lines.
void print_session(std::FILE* out, const Session& session);
// Members "version", "driver", "device", "engine" of the object that is open.
void json_session(Json& json, const Session& session);
// Members "command", "ok" and "exit_code" (with its name) of the object that is open.
void json_outcome(Json& json, const char* command, int code);

} // namespace gpuloan::tool
