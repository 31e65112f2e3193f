// The only place that reads environment variables: each is in the table of environment.cpp, with its default
// and meaning, and tests/check_environment.py fails where another file calls getenv().
#pragma once

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

// Every variable that the libraries and commands read.
std::span<const EnvironmentGroup> environment_variables();
// The table as docs/environment.md shows it; `gradwire doctor --environment` prints it.
std::string environment_text();

// A variable's value; null when it is unset or empty. Throws Error for one that is not in the table.
const char* environment(const char* name);

}  // namespace gradwire
