// Paths that users write.
#pragma once

#include <string>

namespace gradwire {

// Returns the problem with a path that would name an unintended file, or "":
//   ~...        only a shell expands ~, and only at the beginning of a word: not in --log=~/run.jsonl
//   -           standard input or output, where a file is needed
//   s3://...    a URL, which open(2) takes for a folder "s3:"
inline std::string path_problem(const std::string& path) {
  const auto problem = [&](const std::string& why, const std::string& write) {
    return "'" + path + "' " + why + "; write " + write + ", or './" + path + "' for a file of that name";
  };
  if (path.starts_with("~")) {
    const bool own = path == "~" || path.starts_with("~/");
    return problem("begins with ~, which the shell did not expand",
                   own ? "\"$HOME" + path.substr(1) + "\"" : "the whole path");
  }
  if (path == "-") return problem("means standard input or output, but a file is needed", "its name");
  const size_t scheme = path.find("://");
  if (scheme == std::string::npos || scheme == 0 || path.find('/') != scheme + 1) return "";
  const std::string rest = path.substr(scheme + 3);
  return problem("is a URL, but only files can be read and written",
                 path.starts_with("file:///") ? rest : "the path at which that storage is mounted");
}

}  // namespace gradwire
