// SPDX-License-Identifier: MIT
#include "session.hpp"

#include "output.hpp"

#include <cstdlib>

namespace gpuloan::tool {

void CommonOptions::add_to(Parser& parser) {
  parser.value("driver", "sim|real|PATH", "the CUDA driver; default: GPULOAN_DRIVER, else real",
               [this](const std::string& text) {
                 if (text.empty())
                   throw Failure(ExitUsage, "is empty; write sim, real or the path of a driver library");
                 driver = text;
               });
  parser.value("device", "N", "the device's number in this process; default 0", [this](const std::string& text) {
    device = static_cast<std::int32_t>(parse_number(text, 0, INT32_MAX));
  });
  parser.value("timeout", "SECONDS", "give up after this time, a fraction is fine; default " + std::to_string(timeout_ms / 1000),
               [this](const std::string& text) { timeout_ms = parse_seconds(text); });
  parser.flag("json", "print one JSON object instead of text", json);
}

void LoanOptions::add_engine_to(Parser& parser) {
  parser.value("engine", "auto|epoll|io_uring", "what drives the exporter's loop; default auto",
               [this](const std::string& text) {
                 static constexpr Choice kEngines[] = {{"auto", GPULOAN_ENGINE_AUTO},
                                                       {"epoll", GPULOAN_ENGINE_EPOLL},
                                                       {"io_uring", GPULOAN_ENGINE_IO_URING}};
                 engine = parse_choice(text, kEngines);
               });
}

void LoanOptions::add_to(Parser& parser) {
  add_engine_to(parser);
  parser.value("rung", "vmm|pool|ipc|host", "allow only this mechanism; default: the best that works",
               [this](const std::string& text) {
                 static constexpr Choice kRungs[] = {{"vmm", GPULOAN_RUNG_VMM}, {"pool", GPULOAN_RUNG_POOL}, {"ipc", GPULOAN_RUNG_IPC}, {"host", GPULOAN_RUNG_HOST}};
                 rungs = parse_choice(text, kRungs);
               });
  parser.value("gate", "auto|memop|event|host", "what orders the two sides' work; default auto",
               [this](const std::string& text) {
                 static constexpr Choice kGates[] = {{"auto", GPULOAN_GATE_AUTO},
                                                     {"memop", GPULOAN_GATE_MEMOP},
                                                     {"event", GPULOAN_GATE_EVENT},
                                                     {"host", GPULOAN_GATE_HOST}};
                 gate = parse_choice(text, kGates);
               });
}

void LoanOptions::check_arena() const {
  if (rungs != GPULOAN_RUNG_POOL && rungs != GPULOAN_RUNG_IPC) return;
  const std::string name = gpuloan_rung_name(rungs);
  throw Failure(ExitUnsupported, "option '--rung': " + name + " cannot carry what is lent here, memory of gpuloan's arena; vmm and host do, and 'gpuloan canary --rung " + name +
                                     "' tries " + name + " with memory of its own kind");
}

gpuloan_driver_info probe_driver(const char* driver) {
  auto info = init<gpuloan_driver_info>();
  const gpuloan_status status = gpuloan_driver_probe(driver, &info);
  if (status == GPULOAN_OK) return info;
  const char* variable = std::getenv("GPULOAN_DRIVER");
  const bool real = driver != nullptr ? std::string_view(driver) == "real" : variable == nullptr || *variable == '\0';
  throw Failure(exit_code(status), std::string("cannot open the driver: ") + gpuloan_error_text() +
                                       (real ? " (for this command: --driver sim)" : ""));
}

Session open_session(const CommonOptions& common, const LoanOptions& loans, gpuloan_role role, bool no_device) {
  Session session;
  if (!no_device) {
    session.driver = probe_driver(common.driver_or_null());
    attempt("cannot use device " + std::to_string(common.device),
            [&] { check(gpuloan_device_probe(common.driver_or_null(), common.device, &session.device)); });
    session.has_device = true;
  }
  auto options = init<gpuloan_context_options>();
  options.role = role;
  options.loop = loans.loop;
  options.engine = loans.engine;
  options.flags = loans.sleep;
  if (no_device) options.flags |= GPULOAN_CONTEXT_NO_DEVICE;
  options.driver = common.driver_or_null();
  options.device = common.device;
  options.rungs = loans.rungs;
  options.gate = loans.gate;
  options.canary_timeout_ms = loans.canary_timeout_ms;
  options.idle_bytes = loans.idle_bytes;
  session.context = attempt("cannot make a context", [&] { return Context::create(options); });
  return session;
}

std::string driver_line(const gpuloan_driver_info& info) {
  return std::string(info.simulated != 0 ? "SIMULATED driver " : "driver ") + version_text(info.version) + " at " +
         info.path + (info.simulated != 0 ? "" : std::string(" (") + info.found_by + ")");
}

std::string device_line(const gpuloan_device_info& info) {
  return std::to_string(info.ordinal) + ": " + info.name + ", " + size_text(info.total_bytes) + ", " +
         uuid_text(info);
}

void print_session(std::FILE* out, const Session& session) {
  const gpuloan_stats stats = session.context.stats();
  const std::string name = gpuloan_engine_name(stats.engine);
  const std::string_view reason = stats.engine_reason;
  std::fprintf(out, "driver  %s\n",
               session.has_device ? driver_line(session.driver).c_str() : "none: host memory only");
  if (session.has_device) std::fprintf(out, "device  %s\n", device_line(session.device).c_str());
  // The library's reason may begin with the name.
  const bool named = reason.starts_with(name);
  std::fprintf(out, "engine  %s%s%s\n", named ? "" : name.c_str(), named || reason.empty() ? "" : ": ",
               stats.engine_reason);
}

void json_session(Json& json, const Session& session) {
  json.member("version", gpuloan_version_text());
  json.key("driver");
  if (session.has_device) {
    json.begin_object().member("simulated", session.driver.simulated != 0);
    json.member("version", version_text(session.driver.version)).member("path", session.driver.path);
    json.member("found_by", session.driver.found_by).end();
    json.key("device").begin_object().member("ordinal", session.device.ordinal).member("name", session.device.name);
    json.member("uuid", uuid_text(session.device));
    json.member("total_bytes", session.device.total_bytes).end();
  } else {
    json.null();
  }
  if (session.context.get() == nullptr) return;
  const gpuloan_stats stats = session.context.stats();
  json.key("engine").begin_object().member("name", gpuloan_engine_name(stats.engine));
  json.member("reason", stats.engine_reason).end();
}

void json_outcome(Json& json, const char* command, int code) {
  json.member("command", command)
      .member("ok", code == ExitOk)
      .member("exit_code", code)
      .member("exit_name", exit_name(code));
}

} // namespace gpuloan::tool
