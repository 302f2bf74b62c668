// SPDX-License-Identifier: MIT
#include "cell.hpp"

#include <cstdlib>

namespace loan_test {
namespace {

template <typename Value, std::size_t Count>
Value parse(std::string_view text, const Choice<Value> (&choices)[Count]) {
  std::string names;
  for (const auto& [name, value] : choices) {
    if (text == name) return value;
    names += std::string(" ") + name;
  }
  fail("'" + std::string(text) + "' is none of" + names);
}

} // namespace

std::string default_driver() {
  const char* driver = std::getenv("GPULOAN_DRIVER");
  return driver != nullptr && *driver != '\0' ? driver : "sim";
}

bool take_cell_option(std::string_view word, const char* value, Cell& cell) {
  if (word == "--driver") cell.driver = value;
  else if (word == "--rung") cell.rung = parse(value, kRungs);
  else if (word == "--gate") cell.gate = parse(value, kGates);
  else if (word == "--engine") cell.engine = std::string_view(value) == "auto" ? GPULOAN_ENGINE_AUTO : parse(value, kEngines);
  else return false;
  return true;
}

std::string missing(const Cell& cell) {
  auto device = init<gpuloan_device_info>();
  if (gpuloan_device_probe(cell.driver.c_str(), 0, &device) != GPULOAN_OK) return gpuloan_error_text();
  std::uint32_t floors = 0;
  if (cell.rung == GPULOAN_RUNG_VMM) floors |= GPULOAN_FLOOR_VMM;
  if (cell.rung == GPULOAN_RUNG_POOL) floors |= GPULOAN_FLOOR_POOLS;
  if (cell.rung == GPULOAN_RUNG_IPC) floors |= GPULOAN_FLOOR_IPC_MEMORY;
  if (cell.gate == GPULOAN_GATE_MEMOP) floors |= GPULOAN_FLOOR_MEMOPS | GPULOAN_FLOOR_HOST_REGISTER;
  if (cell.gate == GPULOAN_GATE_EVENT) floors |= GPULOAN_FLOOR_IPC_EVENTS;
  if ((device.missing & floors) != 0) return device.floor_reason;
  auto options = init<gpuloan_context_options>();
  options.role = GPULOAN_ROLE_EXPORTER;
  options.engine = cell.engine;
  options.driver = cell.driver.c_str();
  gpuloan_context* context = nullptr;
  const gpuloan_status status = gpuloan_context_create(&options, &context);
  if (status == GPULOAN_ERR_UNSUPPORTED) return gpuloan_error_text();
  expect_ok(status, "gpuloan_context_create");
  gpuloan_context_destroy(context);
  return {};
}

} // namespace loan_test
