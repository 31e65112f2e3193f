// Paths that users write.
#pragma once

#include <string>

namespace gradwire {

// Returns the problem with a path that begins with ~, or "". Only a shell expands ~, and only at the
// beginning of a word: not in --log=~/run.jsonl or fashion-mnist:~/data.
inline std::string tilde_problem(const std::string& path) {
  if (!path.starts_with("~")) return "";
  const std::string home =
      path == "~" || path.starts_with("~/") ? "\"$HOME" + path.substr(1) + "\"" : "the whole path";
  return "'" + path + "' begins with ~, which the shell did not expand; write " + home + ", or './" + path +
         "' for a name that begins with ~";
}

}  // namespace gradwire
