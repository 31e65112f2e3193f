// Paths that users write.
#pragma once

#include <string>

namespace gradwire {

// What is wrong with a path that begins with ~, which only a shell expands, and only at the beginning of a word: not in
// --log=~/run.jsonl or fashion-mnist:~/data. Empty if nothing is.
inline std::string tilde_problem(const std::string& path) {
  if (!path.starts_with("~")) return "";
  const std::string home =
      path == "~" || path.starts_with("~/") ? "\"$HOME" + path.substr(1) + "\"" : "the whole path";
  return "'" + path + "' begins with ~, which the shell did not expand; write " + home + ", or './" + path +
         "' for a name that begins with ~";
}

}  // namespace gradwire
