// Reads and writes files of little-endian values without padding, for oracles in Python and C++.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

#include "runtime/util/error.h"

namespace gradwire::oracle {

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), file_(path, std::ios::binary) {
    if (!file_) throw BadInput("cannot read " + path);
  }
  template <typename T>
  void read(T* to, int64_t count) {
    file_.read(reinterpret_cast<char*>(to),
               static_cast<std::streamsize>(count * static_cast<int64_t>(sizeof(T))));
    if (!file_) throw BadInput(path_ + " is too short");
  }
  template <typename T>
  T read() {
    T value;
    read(&value, 1);
    return value;
  }

 private:
  std::string path_;
  std::ifstream file_;
};

class Writer {
 public:
  explicit Writer(const std::string& path) : path_(path), file_(path, std::ios::binary) {}
  template <typename T>
  void write(const T* values, int64_t count) {
    file_.write(reinterpret_cast<const char*>(values),
                static_cast<std::streamsize>(count * static_cast<int64_t>(sizeof(T))));
  }
  void close() {
    file_.close();
    if (!file_) throw Error("cannot write " + path_);
  }

 private:
  std::string path_;
  std::ofstream file_;
};

// Runs `body` with the arguments. Returns the exit status of `body`; 2 for invalid input; 1 for other errors.
inline int run(int argc, char** argv, int (*body)(std::vector<std::string> arguments)) {
  try {
    return body({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return dynamic_cast<const BadInput*>(&error) != nullptr ? 2 : 1;
  }
}

}  // namespace gradwire::oracle
