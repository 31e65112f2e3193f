// The only place that reads environment variables: the table of environment.cpp lists each with its default
// and meaning, and tools/checks/check_environment.py fails if another file calls getenv().
#pragma once

#include <functional>
#include <string>

namespace gradwire {

// Returns the table of all variables that the libraries and commands read, as in docs/environment.md;
// `gradwire doctor --environment` prints it.
std::string environment_text();

// Returns a variable's value; null when it is unset or empty. Throws BadInput for a value with a
// carriage return, and Error for names that are not in the table.
const char* environment(const char* name);
// Returns the same for a variable that holds a path. Throws BadInput for a path_problem().
const char* path_in_environment(const char* name);
// Returns whether a variable is 1; unset counts as 0. Throws BadInput for any other value than 0 and 1.
bool environment_flag(const char* name, const std::function<const char*(const char*)>& lookup = environment);

}  // namespace gradwire
