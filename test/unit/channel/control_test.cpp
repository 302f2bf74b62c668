// SPDX-License-Identifier: MIT
//
// parse_control: what it reads from a good buffer, and that no bytes make it leave its bounds or lose a descriptor.
#include "support.hpp"

#include <channel/control.hpp>

#include <random>

using namespace gpuloan;
using namespace gpuloan::channel;

TEST_CASE("descriptors of several headers, credentials and a pidfd") {
  Letter letter;
  const int first[] = {100, 101};
  const int second[] = {102};
  const ucred who = {7, 8, 9};
  const int pidfd = 103;
  letter.add(SCM_RIGHTS, first, sizeof(first));
  letter.add(SCM_CREDENTIALS, &who, sizeof(who));
  letter.add(SCM_RIGHTS, second, sizeof(second));
  letter.add(loop::kScmPidfd, &pidfd, sizeof(pidfd));
  const Control control = parse_control(letter.message().control);
  CHECK(control.well_formed);
  REQUIRE(control.fd_count == 3);
  CHECK(control.fds[0] == 100);
  CHECK(control.fds[1] == 101);
  CHECK(control.fds[2] == 102);
  CHECK(control.pidfd == 103);
  REQUIRE(control.credentials.has_value());
  CHECK(control.credentials->pid == 7);
  CHECK(control.credentials->uid == 8);
}

TEST_CASE("an empty buffer") {
  const Control control = parse_control({});
  CHECK(control.well_formed);
  CHECK(control.fd_count == 0);
  CHECK(control.pidfd == -1);
  CHECK_FALSE(control.credentials.has_value());
}

TEST_CASE("a full buffer fits, and one that no engine gives is cut and refused") {
  std::vector<int> numbers((loop::kControlBytes - CMSG_LEN(0)) / sizeof(int), 5);
  Letter letter;
  letter.add(SCM_RIGHTS, numbers.data(), numbers.size() * sizeof(int));
  const Control full = parse_control(letter.message().control);
  CHECK(full.well_formed);
  CHECK(full.fd_count == numbers.size());

  std::vector<std::byte> longer(loop::kControlBytes + 64);
  std::memcpy(longer.data(), letter.control.data(), letter.control.size());
  const Control cut = parse_control(longer);
  CHECK_FALSE(cut.well_formed);
  CHECK(cut.fd_count == numbers.size());
}

TEST_CASE("any bytes") {
  std::mt19937 random(1234); // fixed: a failure can be repeated
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::byte> bytes(random() % (loop::kControlBytes + 8));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % 3 == 0 ? random() : random() % 2);
    const Control control = parse_control(bytes);
    CHECK(control.fd_count <= Control::kRoom);
    CHECK(control.pidfd >= -1);
  }
}
