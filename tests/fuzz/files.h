// Writes inputs to files, for parsers that take a path.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "runtime/util/error.h"
#include "tests/fuzz/targets.h"

namespace gradwire::fuzz {

// Returns a folder for files of this process. The folder is in memory if the machine has such a file system,
// and is removed at exit.
inline const std::filesystem::path& scratch() {
  struct Folder {
    std::filesystem::path path;
    Folder() {
      const bool memory = std::filesystem::is_directory("/dev/shm");
      std::string pattern = std::string(memory ? "/dev/shm" : "/tmp") + "/gradwire-fuzz-XXXXXX";
      if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed: " + pattern);
      path = pattern;
    }
    ~Folder() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  };
  static const Folder folder;
  return folder.path;
}

inline std::string write_file(const std::string& name, Input bytes) {
  const std::filesystem::path path = scratch() / name;
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return path.string();
}

inline Bytes read_whole(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Runs `read`, which may reject its input.
template <typename Read>
void may_refuse(const Read& read) {
  try {
    read();
  } catch (const BadInput&) {
  }
}

}  // namespace gradwire::fuzz
