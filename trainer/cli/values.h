// Validators of flag values, for all commands.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire {

// Makes every flag and argument that holds a path reject texts that name no file (path_problem()). The type
// of a flag says where its path begins; every positional argument is a path. '-' is standard output for the
// flags that write a result. No result may be another of a command's files. Call after adding all commands.
inline void check_paths(CLI::App& app) {
  constexpr std::array<std::string_view, 6> kResults{"--json", "--csv",   "--markdown",
                                                     "--log",  "--trace", "--output"};
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    command->parse_complete_callback([=] {
      std::vector<NamedFile> files;
      for (const CLI::Option* option : command->get_options([](const CLI::Option*) { return true; })) {
        const std::string type = option->get_type_name(), name = option->get_name();
        const bool after_colon = type == "DATA" || type == "STEP:DIR", url = type == "URL";
        if (!after_colon && !url && type != "FILE" && type != "DIR" && option->nonpositional()) continue;
        const bool result = std::ranges::find(kResults, name) != kResults.end();
        const std::vector<std::string>& given = option->results();
        for (const std::string& text : given.empty() ? std::vector{option->get_default_str()} : given) {
          const std::string path = text.substr(url           ? 7 * text.starts_with("file://")
                                               : after_colon ? text.find(':') + 1
                                                             : 0);
          const std::string problem =
              (result && path == "-") || (url && path == text) ? "" : path_problem(path);
          if (!problem.empty()) throw BadInput(name + ": " + problem);
          if (!after_colon) files.push_back({name, path, result || name == "--members"});
        }
      }
      check_all_different(files);
    });
  }
}

// Checks a size in bytes: a number, with or without a unit. kb_is_1000: K is 1000 and KiB is 1024. Otherwise
// K and KiB are 1024. CLI11's validator accepts -1 as 2^64 - 1.
inline CLI::Validator size_value(bool kb_is_1000) {
  const CLI::AsSizeValue units(kb_is_1000);
  return CLI::Validator(
      [units](std::string& text) {
        const std::string given = text;
        const bool number = !text.empty() && text[0] >= '0' && text[0] <= '9';
        if (number && units(text).empty()) return std::string();
        return "'" + given + "' is not a size: write bytes, or a number with a unit, such as 500M or 8GiB";
      },
      "");
}

}  // namespace gradwire
