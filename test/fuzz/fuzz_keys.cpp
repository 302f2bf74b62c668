// SPDX-License-Identifier: MIT
//
// A key as text: what gpuloan_key_parse takes, it gives back the same in the one spelling of gpuloan_key_format; and the
// command's way to read one from an inherited descriptor ends with the same key or with a Failure (key), and leaves nothing
// open.
#include "fuzz.hpp"

#include <tools/keys.hpp>

#include <fcntl.h>
#include <optional>
#include <unistd.h>

using namespace gpuloan;

namespace {

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// 64 digits in lower case, or nothing.
std::optional<std::string> digits_of(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  if (text.size() != 64) return std::nullopt;
  std::string digits(text);
  for (char& c : digits) {
    if (c >= 'A' && c <= 'F') c = static_cast<char>(c - 'A' + 'a');
    if ((c < '0' || c > '9') && (c < 'a' || c > 'f')) return std::nullopt;
  }
  return digits;
}

std::string longest_digits(const std::string& text) {
  std::string longest, run;
  for (const char c : text) {
    const bool digit = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
    run = digit ? run + c : "";
    if (run.size() > longest.size()) longest = run;
  }
  return longest;
}

void check_c(const std::string& text) {
  const std::string seen = text.c_str(); // up to a zero byte
  const auto expected = digits_of(seen);
  gpuloan_key key;
  std::memset(&key, 0xA5, sizeof key);
  const gpuloan_key before = key;
  const gpuloan_status status = gpuloan_key_parse(seen.c_str(), &key);
  FUZZ_REQUIRE(status == (expected ? GPULOAN_OK : GPULOAN_ERR_INVALID));
  if (expected) FUZZ_REQUIRE(format_key(key) == *expected);
  else FUZZ_REQUIRE(std::memcmp(&key, &before, sizeof key) == 0); // outputs are written on success only
}

// A whole line that came through a pipe.
void check_pipe(const std::string& text) {
  if (text.size() > 256) return; // longer ones are cut somewhere
  int ends[2] = {-1, -1};
  FUZZ_REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  FUZZ_REQUIRE(::write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  ::close(ends[1]);
  const auto expected = digits_of(std::string_view(text).substr(0, text.find('\n')));
  const tool::Deadline deadline(10'000);
  tool::KeyOptions options;
  options.fd = ends[0];
  try {
    const tool::KeySource source(options, "socket", deadline);
    const auto key = source.read();
    FUZZ_REQUIRE(key.has_value() && !source.is_file());
    FUZZ_REQUIRE(expected.has_value() && format_key(*key) == *expected);
  } catch (const tool::Failure& failure) {
    FUZZ_REQUIRE(!expected.has_value());
    FUZZ_REQUIRE(failure.code() == tool::ExitKeyRefused);
    const std::string digits = longest_digits(text);
    FUZZ_REQUIRE(digits.size() < 16 || std::string_view(failure.what()).find(digits) == std::string_view::npos); // it may be a key's
  }
  ::close(ends[0]);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::DescriptorGuard guard;
  const std::string text = fuzz::Input(data, size).text(size);
  check_c(text);
  check_pipe(text);
  return 0;
}
