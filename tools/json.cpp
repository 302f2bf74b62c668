// SPDX-License-Identifier: MIT
#include "json.hpp"

#include <cassert>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace gpuloan::tool {
namespace {

// Bytes of the well-formed UTF-8 sequence at the start of `text`; 0 when there is none. Overlong forms, surrogates and
// values above U+10FFFF are not well-formed.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t index) {
    return index < text.size() ? static_cast<unsigned char>(text[index]) : 0U;
  };
  const auto tail = [&](std::size_t index) { return (byte(index) & 0xC0U) == 0x80U; };
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return tail(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F)) return 0;
    return tail(1) && tail(2) ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    if ((first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F)) return 0;
    return tail(1) && tail(2) && tail(3) ? 4 : 0;
  }
  return 0;
}

} // namespace

void Json::separate() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (levels_.empty()) return;
  if (!levels_.back().empty) out_ += ',';
  levels_.back().empty = false;
  out_ += '\n';
  out_.append(levels_.size() * 2, ' ');
}

Json& Json::open(char opener) {
  separate();
  out_ += opener;
  levels_.push_back({opener == '{' ? '}' : ']'});
  return *this;
}

Json& Json::end() {
  assert(!levels_.empty() && !after_key_);
  const Level level = levels_.back();
  levels_.pop_back();
  if (!level.empty) {
    out_ += '\n';
    out_.append(levels_.size() * 2, ' ');
  }
  out_ += level.closer;
  return *this;
}

Json& Json::key(std::string_view name) {
  assert(!levels_.empty() && levels_.back().closer == '}' && !after_key_);
  separate();
  quote(name);
  out_ += ": ";
  after_key_ = true;
  return *this;
}

Json& Json::scalar(std::string_view text) {
  separate();
  out_ += text;
  return *this;
}

Json& Json::value(std::string_view text) {
  separate();
  quote(text);
  return *this;
}

Json& Json::value(double number) {
  if (!std::isfinite(number)) return null();
  char buffer[64];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, number);
  return scalar(std::string_view(buffer, static_cast<std::size_t>(end - buffer)));
}

void Json::quote(std::string_view text) {
  out_ += '"';
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text[0]);
    const std::size_t length = utf8_length(text);
    if (first == '"' || first == '\\') {
      out_ += '\\';
      out_ += text[0];
    } else if (first < 0x20 || first == 0x7F) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", first);
      out_ += escape;
    } else if (length == 0) {
      out_ += "\xEF\xBF\xBD"; // U+FFFD
    } else {
      out_ += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  out_ += '"';
}

std::string Json::text() const {
  assert(levels_.empty());
  return out_ + "\n";
}

} // namespace gpuloan::tool
