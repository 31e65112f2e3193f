#include "trainer/lab/python_program.h"

#include <fmt/format.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <filesystem>

#include "runtime/util/environment.h"
#include "runtime/util/error.h"

namespace gradwire {

namespace fs = std::filesystem;

std::string path_of_program(const std::string& name) {
  std::error_code no_proc;
  fs::path program = fs::read_symlink("/proc/self/exe", no_proc);
  if (no_proc) program = fs::canonical(reinterpret_cast<const char*>(getauxval(AT_EXECFN)));
  const fs::path here = program.parent_path();
  for (const char* folder : {"../share/gradwire", "../../trainer"}) {
    const fs::path path = here / folder / name;
    if (fs::exists(path)) return path.lexically_normal().string();
  }
  throw Error(
      fmt::format("{} was not found, because gradwire is in {}; start gradwire from build/bin of its "
                  "sources, or from bin of a bundle",
                  fs::path(name).filename().string(), here.string()));
}

std::unique_ptr<ChildProcess> start_python(const std::string& name, const std::vector<std::string>& arguments,
                                           const ChildProcess::Descriptors& descriptors) {
  const char* given = path_in_environment("GRADWIRE_PYTHON");
  const char* system = access("/usr/bin/python3", X_OK) == 0 ? "/usr/bin/python3" : "python3";
  std::vector<std::string> words{
      given != nullptr ? given : system, "-E", "-B", "-X", "utf8", path_of_program(name)};
  words.insert(words.end(), arguments.begin(), arguments.end());
  try {
    return std::make_unique<ChildProcess>(words, descriptors);
  } catch (const ChildProcess::NotStarted& error) {
    throw Error(fmt::format("{}; install python3, or name a Python in GRADWIRE_PYTHON", error.what()));
  }
}

}  // namespace gradwire
