// Validators of flag values, for all commands.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "runtime/util/paths.h"

namespace gradwire {

// Checks a path, or a path after `prefix`: after the first ':' of fashion-mnist:DIR, or after file:// of a
// URL. Rejects a path that begins with ~, because shells do not expand ~ after a prefix.
inline CLI::Validator path_value(const std::string& prefix = "") {
  return CLI::Validator(
      [prefix](std::string& text) {
        const size_t at = prefix.empty() ? 0 : text.find(prefix);
        return at == std::string::npos ? "" : tilde_problem(text.substr(at + prefix.size()));
      },
      "");
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
