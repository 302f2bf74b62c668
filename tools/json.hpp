// SPDX-License-Identifier: MIT
//
// A JSON writer that cannot write anything malformed: it keeps the nesting, puts the commas, escapes every string and
// replaces what is not UTF-8. Numbers are written as such at full 64 bits.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gpuloan::tool {

class Json {
 public:
  Json& begin_object() { return open('{'); }
  Json& begin_array() { return open('['); }
  Json& end(); // of the innermost object or array
  Json& key(std::string_view name);

  Json& value(std::string_view text);
  Json& value(const char* text) { return value(std::string_view(text)); }
  Json& value(bool truth) { return scalar(truth ? "true" : "false"); }
  Json& value(std::int64_t number) { return scalar(std::to_string(number)); }
  Json& value(std::uint64_t number) { return scalar(std::to_string(number)); }
  Json& value(int number) { return value(std::int64_t{number}); }
  Json& value(unsigned number) { return value(std::uint64_t{number}); }
  Json& value(double number); // null when it is not finite
  Json& null() { return scalar("null"); }

  template <typename Value>
  Json& member(std::string_view name, const Value& content) {
    return key(name).value(content);
  }

  // The finished text with a final newline; every object and array has been ended.
  [[nodiscard]] std::string text() const;

 private:
  struct Level {
    char closer;
    bool empty = true;
  };
  Json& open(char opener);
  Json& scalar(std::string_view text);
  void separate();
  void quote(std::string_view text);

  std::string out_;
  std::vector<Level> levels_;
  bool after_key_ = false;
};

} // namespace gpuloan::tool
