// The commands, flags and known values of a program, read from its CLI11 app: the source of completion
// scripts and man pages.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

namespace gradwire {

// A flag or a positional argument.
struct Argument {
  enum class Value { none, words, spec, file, folder, other };
  std::vector<std::string> names = {};  // "--output", "-o"; empty for a positional argument
  std::string type = {};                // "FILE", "N"; the name of a positional argument
  std::string about = {};
  std::string preset = {};  // default value, or ""
  std::string group = {};
  Value value = Value::none;
  std::vector<std::string> words = {};  // all values, if value is words
  bool repeats = false;
};

struct Command {
  std::string name, about;
  std::string footer;  // examples, or ""
  std::vector<Argument> arguments = {};
};

// Returns the app and its visible subcommands, the app first.
std::vector<Command> commands_of(const CLI::App& app);

// The options of compression specs. `common`: of all names.
inline constexpr const char* kAutomatic = "auto";  // has none of the common options
struct SpecWords {
  std::vector<std::string> common;
  std::map<std::string, std::vector<std::string>> by_name = {};
};
SpecWords spec_words();

}  // namespace gradwire
