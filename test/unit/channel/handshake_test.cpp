// SPDX-License-Identifier: MIT
//
// check_hello and check_welcome: each refusal, the order in which they come, and what is read from a good record.
#include "support.hpp"

#include <channel/handshake.hpp>

#include <algorithm>

using namespace gpuloan;
using namespace gpuloan::channel;

namespace {

constexpr uid_t kUid = 1000;
constexpr BootId kBoot = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

// A record with its tail in memory, as decode() would give it.
struct Incoming {
  Record record;
  std::vector<DeviceEntry> devices;
  std::string text;
  Received received;

  explicit Incoming(Type type) : record(make_record(type)) {}
  const Received& look() {
    received.record = &record;
    received.tail = text.empty() ? std::as_bytes(std::span(devices)) : std::as_bytes(std::span(text));
    return received;
  }
};

DeviceEntry device(unsigned char first) {
  DeviceEntry entry = {};
  entry.uuid[0] = first;
  entry.floors = 3;
  entry.driver_version = 13000;
  return entry;
}

Incoming good_hello() {
  Incoming in(Type::Hello);
  in.received.sender.known = true;
  in.received.sender.uid = kUid;
  in.record.hello.version_min = 1;
  in.record.hello.version_max = 1;
  std::copy(kBoot.begin(), kBoot.end(), in.record.hello.boot_id);
  in.devices = {device(1), device(2)};
  in.record.hello.device_count = 2;
  return in;
}

Incoming good_welcome() {
  Incoming in(Type::Welcome);
  in.record.welcome.version = 1;
  in.record.welcome.slots = 16384;
  in.devices = {device(9)};
  in.record.welcome.device_count = 1;
  return in;
}

void check_hello_fails(Incoming& in, gpuloan_status status, std::string_view part) {
  check_fails(check_hello(in.look(), kUid, kBoot), status, part);
}

} // namespace

TEST_CASE("a good HELLO") {
  Incoming in = good_hello();
  in.record.hello.has_key = 1;
  in.record.hello.wants_device = 1;
  const auto info = check_hello(in.look(), kUid, kBoot);
  REQUIRE_MESSAGE(info.has_value(), info.error().text);
  CHECK(info->version == 1);
  CHECK(info->has_key);
  CHECK(info->wants_device);
  REQUIRE(info->devices.size() == 2);
  CHECK(info->devices[0].uuid[0] == 1);
  CHECK(info->devices[1].uuid[0] == 2);
  CHECK(info->devices[1].floors == 3);
  CHECK(info->devices[1].driver_version == 13000);
}

TEST_CASE("a HELLO without devices and with 64") {
  Incoming none = good_hello();
  none.devices.clear();
  none.record.hello.device_count = 0;
  CHECK(check_hello(none.look(), kUid, kBoot).has_value());
  Incoming many = good_hello();
  many.devices.assign(64, device(5));
  many.record.hello.device_count = 64;
  const auto info = check_hello(many.look(), kUid, kBoot);
  REQUIRE(info.has_value());
  CHECK(info->devices.size() == 64);
}

TEST_CASE("each refusal of a HELLO") {
  Incoming unknown = good_hello();
  unknown.received.sender.known = false;
  check_hello_fails(unknown, GPULOAN_ERR_UID, "named no sender");
  Incoming stranger = good_hello();
  stranger.received.sender.uid = kUid + 1;
  check_hello_fails(stranger, GPULOAN_ERR_UID, "user 1001, this process as user 1000");
  for (std::size_t i = 0; i < kBoot.size(); ++i) {
    Incoming elsewhere = good_hello();
    elsewhere.record.hello.boot_id[i] ^= 0x80;
    check_hello_fails(elsewhere, GPULOAN_ERR_HOST, "another host");
  }
  Incoming wrong_type(Type::Request);
  check_hello_fails(wrong_type, GPULOAN_ERR_PROTOCOL, "REQUEST came where HELLO was due");
}

TEST_CASE("version ranges") {
  struct Range {
    std::uint16_t low, high;
    bool good;
  };
  for (const Range range : {Range{1, 1, true}, Range{0, 1, true}, Range{1, 9, true}, Range{0, 0xFFFF, true},
                            Range{2, 9, false}, Range{0, 0, false}, Range{1, 0, false}, Range{0xFFFF, 1, false}}) {
    CAPTURE(range.low);
    CAPTURE(range.high);
    Incoming in = good_hello();
    in.record.hello.version_min = range.low;
    in.record.hello.version_max = range.high;
    const auto info = check_hello(in.look(), kUid, kBoot);
    CHECK(info.has_value() == range.good);
    if (info) CHECK(info->version == 1);
    if (!info) CHECK(info.error().status == GPULOAN_ERR_VERSION);
  }
}

TEST_CASE("device lists that do not add up") {
  for (const std::uint32_t count : {0U, 1U, 3U, 64U}) {
    Incoming in = good_hello();
    in.record.hello.device_count = count;
    check_hello_fails(in, GPULOAN_ERR_PROTOCOL, "devices in a tail of 48 bytes");
  }
  for (const std::uint32_t count : {65U, 0x80000000U, 0xFFFFFFFFU, 0x0AAAAAACU}) { // the last: times 24 wraps to 32
    Incoming in = good_hello();
    in.record.hello.device_count = count;
    check_hello_fails(in, GPULOAN_ERR_PROTOCOL, "at most 64");
  }
  Incoming cut = good_hello();
  cut.look();
  cut.received.tail = cut.received.tail.first(47);
  check_fails(check_hello(cut.received, kUid, kBoot), GPULOAN_ERR_PROTOCOL, "tail of 47 bytes");
  Incoming wants = good_hello();
  wants.devices.clear();
  wants.record.hello.device_count = 0;
  wants.record.hello.wants_device = 1;
  check_hello_fails(wants, GPULOAN_ERR_PROTOCOL, "wants a device and lists none");
}

// Everything is wrong at first; each refusal is mended in turn and the next one comes up.
TEST_CASE("the order of the checks") {
  Incoming in = good_hello();
  in.received.sender.known = false;
  in.received.sender.uid = kUid + 1;
  in.record.hello.boot_id[0] ^= 1;
  in.record.hello.version_min = 2;
  in.record.hello.version_max = 2;
  in.record.hello.device_count = 65;
  check_hello_fails(in, GPULOAN_ERR_UID, "named no sender");
  in.received.sender.known = true;
  check_hello_fails(in, GPULOAN_ERR_UID, "user 1001");
  in.received.sender.uid = kUid;
  check_hello_fails(in, GPULOAN_ERR_HOST, "another host");
  in.record.hello.boot_id[0] ^= 1;
  check_hello_fails(in, GPULOAN_ERR_VERSION, "2 to 2");
  in.record.hello.version_min = 1;
  check_hello_fails(in, GPULOAN_ERR_PROTOCOL, "65 devices");
  in.record.hello.device_count = 2;
  CHECK(check_hello(in.look(), kUid, kBoot).has_value());
}

TEST_CASE("a good WELCOME") {
  Incoming in = good_welcome();
  const auto info = check_welcome(in.look());
  REQUIRE(info.has_value());
  CHECK(info->version == 1);
  CHECK(info->slots == 16384);
  REQUIRE(info->devices.size() == 1);
  CHECK(info->devices[0].uuid[0] == 9);
}

TEST_CASE("a WELCOME that makes no sense") {
  for (const std::uint16_t version : {std::uint16_t{0}, std::uint16_t{2}, std::uint16_t{0xFFFF}}) {
    Incoming in = good_welcome();
    in.record.welcome.version = version;
    check_fails(check_welcome(in.look()), GPULOAN_ERR_VERSION, std::to_string(version));
  }
  Incoming slots = good_welcome();
  slots.record.welcome.slots = 0;
  check_fails(check_welcome(slots.look()), GPULOAN_ERR_PROTOCOL, "no slots");
  Incoming list = good_welcome();
  list.record.welcome.device_count = 2;
  check_fails(check_welcome(list.look()), GPULOAN_ERR_PROTOCOL, "2 devices in a tail of 24 bytes");
  Incoming other(Type::Hello);
  check_fails(check_welcome(other.look()), GPULOAN_ERR_PROTOCOL, "HELLO came where WELCOME was due");
}

TEST_CASE("REFUSED becomes the error that it carries") {
  Incoming in(Type::Refused);
  in.record.notice.status = GPULOAN_ERR_KEY;
  in.text = "the key was used before";
  check_fails(check_welcome(in.look()), GPULOAN_ERR_KEY, "refused by the exporter: the key was used before");
  for (const std::int32_t status : {0, 1, -100, -1000, INT32_MIN, INT32_MAX, std::int32_t{GPULOAN_ERR_INVALID},
                                    std::int32_t{GPULOAN_ERR_STATE}, std::int32_t{GPULOAN_ERR_FORKED}}) { // no error, or none of a peer's
    in.record.notice.status = status;
    check_fails(check_welcome(in.look()), GPULOAN_ERR_PROTOCOL, std::to_string(status));
  }
}

TEST_CASE("a peer's text is made fit for a log") {
  Incoming in(Type::Refused);
  in.text = std::string("two\nlines\x1b[31m\x7f and a NUL") + '\0' + "end";
  CHECK(readable_text(in.look()) == "two?lines?[31m? and a NUL?end");
  in.text = std::string(4096, 'x');
  CHECK(readable_text(in.look()) == std::string(GPULOAN_TEXT_MAX - 1, 'x'));
  in.text = "\xC3\xA9";
  CHECK(readable_text(in.look()) == "\xC3\xA9"); // other bytes pass
}

TEST_CASE("the boot id is that of this host, and the same each time") {
  const DescriptorGuard guard;
  const auto first = read_boot_id();
  const auto second = read_boot_id();
  REQUIRE_MESSAGE(first.has_value(), first.error().text);
  REQUIRE(second.has_value());
  CHECK(*first == *second);
  CHECK(*first != BootId{});
}
