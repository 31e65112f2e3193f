#include "trainer/cli/parse_error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <regex>
#include <string_view>
#include <vector>

#include "runtime/util/error.h"

namespace gradwire {
namespace {

std::string command_list(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string unexpected_text(const CLI::App& app, const CLI::App& command) {
  const std::vector<std::string> rest = app.remaining(true);
  const auto flag = std::ranges::find_if(rest, [](const std::string& word) { return word[0] == '-'; });
  if (flag == rest.end()) return fmt::format("unexpected argument '{}'", fmt::join(rest, " "));
  const std::string name = flag->substr(0, flag->find('='));
  std::vector<std::string_view> names;
  for (const CLI::Option* option : command.get_options()) {
    if (!option->get_lnames().empty()) names.emplace_back(option->get_lnames()[0]);
  }
  const bool is_long = name.starts_with("--") && name.size() > 3;
  std::string text = is_long ? suggestion(std::string_view(name).substr(2), names) : "";
  if (const size_t quote = text.find('\''); quote != std::string::npos) text.insert(quote + 1, "--");
  return fmt::format("unknown flag '{}'{}", name, text);
}

// Returns CLI11's message in our words.
std::string message_text(const CLI::App& app, const CLI::ParseError& error) {
  std::string text = error.what();
  // std::regex_match recurses once per character.
  constexpr size_t kMost = 1000;
  if (text.size() > kMost) return text.substr(0, kMost) + "...";
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::smatch found;
  const auto is = [&](const char* pattern) { return std::regex_match(text, found, std::regex(pattern)); };
  if (is("A subcommand is required")) return "name a command: " + command_list(app);
  if (is("(\\S+): At Most 1 required but received (\\d+)")) {
    return fmt::format("{} is given {} times; give it once", found.str(1), found.str(2));
  }
  if (is("(\\S+): 1 required ([^:]*):?(.*) missing")) {
    return fmt::format("{} needs a value: {} {}", found.str(1), found.str(2), found.str(3));
  }
  if (is("(\\S+): (.*) not in \\{([^{}]*)\\}")) {
    return fmt::format("{}: '{}' is not one of {}", found.str(1), found.str(2),
                       std::regex_replace(found.str(3), std::regex(","), ", "));
  }
  if (is("Could not convert: (\\S+) = (.*)")) {
    return fmt::format("{}: '{}' is not a value of this flag", found.str(1), found.str(2));
  }
  if (is("(\\S+) excludes (\\S+)")) {
    return fmt::format("{} and {} cannot be combined; drop one of them", found.str(1), found.str(2));
  }
  if (is("(\\S+) requires (\\S+)")) {
    return fmt::format("{} needs {}; add it", found.str(1), found.str(2));
  }
  return text;
}

}  // namespace

std::string parse_error_text(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<const CLI::App*> parsed =
      app.get_subcommands([](const CLI::App* c) { return c->parsed(); });
  const CLI::App& command = parsed.empty() ? app : *parsed[0];
  const std::string path = parsed.empty() ? app.get_name() : app.get_name() + " " + command.get_name();
  const std::string text = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr
                               ? unexpected_text(app, command)
                               : message_text(app, error);
  return fmt::format("{}; see {} --help", text, path);
}

}  // namespace gradwire
