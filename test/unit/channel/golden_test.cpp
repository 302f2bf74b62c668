// SPDX-License-Identifier: MIT
//
// goldens/: the exact bytes of one record of each type, one field a line. Encoding the values that stand there gives these
// bytes, and decoding these bytes gives the values, so a change of the wire shows as a file that changes. That is a new
// protocol version (docs/protocol.md, Versions).
//
// The files were written once by this program: channel_golden_test --no-skip --test-case="write the goldens". A byte of a field
// whose value does not matter is its offset in the record.
#include "support.hpp"

#include "wire_table.hpp"

#include <channel/handshake.hpp>
#include <channel/rules.hpp>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

using namespace gpuloan;
using namespace gpuloan::channel;

namespace {

// By the name of the member, so that nothing here knows where it lies.
template <typename Value>
std::uint64_t read_member(const Value& member) {
  if constexpr (std::is_integral_v<Value>) return static_cast<std::make_unsigned_t<Value>>(member);
  else return 0;
}
template <typename Value>
void write_member(Value& member, std::uint64_t value, std::span<const std::byte> bytes) {
  if constexpr (std::is_integral_v<Value>) {
    member = static_cast<Value>(value);
  } else {
    REQUIRE(bytes.size() == sizeof member);
    std::memcpy(&member, bytes.data(), sizeof member);
  }
}

struct Field {
  std::string_view structure, name;
  std::size_t offset, bytes;
  bool number;
  std::uint64_t (*read)(const void* structure);
  void (*write)(void* structure, std::uint64_t value, std::span<const std::byte> bytes);
};
const Field kFields[] = {
#define GPULOAN_FIELD(structure, field, offset, bytes)                                                                 \
  {#structure, #field, offset, bytes, std::is_integral_v<decltype(structure::field)>,                                  \
   [](const void* at) { return read_member(static_cast<const structure*>(at)->field); },                               \
   [](void* at, std::uint64_t value, std::span<const std::byte> data) { write_member(static_cast<structure*>(at)->field, value, data); }},
    GPULOAN_WIRE_FIELDS(GPULOAN_FIELD)};

struct TypeRow {
  Type type;
  unsigned number;
  std::string name;
  std::string_view body;
  std::size_t fds, tail_max;
};
const TypeRow kTypes[] = {
#define GPULOAN_TYPE(type, number, text, body, fds, tail) {Type::type, number, text, #body, fds, tail},
    GPULOAN_WIRE_TYPES(GPULOAN_TYPE)};

std::vector<Field> fields_of(std::string_view structure) {
  std::vector<Field> out;
  std::copy_if(std::begin(kFields), std::end(kFields), std::back_inserter(out), [&](const Field& field) { return field.structure == structure; });
  REQUIRE_FALSE(out.empty());
  return out;
}

std::string path_of(const TypeRow& row) {
  char number[8] = {};
  std::snprintf(number, sizeof number, "%02u", row.number);
  return std::string(GPULOAN_GOLDENS) + "/" + number + "-" + row.name + ".txt";
}

// ---- The files ----------------------------------------------------------------------------------------------------

struct Line {
  std::size_t offset = 0;
  std::vector<std::byte> bytes;
  std::string name; // "header.type", "loan", "tail"
  std::uint64_t value = 0;
};

// "  16 | 10 11 12 13 | loan | 0x13121110"
Line parse_line(const std::string& text) {
  std::vector<std::string> columns;
  std::istringstream in(text);
  for (std::string column; std::getline(in, column, '|');) columns.push_back(column);
  if (columns.size() == 3) columns.emplace_back(); // no number
  REQUIRE_MESSAGE(columns.size() == 4, text);
  Line line;
  line.offset = std::stoul(columns[0]);
  std::istringstream digits(columns[1]);
  for (std::string byte; digits >> byte;) line.bytes.push_back(static_cast<std::byte>(std::stoul(byte, nullptr, 16)));
  std::istringstream(columns[2]) >> line.name;
  line.value = columns[3].find("0x") == std::string::npos ? 0 : std::stoull(columns[3], nullptr, 16);
  return line;
}

std::vector<Line> read_golden(const TypeRow& row) {
  std::ifstream file(path_of(row));
  REQUIRE_MESSAGE(file.good(), path_of(row));
  std::vector<Line> lines;
  for (std::string text; std::getline(file, text);) {
    if (!text.empty() && text[0] != '#') lines.push_back(parse_line(text));
  }
  return lines;
}

std::vector<std::byte> bytes_of(const std::vector<Line>& lines) {
  std::vector<std::byte> out;
  for (const Line& line : lines) {
    CHECK(line.offset == out.size());
    out.insert(out.end(), line.bytes.begin(), line.bytes.end());
  }
  return out;
}

Letter letter_of(const std::vector<std::byte>& bytes, std::size_t fds) {
  Letter letter;
  REQUIRE(bytes.size() <= letter.data.size());
  std::copy(bytes.begin(), bytes.end(), letter.data.begin());
  letter.data_bytes = bytes.size();
  if (fds != 0) letter.add_fds(fds);
  return letter;
}

std::vector<std::byte> tail_of(const std::vector<Line>& lines) {
  return lines.back().name == "tail" ? lines.back().bytes : std::vector<std::byte>();
}

// The record with the values of the file: header by the library, body from the lines.
Record record_of(const TypeRow& row, const std::vector<Line>& lines) {
  Record record = make_record(row.type);
  std::size_t at = fields_of("Header").size();
  for (const Field& field : fields_of(row.body)) {
    REQUIRE(at < lines.size());
    CHECK(lines[at].name == field.name);
    field.write(&record.hello, lines[at].value, lines[at].bytes); // all bodies begin there
    ++at;
  }
  return record;
}

void check_values(const Record& record, const TypeRow& row, const std::vector<Line>& lines) {
  std::size_t at = 0;
  for (const std::string_view structure : {std::string_view("Header"), row.body}) {
    const void* place = structure == "Header" ? static_cast<const void*>(&record.header) : &record.hello;
    for (const Field& field : fields_of(structure)) {
      REQUIRE(at < lines.size());
      CAPTURE(lines[at].name);
      CHECK(lines[at].name == (structure == "Header" ? "header." : "") + std::string(field.name));
      CHECK(lines[at].bytes.size() == field.bytes);
      if (field.number) CHECK(field.read(place) == lines[at].value);
      else CHECK(std::memcmp(static_cast<const std::byte*>(place) + field.offset, lines[at].bytes.data(), field.bytes) == 0);
      ++at;
    }
  }
  CHECK(lines.size() - at == (row.tail_max == 0 ? 0U : 1U));
}

// ---- Writing them -------------------------------------------------------------------------------------------------

// Where a record would make no sense with any value.
struct Sense {
  std::string_view structure, name;
  std::uint64_t value;
};
constexpr Sense kSense[] = {
    {"Hello", "version_min", 1},  {"Hello", "version_max", 1},  {"Hello", "features", 1},       {"Hello", "device_count", 1}, {"Hello", "has_key", 1},
    {"Hello", "wants_device", 1}, {"Welcome", "version", 1},    {"Welcome", "features", 1},     {"Welcome", "device_count", 1}, {"Welcome", "slots", 16384},
};

std::uint64_t value_for(const Field& field) {
  const auto* sense = std::find_if(std::begin(kSense), std::end(kSense), [&](const Sense& row) { return row.structure == field.structure && row.name == field.name; });
  if (sense != std::end(kSense)) return sense->value;
  std::uint64_t value = 0;
  for (std::size_t at = field.bytes; at-- > 0;) value = value << 8 | (sizeof(Header) + field.offset + at);
  return value;
}

void write_line(std::ostream& out, std::size_t offset, std::span<const std::byte> bytes, const std::string& name, const std::uint64_t* value) {
  char text[32] = {};
  std::snprintf(text, sizeof text, "%4zu |", offset);
  out << text;
  for (const std::byte byte : bytes) {
    std::snprintf(text, sizeof text, " %02x", std::to_integer<unsigned>(byte));
    out << text;
  }
  out << " | " << name << " |";
  if (value != nullptr) {
    std::snprintf(text, sizeof text, " 0x%llx", static_cast<unsigned long long>(*value));
    out << text;
  }
  out << "\n";
}

void write_golden(const TypeRow& row) {
  Record record = make_record(row.type);
  for (const Field& field : fields_of(row.body)) {
    if (field.name.starts_with("reserved")) continue;
    std::vector<std::byte> bytes(field.bytes);
    for (std::size_t at = 0; at < bytes.size(); ++at) bytes[at] = static_cast<std::byte>(sizeof(Header) + field.offset + at);
    field.write(&record.hello, value_for(field), bytes);
  }
  std::vector<std::byte> tail(row.tail_max == 0 ? 0 : row.type == Type::Foreign ? 64 : sizeof(DeviceEntry));
  for (std::size_t at = 0; at < tail.size(); ++at) tail[at] = static_cast<std::byte>(kRecordBytes + at);
  const std::vector<std::byte> message = message_of(record, tail, row.fds);
  std::memcpy(&record, message.data(), sizeof record);
  std::ofstream out(path_of(row));
  REQUIRE(out.good());
  out << "# " << row.name << " (" << row.number << ") of protocol version 1, with " << row.fds << " descriptor(s): offset | bytes | field | value of a number\n";
  for (const std::string_view structure : {std::string_view("Header"), row.body}) {
    const bool header = structure == "Header";
    const void* place = header ? static_cast<const void*>(&record.header) : &record.hello;
    for (const Field& field : fields_of(structure)) {
      const std::size_t offset = (header ? 0 : sizeof(Header)) + field.offset;
      const std::uint64_t value = field.read(place);
      write_line(out, offset, std::span(message).subspan(offset, field.bytes), (header ? "header." : "") + std::string(field.name), field.number ? &value : nullptr);
    }
  }
  if (!tail.empty()) write_line(out, kRecordBytes, tail, "tail", nullptr);
}

} // namespace

TEST_CASE("write the goldens" * doctest::skip()) {
  for (const TypeRow& row : kTypes) write_golden(row);
}

TEST_CASE("one golden for each type of record, and no other") {
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(GPULOAN_GOLDENS)) {
    CAPTURE(entry.path().string());
    CHECK(std::any_of(std::begin(kTypes), std::end(kTypes), [&](const TypeRow& row) { return entry.path() == path_of(row); }));
    ++files;
  }
  CHECK(files == kTypeMax);
}

TEST_CASE("encoding the values of a golden gives its bytes") {
  for (const TypeRow& row : kTypes) {
    CAPTURE(row.name);
    const std::vector<Line> lines = read_golden(row);
    const std::vector<std::byte> bytes = bytes_of(lines);
    CHECK((message_of(record_of(row, lines), tail_of(lines), row.fds) == bytes));
    if (row.fds != 0) continue; // those are not bundled
    Bundle bundle;
    REQUIRE(bundle.add(record_of(row, lines), tail_of(lines)));
    CHECK(std::equal(bytes.begin(), bytes.end(), bundle.bytes().begin(), bundle.bytes().end()));
  }
}

TEST_CASE("decoding the bytes of a golden gives its values") {
  const DescriptorGuard guard;
  for (const TypeRow& row : kTypes) {
    CAPTURE(row.name);
    const std::vector<Line> lines = read_golden(row);
    const Letter letter = letter_of(bytes_of(lines), row.fds);
    const auto received = decode(letter.message());
    REQUIRE_MESSAGE(received.has_value(), received.error().text);
    CHECK(received->type() == row.type);
    CHECK(received->fds.size() == row.fds);
    CHECK(received->rest.empty());
    const std::vector<std::byte> tail = tail_of(lines);
    CHECK(std::equal(tail.begin(), tail.end(), received->tail.begin(), received->tail.end()));
    check_values(*received->record, row, lines);
  }
}

TEST_CASE("the goldens of the handshake are accepted") {
  const auto look = [](Type type, const auto& check) {
    const TypeRow& row = kTypes[static_cast<std::size_t>(type) - 1];
    const Letter letter = letter_of(bytes_of(read_golden(row)), row.fds);
    auto received = decode(letter.message());
    REQUIRE(received.has_value());
    check(*received);
  };
  look(Type::Hello, [](Received& hello) {
    hello.sender.known = true;
    hello.sender.uid = 1000;
    BootId boot;
    std::copy(std::begin(hello.record->hello.boot_id), std::end(hello.record->hello.boot_id), boot.begin());
    const auto info = check_hello(hello, 1000, boot);
    REQUIRE_MESSAGE(info.has_value(), info.error().text);
    CHECK(info->version == 1);
    CHECK(info->devices.at(0).uuid[15] == 128 + 15);
  });
  look(Type::Welcome, [](Received& welcome) {
    const auto info = check_welcome(welcome);
    REQUIRE_MESSAGE(info.has_value(), info.error().text);
    CHECK(info->slots == 16384);
  });
}
