// SPDX-License-Identifier: MIT
//
// The parts of the command that need no library: option parsing, JSON, SHA-256, the fill pattern, exit codes.
#include <doctest/doctest.h>

#include "exit_codes.hpp"
#include "files.hpp"
#include "floor_rows.hpp"
#include "json.hpp"
#include "options.hpp"
#include "output.hpp"
#include "pattern.hpp"
#include "sha256.hpp"
#include "wait.hpp"

#include <set>
#include <string>
#include <thread>
#include <vector>

using namespace gpuloan::tool;

namespace {

std::string usage_error(auto&& action) {
  try {
    action();
  } catch (const Failure& failure) {
    CHECK(failure.code() == ExitUsage);
    return failure.what();
  }
  return "";
}

struct Parsed {
  bool flag = false;
  std::string value, positional;
  bool go_on = false;
};

Parsed parse(std::vector<std::string> arguments) {
  Parsed parsed;
  Parser parser("test [FILE]", "about");
  parser.flag("flag", "a flag", parsed.flag);
  parser.value("value", "V", "a value", [&](const std::string& text) { parsed.value = text; });
  parser.value("secret", "V", "hidden", [](const std::string&) {});
  parser.hide_last();
  parser.positional("FILE", [&](const std::string& text) { parsed.positional = text; });
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  parsed.go_on = parser.parse(pointers);
  return parsed;
}

} // namespace

TEST_CASE("options are taken in both spellings") {
  CHECK(parse({"--flag", "--value", "a b"}).value == "a b");
  CHECK(parse({"--value=x=y"}).value == "x=y");
  CHECK(parse({"--value="}).value.empty());
  CHECK(parse({"file", "--flag"}).flag);
  CHECK(parse({"--", "--flag"}).positional == "--flag");
  CHECK(parse({"-"}).positional == "-");
}

TEST_CASE("a wrong option is named, and the nearest one suggested") {
  CHECK(usage_error([] { parse({"--flg"}); }).find("unknown option '--flg'; did you mean '--flag'?") == 0);
  CHECK(usage_error([] { parse({"--vale=3"}); }).find("did you mean '--value'?") != std::string::npos);
  CHECK(usage_error([] { parse({"--secre"}); }).find("did you mean") == std::string::npos);
  CHECK(usage_error([] { parse({"--zzzzzzzz"}); }).find("did you mean") == std::string::npos);
  CHECK(usage_error([] { parse({"-v"}); }).find("unknown option '-v'") == 0);
  CHECK(usage_error([] { parse({"--value"}); }) == "option '--value' needs a value: V");
  CHECK(usage_error([] { parse({"--flag=1"}); }) == "option '--flag' takes no value");
}

TEST_CASE("sizes") {
  CHECK(parse_size("0") == 0);
  CHECK(parse_size("17B") == 17);
  CHECK(parse_size("64KiB") == 65536);
  CHECK(parse_size("1M") == 1U << 20U);
  CHECK(parse_size("100GiB") == std::uint64_t{100} << 30U);
  CHECK(parse_size("18446744073709551615") == UINT64_MAX);
  for (const char* text : {"", "-1", "1.5MiB", "1 MiB", "1mib", "MiB", "18446744073709551616", "16777216TiB", "0x10"}) {
    CAPTURE(text);
    CHECK(usage_error([&] { static_cast<void>(parse_size(text)); }).find("is not a size") != std::string::npos);
  }
}

TEST_CASE("times and numbers") {
  CHECK(parse_seconds("5") == 5000);
  CHECK(parse_seconds("0.25") == 250);
  CHECK(parse_seconds("0.0001") == 1);
  for (const char* text : {"", "0", "-1", "nan", "inf", "1e3", "5s", "1000001"}) {
    CAPTURE(text);
    CHECK(!usage_error([&] { static_cast<void>(parse_seconds(text)); }).empty());
  }
  CHECK(parse_number("7", 1, 7) == 7);
  CHECK(!usage_error([] { static_cast<void>(parse_number("8", 1, 7)); }).empty());
}

TEST_CASE("a timeout names the whole time, not the last slice") {
  const Deadline deadline(150);
  int slices = 0;
  try {
    wait_in_slices(deadline, [&](gpuloan::Milliseconds slice) {
      ++slices;
      std::this_thread::sleep_for(slice);
      throw gpuloan::StatusError(GPULOAN_ERR_TIMEOUT, "not within " + std::to_string(slice.count()) + " ms");
    }, "it was not ready");
    FAIL("it came to an end");
  } catch (const gpuloan::StatusError& error) {
    CHECK(error.status() == GPULOAN_ERR_TIMEOUT);
    CHECK(std::string(error.what()) == "it was not ready within 0.15 s");
  }
  CHECK(slices >= 2);
}

TEST_CASE("JSON nests, separates and escapes") {
  Json json;
  json.begin_object().member("text", "a\"b\\\n\x01").member("bad", "\xFF\xC3\xA9\xED\xA0\x80").member("no", false);
  json.key("list").begin_array().value(std::uint64_t{UINT64_MAX}).value(-1).value(0.5).value(1.0 / 0.0).end();
  json.key("empty").begin_object().end().end();
  const std::string expected =
      "{\n"
      "  \"text\": \"a\\\"b\\\\\\u000a\\u0001\",\n"
      "  \"bad\": \"\xEF\xBF\xBD\xC3\xA9\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\",\n"
      "  \"no\": false,\n"
      "  \"list\": [\n    18446744073709551615,\n    -1,\n    0.5,\n    null\n  ],\n"
      "  \"empty\": {}\n"
      "}\n";
  CHECK(json.text() == expected);
}

TEST_CASE("SHA-256 of the standard's examples") {
  CHECK(Sha256().finish() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  Sha256 hash;
  for (const char letter : {'a', 'b', 'c'}) hash.update(std::as_bytes(std::span(&letter, 1)));
  CHECK(hash.finish() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST_CASE("the pattern notices every changed byte") {
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{4097}, std::uint64_t{5'000'003}}) {
    const Pattern pattern(bytes, 7);
    std::vector<std::byte> content(bytes);
    for (std::uint64_t offset = 0; offset < bytes; ++offset) content[offset] = pattern.at(offset);
    CHECK(pattern.matches(0, content));
    CHECK(pattern.matches(bytes / 2, std::span(content).subspan(bytes / 2)));
    for (const std::uint64_t offset : {std::uint64_t{0}, bytes / 3, bytes - 1}) {
      content[offset] ^= std::byte{1};
      CHECK(!pattern.matches(0, content));
      content[offset] ^= std::byte{1};
    }
  }
  CHECK(Pattern(8192, 1).word(0) != Pattern(8192, 2).word(0));
  CHECK(Pattern(8192, 1).word(0) != Pattern(8192, 1).word(1));
}

TEST_CASE("pseudo-random bytes do not depend on how they are read") {
  const auto source = random_bytes(1000, 3);
  std::vector<std::byte> whole(1000), pieces(1000);
  source->read(0, whole);
  for (std::size_t offset = 0; offset < 1000; offset += 7)
    source->read(offset, std::span(pieces).subspan(offset, std::min<std::size_t>(7, 1000 - offset)));
  CHECK(whole == pieces);
}

TEST_CASE("every exit code is in the table once, every status has a code") {
  std::set<int> codes;
  std::set<std::string> names;
  for (const ExitRow& row : kExitRows) {
    CHECK(codes.insert(row.code).second);
    CHECK(names.insert(row.name).second);
  }
  for (int status = 0; status >= -100; --status)
    CHECK(codes.count(exit_code(static_cast<gpuloan_status>(status))) == 1);
  CHECK(std::string(exit_name(ExitInterrupted + 15)) == "interrupted");
  const std::set<int> own = {exit_code(GPULOAN_ERR_KEY),     exit_code(GPULOAN_ERR_UID),
                             exit_code(GPULOAN_ERR_CONNECT), exit_code(GPULOAN_ERR_ADDRESS_IN_USE),
                             exit_code(GPULOAN_ERR_TIMEOUT), ExitFile};
  CHECK(own.size() == 6);
}

TEST_CASE("sizes as text") {
  CHECK(size_text(0) == "0 B");
  CHECK(size_text(1023) == "1023 B");
  CHECK(size_text(1U << 20U) == "1.0 MiB");
  CHECK(size_text(UINT64_MAX) == "16.0 EiB");
  CHECK(size_text_long(1) == "1 byte");
  CHECK(version_text(12040) == "12.4");
}

TEST_CASE("the reason of one way among several") {
  const std::vector<std::string> names = {"vmm", "vmm for others", "pool", "ipc"};
  const std::string text = "vmm: one: two; three; vmm for others: four; ipc: the rung pool: five";
  CHECK(piece_of(text, "vmm", names) == "vmm: one: two; three");
  CHECK(piece_of(text, "vmm for others", names) == "vmm for others: four");
  CHECK(piece_of(text, "ipc", names) == "ipc: the rung pool: five");
  CHECK(piece_of(text, "pool", names).empty()); // inside another's words
  CHECK(piece_of("", "vmm", names).empty());
}

TEST_CASE("a device's reasons for the floors that are asked about") {
  gpuloan_device_info device = {};
  device.floors = GPULOAN_FLOOR_VMM;
  std::string("memops: a: b; pools: c: d; ipc-me").copy(device.floor_reason, sizeof device.floor_reason - 1);
  CHECK(missing_text(device, GPULOAN_FLOOR_VMM).empty());
  CHECK(missing_text(device, GPULOAN_FLOOR_POOLS) == "pools: c: d; ipc-me");
  CHECK(missing_text(device, GPULOAN_FLOOR_MEMOPS | GPULOAN_FLOOR_VMM) == "memops: a: b");
  CHECK(missing_text(device, GPULOAN_FLOOR_IPC_MEMORY) == "ipc-memory: missing");
}

TEST_CASE("a time limit is written as it was given") {
  CHECK(Deadline(60'000).text() == "60 s");
  CHECK(Deadline(250).text() == "0.25 s");
  CHECK(Deadline(1'500).text() == "1.5 s");
  CHECK(Deadline(10'001).text() == "10.001 s");
}
