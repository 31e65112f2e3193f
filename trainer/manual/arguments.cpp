#include "trainer/manual/arguments.h"

#include <algorithm>
#include <regex>
#include <sstream>

#include "collectives/codec/examples.h"
#include "kernels/wire/formats.h"
#include "trainer/config/config.h"
#include "trainer/measure/auto_compression.h"

namespace gradwire {
namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream rest(text);
  for (std::string part; std::getline(rest, part, separator);) parts.push_back(part);
  return parts;
}

std::vector<std::string> format_names() {
  std::vector<std::string> names;
  for (Wire wire : wire_formats()) names.emplace_back(wire->name);
  return names;
}

// Sets the kind of value, and all words of a closed set. A flag's type is NAME or, with a set, NAME:{a,b}.
void add_values(Argument& argument, const std::string& type) {
  using enum Argument::Value;
  const size_t open = type.find('{'), close = type.find('}');
  argument.type = type.substr(0, type.find(':'));
  const std::string& name = argument.type;
  argument.value = words;
  if (open != std::string::npos && close != std::string::npos && open < close) {
    argument.words = split(type.substr(open + 1, close - open - 1), ',');
    for (std::string& word : argument.words) word = word.substr(0, word.find("->"));  // a map's keys
  } else if (name == "MODEL") {
    argument.words = model_names();
  } else if (name == "FORMAT") {
    argument.words = format_names();
  } else if (name == "DATA") {
    argument.words = {"fashion-mnist", "fashion-mnist:", "cifar10:", "synthetic", "synthetic:"};
  } else {
    argument.value = name == "SPEC" ? spec : name == "FILE" ? file : name == "DIR" ? folder : other;
  }
}

Argument argument_of(const CLI::Option& option) {
  Argument argument{.about = option.get_description(), .preset = option.get_default_str()};
  argument.group = option.get_group();
  argument.repeats =
      option.get_expected_max() > 1 || option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
  for (const std::string& name : option.get_lnames()) argument.names.push_back("--" + name);
  for (const std::string& name : option.get_snames()) argument.names.push_back("-" + name);
  if (option.get_items_expected_max() == 0) {
    argument.repeats = false;
    return argument;
  }
  add_values(argument, option.get_type_name());
  if (!option.nonpositional()) {
    argument.type = option.get_name(true);
    if (argument.value == Argument::Value::other) argument.value = Argument::Value::file;
  }
  return argument;
}

Command command_of(const CLI::App& app) {
  Command command{.name = app.get_name(), .about = app.get_description(), .footer = app.get_footer()};
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_group().empty()) command.arguments.push_back(argument_of(*option));
  }
  return command;
}

void add_once(std::vector<std::string>& words, const std::string& word) {
  if (std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
}

// Reads the options key=a|b|c from a part of CompressionSpec::grammar(). Capitals are values of any text.
std::vector<std::string> options_in(const std::string& grammar) {
  static const std::regex option("([a-z_]+)=([A-Za-z0-9_|]+)");
  std::vector<std::string> words;
  for (std::sregex_iterator it(grammar.begin(), grammar.end(), option), end; it != end; ++it) {
    const std::string key = it->str(1) + "=";
    for (const std::string& value : it->str(2) == "FORMAT" ? format_names() : split(it->str(2), '|')) {
      add_once(words, std::isupper(static_cast<unsigned char>(value[0])) ? key : key + value);
    }
  }
  return words;
}

}  // namespace

std::vector<Command> commands_of(const CLI::App& app) {
  std::vector<Command> all{command_of(app)};
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App* a) { return !a->get_group().empty(); })) {
    all.push_back(command_of(*sub));
  }
  return all;
}

SpecWords spec_words() {
  const std::string grammar = CompressionSpec::grammar();
  const size_t randk = grammar.find("randk:"), dion = grammar.find("dion:"),
               all = grammar.find(", where FORMAT");
  SpecWords words{.common = options_in(grammar.substr(all))};
  std::vector<std::string> specs = format_specs(), shelf = shelf_specs();
  specs.insert(specs.end(), shelf.begin(), shelf.end());
  for (const std::string& spec : specs) {
    const size_t colon = spec.find(':');
    std::vector<std::string>& options = words.by_name[spec.substr(0, colon)];
    if (colon == std::string::npos) continue;
    for (const std::string& option : split(spec.substr(colon + 1), ',')) add_once(options, option);
  }
  for (const auto& [name, part] : {std::pair{"powersgd", grammar.substr(0, randk)},
                                   std::pair{"randk", grammar.substr(randk, dion - randk)}}) {
    for (const std::string& option : options_in(part)) add_once(words.by_name[name], option);
  }
  words.by_name[kAutomatic] = options_in(AutoCompression::grammar());
  return words;
}

}  // namespace gradwire
