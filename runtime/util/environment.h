// The only place that reads environment variables: the table of environment.cpp lists each with its default
// and meaning, and tools/checks/check_environment.py fails if another file calls getenv().
#pragma once

#include <functional>
#include <span>
#include <string>

namespace gradwire {

struct EnvironmentVariable {
  const char* name;
  const char* otherwise;  // the value when it is not set
  const char* meaning;    // empty: in one row with the variable before it
};

struct EnvironmentGroup {
  const char* title;
  std::span<const EnvironmentVariable> variables;
};

// Returns all variables that the libraries and commands read.
std::span<const EnvironmentGroup> environment_variables();
// Returns the table as in docs/environment.md; `gradwire doctor --environment` prints it.
std::string environment_text();

// Returns a variable's value; null when it is unset or empty. Throws Error for names that are not in the
// table.
const char* environment(const char* name);
// The value of one that is 0, as when it is unset, or 1. Throws BadInput for any other value.
bool environment_flag(const char* name, const std::function<const char*(const char*)>& lookup = environment);

}  // namespace gradwire
