// SPDX-License-Identifier: MIT
//
// check_hello and check_welcome on any record and any sender: the answer is the first of the documented checks that fails,
// and what is let through is as it was checked. readable_text gives nothing that spoils a line of a log.
//
// Input: bits that set right what would otherwise be wrong nearly always, the type, the uid, the body, the tail.
#include "fuzz.hpp"

#include <channel/handshake.hpp>
#include <channel/rules.hpp>

#include <algorithm>

using namespace gpuloan;
using channel::Type;

namespace {

constexpr uid_t kUid = 1000;
constexpr channel::BootId kBoot = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
constexpr std::size_t kEntry = 24;

enum Bits : std::uint8_t { OtherType = 1, Unknown = 2, OtherUser = 4, OtherBoot = 8, OtherCount = 16, OtherVersion = 32, ToImporter = 64 };

struct Made {
  channel::Record record = {};
  channel::Received received;

  explicit Made(fuzz::Input input) {
    const std::uint8_t bits = input.byte();
    const std::uint8_t type = input.byte();
    const auto uid = input.number<std::uint32_t>();
    const auto body = input.bytes(sizeof record - sizeof record.header);
    if (!body.empty()) std::memcpy(reinterpret_cast<std::uint8_t*>(&record) + sizeof record.header, body.data(), body.size());
    received.record = &record;
    received.tail = std::as_bytes(input.bytes(channel::kTailMax));
    received.sender.known = (bits & Unknown) == 0;
    received.sender.uid = (bits & OtherUser) != 0 ? uid : kUid;
    const Type right = (bits & ToImporter) != 0 ? Type::Welcome : Type::Hello;
    record.header.type = (bits & OtherType) != 0 ? type : static_cast<std::uint16_t>(right);
    const auto count = static_cast<std::uint32_t>(received.tail.size() / kEntry);
    if (right == Type::Hello && (bits & OtherBoot) == 0) std::memcpy(record.hello.boot_id, kBoot.data(), kBoot.size());
    if ((bits & OtherVersion) == 0) {
      if (right == Type::Hello) record.hello.version_min = 1, record.hello.version_max |= 1;
      else record.welcome.version = 1;
    }
    if ((bits & OtherCount) == 0) (right == Type::Hello ? record.hello.device_count : record.welcome.device_count) = count;
  }
};

gpuloan_status hello_status(const channel::Received& received) {
  const channel::Hello& hello = received.record->hello;
  if (received.type() != Type::Hello) return GPULOAN_ERR_PROTOCOL;
  if (!received.sender.known || received.sender.uid != kUid) return GPULOAN_ERR_UID;
  if (!std::equal(kBoot.begin(), kBoot.end(), hello.boot_id)) return GPULOAN_ERR_HOST;
  bool common = false;
  for (unsigned version = channel::kVersionMin; version <= channel::kVersionMax; ++version) common |= version >= hello.version_min && version <= hello.version_max;
  if (!common) return GPULOAN_ERR_VERSION;
  if (hello.device_count > 64 || received.tail.size() != hello.device_count * kEntry) return GPULOAN_ERR_PROTOCOL;
  return hello.wants_device != 0 && hello.device_count == 0 ? GPULOAN_ERR_PROTOCOL : GPULOAN_OK;
}

void check_devices(const channel::Received& received, const std::vector<channel::DeviceEntry>& devices) {
  FUZZ_REQUIRE(devices.size() * kEntry == received.tail.size());
  if (!devices.empty()) FUZZ_REQUIRE(std::memcmp(devices.data(), received.tail.data(), received.tail.size()) == 0);
}

void try_hello(const channel::Received& received) {
  const auto info = channel::check_hello(received, kUid, kBoot);
  FUZZ_REQUIRE((info ? GPULOAN_OK : info.error().status) == hello_status(received));
  if (!info) {
    FUZZ_REQUIRE(!info.error().text.empty());
    return;
  }
  const channel::Hello& hello = received.record->hello;
  FUZZ_REQUIRE(info->version >= hello.version_min && info->version <= hello.version_max);
  FUZZ_REQUIRE(info->version >= channel::kVersionMin && info->version <= channel::kVersionMax);
  FUZZ_REQUIRE(info->has_key == (hello.has_key != 0) && info->wants_device == (hello.wants_device != 0));
  check_devices(received, info->devices);
}

void try_welcome(const channel::Received& received) {
  const auto info = channel::check_welcome(received);
  if (received.type() == Type::Refused) {
    FUZZ_REQUIRE(!info && info.error().status < 0); // a refusal is never a success
    return;
  }
  if (!info) {
    FUZZ_REQUIRE(info.error().status == GPULOAN_ERR_PROTOCOL || info.error().status == GPULOAN_ERR_VERSION);
    return;
  }
  FUZZ_REQUIRE(received.type() == Type::Welcome && info->slots != 0 && info->slots == received.record->welcome.slots);
  FUZZ_REQUIRE(info->version >= channel::kVersionMin && info->version <= channel::kVersionMax);
  check_devices(received, info->devices);
}

void check_text(const channel::Received& received) {
  const std::string text = channel::readable_text(received);
  FUZZ_REQUIRE(text.size() == std::min<std::size_t>(received.tail.size(), GPULOAN_TEXT_MAX - 1));
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    FUZZ_REQUIRE(byte >= 0x20 && byte != 0x7F);
    FUZZ_REQUIRE(byte == '?' || byte == static_cast<unsigned char>(received.tail[i]));
  }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Made made{fuzz::Input(data, size)};
  try_hello(made.received);
  try_welcome(made.received);
  check_text(made.received);
  return 0;
}
