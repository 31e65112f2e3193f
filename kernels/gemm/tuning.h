// The fastest choices measured, in a text file that several runs share, so that each choice is measured once:
//
//   gradwire tuning 1
//   NVIDIA H100 80GB HBM3 <tab> cublasLt 130100 <tab> NT 1600 4096 1024 ... <tab> 0a1b...
//
// A line per choice: the device's name, the library, the kind of product, and the choice. Later lines win.
// Malformed lines are ignored, with messages for the first few. A file with another first line is ignored and
// left unchanged. Several processes may add to one file. Docs: GRADWIRE_TUNING in docs/environment.md.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace gradwire {

class TuningFile {
 public:
  struct Key {
    std::string device, maker, kind;
    auto operator<=>(const Key&) const = default;
  };

  // Reports a recoverable problem with a file.
  using Say = std::function<void(const std::string& message)>;

  // Reads the file, if it exists. `say` replaces standard error.
  explicit TuningFile(std::string path, Say say = {});
  // Returns the file of GRADWIRE_TUNING; null if not set.
  static TuningFile* shared();

  std::optional<std::string> find(const Key& key) const;
  // Adds a choice to the table and to the file. If writing fails, reports a message; the choice still holds
  // for this process.
  void add(const Key& key, const std::string& choice);

 private:
  void read();
  void say(const std::string& what) const;

  const std::string path_;
  const Say say_;
  bool ours_ = true;  // true: the file is a tuning file or does not exist
  mutable std::mutex mutex_;
  std::map<Key, std::string> choices_;
};

// Convert bytes to hexadecimal digits, and hexadecimal digits to bytes. from_hex_bytes() returns false unless
// there are `count` bytes.
std::string hex_bytes(const void* data, size_t count);
bool from_hex_bytes(const std::string& text, void* data, size_t count);

}  // namespace gradwire
