// SPDX-License-Identifier: MIT
//
// Versions, the log, keys as text.
#include <abi/abi.hpp>

#include <base/log.hpp>

#include <cctype>

extern "C" {

#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)
const char *gpuloan_version_text(void) {
  return TEXT(GPULOAN_VERSION_MAJOR) "." TEXT(GPULOAN_VERSION_MINOR) "." TEXT(GPULOAN_VERSION_PATCH);
}

void gpuloan_log_set(gpuloan_log_function function, void *user, gpuloan_log_level level) { gpuloan::log_set(function, user, level); }

void gpuloan_key_format(const gpuloan_key *key, char out_text[GPULOAN_KEY_TEXT_BYTES]) {
  static constexpr char kDigits[] = "0123456789abcdef";
  if (key == nullptr || out_text == nullptr) return;
  for (std::size_t index = 0; index < GPULOAN_KEY_BYTES; ++index) {
    out_text[2 * index] = kDigits[key->bytes[index] >> 4];
    out_text[2 * index + 1] = kDigits[key->bytes[index] & 15];
  }
  out_text[2 * GPULOAN_KEY_BYTES] = '\0';
}

gpuloan_status gpuloan_key_parse(const char *text, gpuloan_key *out_key) {
  return gpuloan::abi::guard([&]() -> gpuloan::Result<void> {
    if (text == nullptr || out_key == nullptr) return gpuloan::fail(GPULOAN_ERR_INVALID, "an argument is NULL");
    std::string_view digits(text);
    const auto space = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
    while (!digits.empty() && space(digits.front())) digits.remove_prefix(1);
    while (!digits.empty() && space(digits.back())) digits.remove_suffix(1);
    gpuloan_key key = {};
    if (digits.size() != 2 * sizeof key.bytes) return gpuloan::fail(GPULOAN_ERR_INVALID, "a key has 64 hexadecimal digits, this has " + std::to_string(digits.size()) + " characters");
    for (std::size_t index = 0; index < digits.size(); ++index) {
      const char c = digits[index];
      const bool decimal = c >= '0' && c <= '9';
      const bool letter = (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
      if (!decimal && !letter) return gpuloan::fail(GPULOAN_ERR_INVALID, "a key has only hexadecimal digits");
      const int value = decimal ? c - '0' : (c | 0x20) - 'a' + 10;
      key.bytes[index / 2] = static_cast<unsigned char>(key.bytes[index / 2] << 4 | value);
    }
    *out_key = key;
    return {};
  });
}

} // extern "C"
