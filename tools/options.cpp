// SPDX-License-Identifier: MIT
#include "options.hpp"

#include "exit_codes.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <numeric>

namespace gpuloan::tool {
namespace {

[[noreturn]] void usage(const std::string& text) { throw Failure(ExitUsage, text); }

// Levenshtein distance with one row.
std::size_t distance(std::string_view left, std::string_view right) {
  std::vector<std::size_t> row(right.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < left.size(); ++i) {
    std::size_t diagonal = row[0]++;
    for (std::size_t j = 0; j < right.size(); ++j) {
      const std::size_t changed = diagonal + (left[i] == right[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

std::string quoted(const std::string& text) { return "'" + text + "'"; }

} // namespace

std::string nearest(std::string_view word, std::span<const std::string> candidates) {
  std::string best;
  std::size_t least = std::max<std::size_t>(word.size() / 3, 1) + 1;
  for (const std::string& candidate : candidates) {
    const std::size_t edits = distance(word, candidate);
    if (edits < least) least = edits, best = candidate;
  }
  return best;
}

void Parser::flag(const char* name, const char* help, bool& target) {
  options_.push_back({name, "", help, [&target](const std::string&) { target = true; }});
}

void Parser::value(const char* name, const char* value_name, std::string help, Set set) {
  options_.push_back({name, value_name, std::move(help), std::move(set)});
}

bool Parser::given(std::string_view name) const {
  return std::any_of(options_.begin(), options_.end(),
                     [name](const Option& option) { return option.name == name && option.given; });
}

Parser::Option& Parser::find(const std::string& name) {
  std::vector<std::string> known = {"help"};
  for (Option& option : options_) {
    if (option.name == name) return option;
    if (!option.hidden) known.push_back(option.name);
  }
  const std::string near = nearest(name, known);
  usage("unknown option '--" + name + "'" + (near.empty() ? "." : "; did you mean '--" + near + "'?") +
        " See 'gpuloan " + synopsis_.substr(0, synopsis_.find(' ')) + " --help'.");
}

void Parser::parse_option(std::span<char* const> arguments, std::size_t& index) {
  std::string name = arguments[index] + 2;
  const std::size_t equals = name.find('=');
  const bool attached = equals != std::string::npos;
  std::string text = attached ? name.substr(equals + 1) : "";
  name.resize(std::min(equals, name.size()));
  Option& option = find(name);
  if (option.value_name.empty()) {
    if (attached) usage("option '--" + name + "' takes no value");
  } else if (!attached) {
    if (index + 1 == arguments.size()) usage("option '--" + name + "' needs a value: " + option.value_name);
    text = arguments[++index];
  }
  option.given = true;
  try {
    option.set(text);
  } catch (const Failure& failure) {
    throw Failure(failure.code(), "option '--" + name + "': " + failure.what());
  }
}

bool Parser::parse(std::span<char* const> arguments) {
  bool options_ended = false;
  for (std::size_t index = 0; index < arguments.size(); ++index) {
    const std::string_view argument = arguments[index];
    if (!options_ended && (argument == "--help" || argument == "-h")) {
      print_help();
      return false;
    }
    if (!options_ended && argument == "--") {
      options_ended = true;
    } else if (!options_ended && argument.starts_with("--")) {
      parse_option(arguments, index);
    } else if (!options_ended && argument.starts_with('-') && argument.size() > 1) {
      usage("unknown option " + quoted(std::string(argument)) + "; options are spelled out: --name VALUE");
    } else if (positional_) {
      positional_(std::string(argument));
    } else {
      usage("unexpected argument " + quoted(std::string(argument)) + "; this subcommand takes options only");
    }
  }
  return true;
}

void Parser::print_help() const {
  std::printf("Usage: gpuloan %s\n\n%s\n\nOptions:\n", synopsis_.c_str(), about_.c_str());
  std::size_t width = 6;
  const auto left = [](const Option& option) {
    return option.name + (option.value_name.empty() ? "" : " " + option.value_name);
  };
  for (const Option& option : options_) {
    if (!option.hidden) width = std::max(width, left(option).size());
  }
  for (const Option& option : options_) {
    if (!option.hidden)
      std::printf("  --%-*s  %s\n", static_cast<int>(width), left(option).c_str(), option.help.c_str());
  }
  std::printf("  --%-*s  show this text\n\nExit codes:\n", static_cast<int>(width), "help");
  for (const ExitRow& row : kExitRows) std::printf("  %3d  %s\n", row.code, row.meaning);
}

std::uint64_t parse_number(const std::string& text, std::uint64_t low, std::uint64_t high) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= low && value <= high) return value;
  usage(quoted(text) + " is not a number from " + std::to_string(low) + " to " + std::to_string(high));
}

std::uint64_t parse_size(const std::string& text) {
  static constexpr struct {
    std::string_view name;
    unsigned shift;
  } kUnits[] = {{"", 0},     {"B", 0},  {"K", 10},   {"KiB", 10}, {"M", 20},
                {"MiB", 20}, {"G", 30}, {"GiB", 30}, {"T", 40},   {"TiB", 40}};
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc()) {
    const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
    for (const auto& known : kUnits) {
      if (unit == known.name && value <= (UINT64_MAX >> known.shift)) return value << known.shift;
    }
  }
  usage(quoted(text) + " is not a size; write bytes, or a whole number with KiB, MiB, GiB or TiB");
}

std::uint32_t parse_seconds(const std::string& text) {
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds, std::chars_format::fixed);
  if (error == std::errc() && end == text.data() + text.size() && seconds > 0 && seconds <= 1'000'000) {
    return std::max(std::uint32_t{1}, static_cast<std::uint32_t>(seconds * 1000));
  }
  usage(quoted(text) + " is not a time in seconds above 0 and up to 1000000, such as 5 or 0.25");
}

std::uint32_t parse_choice(const std::string& text, std::span<const Choice> choices) {
  std::string names;
  for (const Choice& choice : choices) {
    if (text == choice.name) return choice.value;
    names += (names.empty() ? "" : ", ") + std::string(choice.name);
  }
  usage(quoted(text) + " is not one of " + names);
}

} // namespace gpuloan::tool
