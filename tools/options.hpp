// SPDX-License-Identifier: MIT
//
// A small command-line parser in the GNU style: --name VALUE, --name=VALUE, "--" ends the options. A name that is not
// known is an error that suggests the nearest one; nothing is abbreviated, so that names can be added later.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gpuloan::tool {

class Parser {
 public:
  using Set = std::function<void(const std::string&)>;

  // `synopsis` follows "gpuloan "; `about` is the paragraph below it in --help.
  Parser(std::string synopsis, std::string about) : synopsis_(std::move(synopsis)), about_(std::move(about)) {}

  void flag(const char* name, const char* help, bool& target);
  // `set` gets the text and throws Failure with the rest of a sentence that begins with the option's name.
  void value(const char* name, const char* value_name, std::string help, Set set);
  // Understood but not in --help: the inside of another subcommand.
  void hide_last() { options_.back().hidden = true; }
  void positional(const char* name, Set set) { positional_name_ = name, positional_ = std::move(set); }

  // False when --help was asked for and printed. Throws Failure (usage).
  [[nodiscard]] bool parse(std::span<char* const> arguments);
  // The names that occurred.
  [[nodiscard]] bool given(std::string_view name) const;

 private:
  struct Option {
    std::string name, value_name, help; // value_name is empty for a flag
    Set set;
    bool hidden = false, given = false;
  };
  [[nodiscard]] Option& find(const std::string& name);
  void parse_option(std::span<char* const> arguments, std::size_t& index);
  void print_help() const;

  std::string synopsis_, about_, positional_name_;
  std::vector<Option> options_;
  Set positional_;
};

// Each throws Failure (usage) with "is not …" for anything else; `text` is quoted in it.
[[nodiscard]] std::uint64_t parse_number(const std::string& text, std::uint64_t low, std::uint64_t high);
// Bytes, with an optional unit: B, K, KiB, M, MiB, G, GiB, T, TiB (all of 1024).
[[nodiscard]] std::uint64_t parse_size(const std::string& text);
// Seconds with an optional fraction, as milliseconds; at least one.
[[nodiscard]] std::uint32_t parse_seconds(const std::string& text);
struct Choice {
  const char* name;
  std::uint32_t value;
};
[[nodiscard]] std::uint32_t parse_choice(const std::string& text, std::span<const Choice> choices);

// The candidate with the fewest edits, or "" when none is near.
[[nodiscard]] std::string nearest(std::string_view word, std::span<const std::string> candidates);

} // namespace gpuloan::tool
