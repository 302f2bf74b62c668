// SPDX-License-Identifier: MIT
//
// Any bytes as a control buffer: the walk visits the items that the model sees, each inside the buffer, and parse_control
// finds exactly the model's descriptors and credentials. Nothing is opened or closed: the numbers are only numbers here.
#include "control_model.hpp"

#include <channel/control.hpp>

#include <algorithm>

using namespace gpuloan;

namespace {

void check_walk(std::span<const std::byte> control, const fuzz::ControlModel& model) {
  std::size_t count = 0;
  const bool whole = loop::walk_control(control, [&](const loop::ControlItem& item) {
    FUZZ_REQUIRE(count < model.items.size());
    const auto& expected = model.items[count++];
    FUZZ_REQUIRE(item.level == expected.level && item.type == expected.type && item.data.size() == expected.bytes);
    FUZZ_REQUIRE(item.data.empty() || item.data.data() == control.data() + expected.at);
  });
  FUZZ_REQUIRE(count == model.items.size());
  FUZZ_REQUIRE(whole == model.whole);
}

void check_parse(std::span<const std::byte> control) {
  const auto looked_at = control.first(std::min(control.size(), loop::kControlBytes));
  const auto model = fuzz::model_of(looked_at);
  const channel::Control parsed = channel::parse_control(control);
  FUZZ_REQUIRE(parsed.fd_count <= channel::Control::kRoom);

  std::vector<int> expected;
  for (const std::size_t at : model.descriptors) {
    int fd = -1;
    std::memcpy(&fd, looked_at.data() + at, sizeof fd);
    if (fd >= 0) expected.push_back(fd);
  }
  std::vector<int> found(parsed.fds.begin(), parsed.fds.begin() + static_cast<std::ptrdiff_t>(parsed.fd_count));
  if (parsed.pidfd >= 0) found.push_back(parsed.pidfd);
  std::sort(expected.begin(), expected.end());
  std::sort(found.begin(), found.end());
  FUZZ_REQUIRE(found == expected); // each of them, once

  bool short_credentials = false;
  const fuzz::ControlModel::Item* credentials = nullptr;
  for (const auto& item : model.items) {
    if (item.level != SOL_SOCKET || item.type != SCM_CREDENTIALS) continue;
    if (item.bytes < sizeof(ucred)) short_credentials = true;
    else credentials = &item;
  }
  FUZZ_REQUIRE(parsed.credentials.has_value() == (credentials != nullptr));
  if (credentials != nullptr) FUZZ_REQUIRE(std::memcmp(&*parsed.credentials, looked_at.data() + credentials->at, sizeof(ucred)) == 0);
  FUZZ_REQUIRE(parsed.well_formed == (model.whole && !short_credentials && looked_at.size() == control.size()));
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto control = std::as_bytes(std::span(data, size));
  check_walk(control, fuzz::model_of(control));
  check_parse(control);
  return 0;
}
