// SPDX-License-Identifier: MIT
//
// peers_test handshake|hostile [--only TEXT]: strangers and hostile peers, on the simulated driver, once per engine.
#include "../support/run.hpp"

#include <cstdio>

namespace loan_test {

[[nodiscard]] std::span<const Case> handshake_cases();
[[nodiscard]] std::span<const Case> hostile_cases();

namespace {

int run(int count, char** words) {
  const std::string_view part = count > 1 ? words[1] : "handshake", only = count > 3 ? words[3] : "";
  const TempFolder folder("gpuloan-peers");
  use_private_sim(folder);
  Gpu gpu("sim");
  int status = 0;
  for (const gpuloan_engine engine : {GPULOAN_ENGINE_EPOLL, GPULOAN_ENGINE_IO_URING}) {
    const Cell cell{"sim", static_cast<gpuloan_rung>(GPULOAN_RUNG_VMM | GPULOAN_RUNG_HOST), GPULOAN_GATE_AUTO, engine};
    auto options = init<gpuloan_context_options>();
    options.role = GPULOAN_ROLE_EXPORTER;
    options.engine = engine;
    options.driver = "sim";
    gpuloan_context* context = nullptr;
    if (gpuloan_context_create(&options, &context) == GPULOAN_ERR_UNSUPPORTED) {
      std::printf("# %s is left out: %s\n", gpuloan_engine_name(engine), gpuloan_error_text());
      continue;
    }
    gpuloan_context_destroy(context);
    std::printf("# engine %s\n", gpuloan_engine_name(engine));
    const std::span<const Case> cases = part == "hostile" ? hostile_cases() : handshake_cases();
    status |= run_cases({cell, gpu, Habitat::Thread}, cases, only).exit_status();
  }
  return status;
}

} // namespace
} // namespace loan_test

int main(int count, char** words) { return loan_test::run_program(loan_test::run, count, words); }
