// SPDX-License-Identifier: MIT
//
// The command's sizes, seconds, numbers and choices: each text is taken or refused as a slow reading of the grammar in --help
// says, and means the same; a refusal is a usage error that quotes the text.
#include "fuzz.hpp"

#include <tools/exit_codes.hpp>
#include <tools/options.hpp>

#include <algorithm>
#include <cmath>
#include <string_view>

using namespace gpuloan;

namespace {

// A number, or a refusal.
struct Reading {
  bool taken = false;
  std::uint64_t value = 0;
  bool operator==(const Reading&) const = default;
};

Reading reading_of(const std::string& text, auto&& parse) {
  try {
    return {true, parse(text)};
  } catch (const tool::Failure& failure) {
    FUZZ_REQUIRE(failure.code() == tool::ExitUsage);
    FUZZ_REQUIRE(text.find('\0') != std::string::npos || std::string_view(failure.what()).find("'" + text + "'") != std::string_view::npos);
    return {};
  }
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// All digits, no sign, no space, no overflow.
Reading whole_number(std::string_view text) {
  if (text.empty()) return {};
  std::uint64_t value = 0;
  for (const char c : text) {
    if (!is_digit(c)) return {};
    const auto digit = static_cast<std::uint64_t>(c - '0');
    if (value > (UINT64_MAX - digit) / 10) return {};
    value = value * 10 + digit;
  }
  return {true, value};
}

Reading size_of(std::string_view text) {
  std::size_t digits = 0;
  while (digits < text.size() && is_digit(text[digits])) ++digits;
  Reading size = whole_number(text.substr(0, digits));
  const std::string_view unit = text.substr(digits), letters = "KMGT";
  if (!size.taken || unit.empty() || unit == "B") return size;
  const std::size_t power = letters.find(unit.front());
  if (power == std::string_view::npos || (unit.size() != 1 && unit.substr(1) != "iB")) return {};
  for (std::size_t i = 0; i <= power; ++i) {
    if (size.value > UINT64_MAX / 1024) return {};
    size.value *= 1024;
  }
  return size;
}

void check_seconds(const std::string& text) {
  const Reading milliseconds = reading_of(text, tool::parse_seconds);
  if (milliseconds.taken) FUZZ_REQUIRE(milliseconds.value >= 1 && milliseconds.value <= 1'000'000'000);
  const bool plain = std::all_of(text.begin(), text.end(), [](char c) { return is_digit(c) || c == '.'; }) &&
                     std::count(text.begin(), text.end(), '.') <= 1 && std::any_of(text.begin(), text.end(), is_digit);
  const double seconds = plain ? std::strtod(text.c_str(), nullptr) : 0;
  if (plain && (seconds == 0 || std::fpclassify(seconds) == FP_SUBNORMAL)) return; // too small to tell from 0, or 0
  FUZZ_REQUIRE(milliseconds.taken == (plain && seconds <= 1'000'000));
  if (milliseconds.taken) FUZZ_REQUIRE(std::abs(static_cast<double>(milliseconds.value) - std::max(1.0, seconds * 1000)) <= 1);
}

void check_choice(const std::string& text) {
  static constexpr tool::Choice kChoices[] = {{"auto", 0}, {"vmm", 1}, {"host", 7}};
  Reading expected;
  for (const tool::Choice& choice : kChoices) {
    if (text == choice.name) expected = {true, choice.value};
  }
  FUZZ_REQUIRE(reading_of(text, [](const std::string& word) { return tool::parse_choice(word, kChoices); }) == expected);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size > 2048) return 0;
  fuzz::Input input(data, size);
  const std::uint8_t limits = input.byte();
  const std::string text = input.text(size);
  const std::uint64_t low = limits & 0xFU;
  const std::uint64_t high = (limits & 0x10U) != 0 ? UINT64_MAX : std::uint64_t{limits} << (limits >> 5U);
  Reading number = whole_number(text);
  if (number.value < low || number.value > high) number = {};
  FUZZ_REQUIRE(reading_of(text, [&](const std::string& word) { return tool::parse_number(word, low, high); }) == number);
  FUZZ_REQUIRE(reading_of(text, tool::parse_size) == size_of(text));
  check_seconds(text);
  check_choice(text);
  return 0;
}
