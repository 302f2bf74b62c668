// SPDX-License-Identifier: MIT
//
// Sizes and offsets of all wire structs, type numbers and constants against frozen literals; and that the fields of each
// struct cover it without a gap, so that no padding, and nothing uninitialised in it, crosses the wire.
#include "support.hpp"

#include "wire_table.hpp"

#include <channel/rules.hpp>

#include <map>

using namespace gpuloan;
using namespace gpuloan::channel;

#define GPULOAN_CHECK_FIELD(structure, field, offset, bytes)                                                           \
  static_assert(offsetof(structure, field) == (offset) && sizeof(structure::field) == (bytes), #structure "." #field);
GPULOAN_WIRE_FIELDS(GPULOAN_CHECK_FIELD)

#define GPULOAN_CHECK_BODY(structure)                                                                                  \
  static_assert(sizeof(structure) == 112 && alignof(structure) <= 8 && std::is_trivially_copyable_v<structure>, #structure);
GPULOAN_WIRE_BODIES(GPULOAN_CHECK_BODY)

static_assert(sizeof(Header) == 16 && sizeof(DeviceEntry) == 24 && sizeof(Record) == 128);
static_assert(offsetof(Record, header) == 0 && offsetof(Record, hello) == 16 && offsetof(Record, export_) == 16);
static_assert(kMagic == 0x4E4F4C47 && kVersionMin == 1 && kVersionMax == 1 && kTypeMax == 28);
static_assert(kRecordBytes == 128 && kTailMax == 4096 && kMaxFds == 64 && kMaxDevices == 64);
static_assert(ExportKeepOpen == 1 && ExportReady == 2 && ExportCanary == 4);
static_assert(static_cast<int>(ChunkKind::Vmm) == 1 && static_cast<int>(ChunkKind::HostPages) == 2);
static_assert(static_cast<int>(ForeignKind::Legacy) == 1 && static_cast<int>(ForeignKind::Vmm) == 2 &&
              static_cast<int>(ForeignKind::Pool) == 3);
static_assert(sizeof(gpuloan_key) == sizeof(Hello::key));

namespace {

struct Field {
  const char* structure;
  const char* name;
  std::size_t offset;
  std::size_t bytes;
};
const Field kFields[] = {
#define GPULOAN_FIELD(structure, field, offset, bytes) {#structure, #field, offset, bytes},
    GPULOAN_WIRE_FIELDS(GPULOAN_FIELD)};

struct TypeRow {
  std::uint16_t number;
  const char* name;
  std::uint16_t fds;
  std::uint16_t tail;
};
const TypeRow kTypes[] = {
#define GPULOAN_TYPE(type, number, text, body, fds, tail) {number, text, fds, tail},
    GPULOAN_WIRE_TYPES(GPULOAN_TYPE)};

#define GPULOAN_CHECK_NUMBER(type, number, text, body, fds, tail) static_assert(static_cast<int>(Type::type) == (number));
GPULOAN_WIRE_TYPES(GPULOAN_CHECK_NUMBER)

} // namespace

TEST_CASE("the fields of each struct cover it without a gap") {
  std::map<std::string, std::size_t> end; // of the fields seen so far
  for (const Field& field : kFields) {
    CAPTURE(field.structure);
    CAPTURE(field.name);
    CHECK(end[field.structure] == field.offset);
    end[field.structure] += field.bytes;
  }
  for (const auto& [structure, bytes] : end) {
    CAPTURE(structure);
    CHECK(bytes == (structure == "Header" ? 16U : structure == "DeviceEntry" ? 24U : 112U));
  }
  CHECK(end.size() == 22);
}

TEST_CASE("the magic is the letters GLON in memory order") {
  const Record record = make_record(Type::Bye);
  CHECK(std::memcmp(&record, "GLON", 4) == 0);
}

TEST_CASE("names and rules of the types") {
  CHECK(std::size(kTypes) == kTypeMax);
  for (const TypeRow& row : kTypes) {
    CAPTURE(row.name);
    CHECK(std::string_view(rule_of(row.number)->name) == row.name);
    CHECK(rule_of(row.number)->fd_count == row.fds);
    CHECK(rule_of(row.number)->tail_max == row.tail);
  }
}
