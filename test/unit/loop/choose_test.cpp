// SPDX-License-Identifier: MIT
//
// make_engine: who decides, what the reason says, and that nobody gets another engine than the one asked for by name.
#include "support.hpp"

#include <cstdlib>

using namespace gpuloan;
using namespace gpuloan::loop;

namespace {

// GPULOAN_ENGINE for one test case; null unsets it.
class Environment {
 public:
  explicit Environment(const char* value) {
    REQUIRE((value != nullptr ? ::setenv("GPULOAN_ENGINE", value, 1) : ::unsetenv("GPULOAN_ENGINE")) == 0);
  }
  ~Environment() { ::unsetenv("GPULOAN_ENGINE"); }
};

bool has_ring() { return make_uring().has_value(); }

struct Expected {
  const char* environment;
  gpuloan_engine wanted;
  bool ring_allowed;
  gpuloan_engine kind; // AUTO: what AUTO may take here
  const char* reason;  // how it begins; null: depends on the machine
};

} // namespace

TEST_CASE("make_engine: choice and reason") {
  const DescriptorGuard guard;
  const Expected cases[] = {
      {nullptr, GPULOAN_ENGINE_AUTO, true, GPULOAN_ENGINE_AUTO, nullptr},
      {"", GPULOAN_ENGINE_AUTO, true, GPULOAN_ENGINE_AUTO, nullptr},
      {"auto", GPULOAN_ENGINE_AUTO, true, GPULOAN_ENGINE_AUTO, nullptr},
      {nullptr, GPULOAN_ENGINE_AUTO, false, GPULOAN_ENGINE_EPOLL, "epoll: a ring belongs to a loop thread"},
      {"io_uring", GPULOAN_ENGINE_AUTO, false, GPULOAN_ENGINE_EPOLL, "epoll: a ring belongs to a loop thread"},
      {"epoll", GPULOAN_ENGINE_AUTO, true, GPULOAN_ENGINE_EPOLL, "epoll: GPULOAN_ENGINE=epoll"},
      {"io_uring", GPULOAN_ENGINE_EPOLL, true, GPULOAN_ENGINE_EPOLL, "epoll: asked for in the options"},
      {"nonsense", GPULOAN_ENGINE_EPOLL, true, GPULOAN_ENGINE_EPOLL, "epoll: asked for in the options"},
  };
  for (const Expected& expected : cases) {
    CAPTURE(expected.environment);
    CAPTURE(expected.wanted);
    const Environment environment(expected.environment);
    const auto choice = make_engine(expected.wanted, expected.ring_allowed);
    REQUIRE(choice.has_value());
    if (expected.kind != GPULOAN_ENGINE_AUTO) {
      CHECK(choice->engine->kind() == expected.kind);
      CHECK(choice->reason.starts_with(expected.reason));
    } else if (has_ring()) {
      CHECK(choice->engine->kind() == GPULOAN_ENGINE_IO_URING);
      CHECK(choice->reason == "io_uring: its self-test passed");
    } else {
      CHECK(choice->engine->kind() == GPULOAN_ENGINE_EPOLL);
      CHECK(choice->reason.starts_with("epoll: io_uring"));
    }
  }
}

TEST_CASE("make_engine: io_uring by name is io_uring or an error") {
  const DescriptorGuard guard;
  const Environment by_options(nullptr);
  const auto choice = make_engine(GPULOAN_ENGINE_IO_URING, true);
  CHECK(choice.has_value() == has_ring());
  if (choice) {
    CHECK(choice->engine->kind() == GPULOAN_ENGINE_IO_URING);
    CHECK(choice->reason == "io_uring: asked for in the options");
  } else {
    CHECK(choice.error().status == GPULOAN_ERR_UNSUPPORTED);
  }
  const auto not_allowed = make_engine(GPULOAN_ENGINE_IO_URING, false);
  REQUIRE_FALSE(not_allowed.has_value());
  CHECK(not_allowed.error().status == GPULOAN_ERR_UNSUPPORTED);

  const Environment by_variable("io_uring");
  const auto named = make_engine(GPULOAN_ENGINE_AUTO, true);
  CHECK(named.has_value() == has_ring());
  if (named) CHECK(named->reason == "io_uring: GPULOAN_ENGINE=io_uring");
}

TEST_CASE("make_engine: wrong names are refused") {
  const DescriptorGuard guard;
  for (const char* name : {"uring", "EPOLL", "epoll ", "1"}) {
    const Environment environment(name);
    const auto choice = make_engine(GPULOAN_ENGINE_AUTO, true);
    REQUIRE_FALSE(choice.has_value());
    CHECK(choice.error().status == GPULOAN_ERR_INVALID);
    CHECK(choice.error().text.find(name) != std::string::npos);
  }
  CHECK(make_engine(static_cast<gpuloan_engine>(3), true).error().status == GPULOAN_ERR_INVALID);
}
