// SPDX-License-Identifier: MIT
//
// A command line of any words, one per line of the input, through the option parser, against a second reading of the rules:
// the same values arrive, or the same kind of refusal. A suggestion is always a visible option, never a hidden one.
#include "fuzz.hpp"

#include <tools/exit_codes.hpp>
#include <tools/options.hpp>

#include <vector>

using namespace gpuloan;

namespace {

using Words = std::vector<std::string>;

struct Outcome {
  bool flag = false, refused = false, help = false;
  std::vector<std::string> given, positional; // given: "name=value"
  bool operator==(const Outcome&) const = default;
};

Words words_of(const std::string& text) {
  Words words;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    words.emplace_back(text.substr(at, end - at).c_str()); // an argument ends at a zero byte
    at = end + 1;
  }
  return words;
}

bool takes(const std::string& name, const std::string& value) { return name != "count" || (value.size() == 1 && value[0] >= '0' && value[0] <= '9'); }

Outcome expected(const Words& words) {
  Outcome out;
  bool ended = false;
  for (std::size_t index = 0; index < words.size(); ++index) {
    const std::string& word = words[index];
    if (ended || word.empty() || word[0] != '-' || word == "-") {
      out.positional.push_back(word);
      continue;
    }
    if (word == "--") {
      ended = true;
      continue;
    }
    if (word == "--help" || word == "-h") {
      out.help = true;
      return out;
    }
    const std::size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const bool attached = equals != std::string::npos;
    if (name == "--flag" && !attached) {
      out.flag = true;
      continue;
    }
    const bool known = name == "--value" || name == "--count" || name == "--secret";
    out.refused = !known || (!attached && index + 1 == words.size());
    if (out.refused) return out;
    const std::string value = attached ? word.substr(equals + 1) : words[++index];
    out.refused = !takes(name.substr(2), value);
    if (out.refused) return out;
    out.given.push_back(name.substr(2) + "=" + value);
  }
  return out;
}

void check_refusal(const tool::Failure& failure, const Words& words) {
  FUZZ_REQUIRE(failure.code() == tool::ExitUsage);
  const std::string_view said = failure.what(), hint = "did you mean '--";
  FUZZ_REQUIRE(!said.empty());
  for (const std::string& word : words) {
    if (word.find("did you") != std::string::npos) return; // it is repeated in the sentence
  }
  const std::size_t at = said.find(hint);
  if (at == std::string_view::npos) return;
  const std::string_view name = said.substr(at + hint.size());
  bool visible = false;
  for (const std::string_view known : {"flag'", "value'", "count'", "help'"}) visible |= name.starts_with(known);
  FUZZ_REQUIRE(visible);
}

Outcome parsed(Words words) {
  Outcome out;
  tool::Parser parser("test [FILE]", "about");
  const auto note = [&out](const char* name) { return [&out, name](const std::string& text) { out.given.push_back(name + ("=" + text)); }; };
  parser.flag("flag", "a flag", out.flag);
  parser.value("value", "V", "a value", note("value"));
  parser.value("count", "N", "a digit", [&out](const std::string& text) {
    static_cast<void>(tool::parse_number(text, 0, 9));
    if (text.size() != 1) throw tool::Failure(tool::ExitUsage, "has more digits than one");
    out.given.push_back("count=" + text);
  });
  parser.value("secret", "V", "hidden", note("secret"));
  parser.hide_last();
  parser.positional("FILE", [&out](const std::string& text) { out.positional.push_back(text); });
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  try {
    out.help = !parser.parse(pointers);
  } catch (const tool::Failure& failure) {
    check_refusal(failure, words);
    out.refused = true;
  }
  for (const std::string& given : out.given) FUZZ_REQUIRE(parser.given(given.substr(0, given.find('='))));
  FUZZ_REQUIRE(parser.given("flag") == out.flag);
  return out;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size > 1024) return 0; // suggesting takes the square of it
  static const bool quiet = std::freopen("/dev/null", "w", stdout) != nullptr; // --help prints
  FUZZ_REQUIRE(quiet);
  const Words words = words_of(fuzz::Input(data, size).text(size));
  FUZZ_REQUIRE(parsed(words) == expected(words));
  return 0;
}
