// Finds Python, and the Python programs that belong to gradwire.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/threads/child_process.h"

namespace gradwire {

// Returns the path of a program such as "report/report.py", relative to the executable, which is in a bundle,
// an installation or a build folder. Throws Error if the program is missing.
std::string path_of_program(const std::string& name);

// Starts such a program with GRADWIRE_PYTHON or the system's Python. Debian's Python has Debian's packages,
// but may not be the first on PATH. Python uses UTF-8 in any locale, and ignores its variables, which could
// keep it from starting or replace its modules. The programs append the folders of PYTHONPATH to sys.path.
std::unique_ptr<ChildProcess> start_python(const std::string& name, const std::vector<std::string>& arguments,
                                           const ChildProcess::Descriptors& descriptors);

}  // namespace gradwire
