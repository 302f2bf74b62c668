// SPDX-License-Identifier: MIT
//
// docs/protocol.md against the code: every type by number and name, every field by offset, size and name in the section
// of its record, every limit. GPULOAN_PROTOCOL_MD in the environment names another file than the one built in.
#include "support.hpp"

#include "wire_table.hpp"

#include <channel/handshake.hpp>
#include <channel/rules.hpp>

#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

using namespace gpuloan;
using namespace gpuloan::channel;

namespace {

const std::string& document() {
  static const std::string text = [] {
    const char* path = std::getenv("GPULOAN_PROTOCOL_MD");
    std::ifstream file(path != nullptr ? path : GPULOAN_PROTOCOL_MD);
    REQUIRE_MESSAGE(file.good(), "cannot read docs/protocol.md");
    std::ostringstream content;
    content << file.rdbuf();
    return content.str();
  }();
  return text;
}

// From the line `heading` to the next heading of the same or a higher level; empty when there is none.
std::string section(const std::string& heading) {
  const std::string& text = document();
  const std::size_t start = text.find("\n" + heading + "\n");
  if (start == std::string::npos) return {};
  const std::size_t level = heading.find(' ');
  std::size_t end = start + heading.size() + 1;
  for (;;) {
    end = text.find("\n#", end);
    if (end == std::string::npos) return text.substr(start);
    const std::size_t hashes = text.find_first_not_of('#', end + 1) - end - 1;
    if (hashes <= level) return text.substr(start, end - start);
    ++end;
  }
}

bool mentions(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string heading_of(const char* name, int number) { return std::string("### ") + name + " (" + std::to_string(number) + ")"; }

struct Field {
  const char* structure;
  const char* name;
  std::size_t offset;
  std::size_t bytes;
};
const Field kFields[] = {
#define GPULOAN_FIELD(structure, field, offset, bytes) {#structure, #field, offsetof(structure, field), sizeof(structure::field)},
    GPULOAN_WIRE_FIELDS(GPULOAN_FIELD)};

struct TypeRow {
  int number;
  const char* name;
  const char* body;
};
const TypeRow kTypes[] = {
#define GPULOAN_TYPE(type, number, text, body, fds, tail) {static_cast<int>(Type::type), text, #body},
    GPULOAN_WIRE_TYPES(GPULOAN_TYPE)};

// Where a struct's table stands: its own section, or that of the first type that has it as body. Offsets in bodies count
// from the start of the record.
struct Place {
  std::string heading;
  std::size_t base;
};

std::map<std::string, Place> places() {
  std::map<std::string, Place> out;
  out["Header"] = {"### Header", 0};
  out["DeviceEntry"] = {"### Device entry", 0};
  for (const TypeRow& row : kTypes) out.try_emplace(row.body, Place{heading_of(row.name, row.number), sizeof(Header)});
  return out;
}

} // namespace

TEST_CASE("every type has a section with its number, its descriptors and its tail, and a row in the overview") {
  const std::string overview = section("## Overview");
  for (const TypeRow& row : kTypes) {
    CAPTURE(row.name);
    const TypeRule& rule = *rule_of(static_cast<std::uint16_t>(row.number));
    const std::string part = section(heading_of(row.name, row.number));
    CHECK_FALSE(part.empty());
    CHECK(mentions(part, "Sent by: "));
    CHECK(mentions(part, rule.fd_count == 0 ? "Descriptors: none." : "Descriptors: 1,"));
    const std::string tail_max = std::to_string(rule.tail_max);
    CHECK(mentions(part, rule.tail_max == 0 ? "Tail: none." : "Tail: at most " + tail_max + " bytes"));
    CHECK(mentions(overview, "| " + std::to_string(row.number) + " | " + row.name + " | "));
    CHECK(mentions(overview, " | " + std::to_string(rule.fd_count) + " | " + tail_max + " | "));
  }
}

TEST_CASE("every field stands in its record's table with its offset and size") {
  const auto where = places();
  for (const Field& field : kFields) {
    const Place& place = where.at(field.structure);
    const std::string row = "| " + std::to_string(place.base + field.offset) + " | " + std::to_string(field.bytes) +
                            " | `" + field.name + "` | ";
    CAPTURE(place.heading);
    CAPTURE(row);
    CHECK(mentions(section(place.heading), row));
  }
}

TEST_CASE("every struct has a bit diagram") {
  for (const auto& [structure, place] : places()) {
    CAPTURE(structure);
    CHECK(mentions(section(place.heading), "+-+-+-+-+-+-+-+-"));
  }
}

TEST_CASE("limits and constants") {
  const std::string limits = section("## Limits");
  const std::pair<const char*, std::size_t> rows[] = {
      {"bytes of a record without its tail", kRecordBytes},
      {"bytes of a tail", kTailMax},
      {"bytes of a tail that lists devices", kMaxDevices * sizeof(DeviceEntry)},
      {"descriptors looked at per message", kMaxFds},
      {"devices in HELLO and WELCOME", kMaxDevices},
      {"keys that are out and not spent", KeyRing::kMaxKeys},
      {"bytes of a sentence that are shown", GPULOAN_TEXT_MAX - 1},
  };
  for (const auto& [name, value] : rows) {
    CAPTURE(name);
    CHECK(mentions(limits, std::string("| ") + name + " | " + std::to_string(value) + " |"));
  }
  CHECK(mentions(document(), "0x4E4F4C47"));
}

TEST_CASE("the handshake's records stand in their order") {
  const std::string handshake = section("## Handshake");
  std::size_t at = 0;
  for (const char* name : {"HELLO", "WELCOME", "PAGES", "PAGES_MAPPED", "PAGES_SEALED", "PAGES_CHECKED"}) {
    CAPTURE(name);
    const std::size_t next = handshake.find(std::string(name) + "  ", at);
    REQUIRE(next != std::string::npos);
    at = next;
  }
}
