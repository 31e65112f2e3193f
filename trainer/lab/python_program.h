// Finds Python, and the Python programs that belong to gradwire.
#pragma once

#include <string>

namespace gradwire {

inline constexpr int kPythonNotStarted = 127;

// Returns the path of a program such as "report/report.py", relative to the executable, which is in a bundle,
// an installation or a build folder. Throws Error if the program is missing.
std::string path_of_program(const std::string& name);

// Returns GRADWIRE_PYTHON or the system's Python. Debian's Python has Debian's packages, but may not be the
// first on PATH.
std::string path_of_python();

// Returns the error text of a Python that cannot be executed.
std::string python_not_started(const std::string& python);

}  // namespace gradwire
