// What was fastest when it was measured, in a text file that runs share, so that each thing is measured once:
//
//   gradwire tuning 1
//   NVIDIA H100 80GB HBM3 <tab> cublasLt 130100 <tab> NT 1600 4096 1024 ... <tab> 0a1b...
//
// A line per choice: the device's name, what makes it, what it is for, and the choice. Later lines win. Lines that are not
// like that are ignored, with messages for the first few; so is a file that begins otherwise, which is left as it is.
// Several processes may add to one file. Docs: GRADWIRE_TUNING in docs/environment.md.
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

  // What is wrong with a file, and can be put up with.
  using Say = std::function<void(const std::string& message)>;

  // Reads the file, if there is one. `say`: in place of standard error.
  explicit TuningFile(std::string path, Say say = {});
  // That of GRADWIRE_TUNING; null: not set.
  static TuningFile* shared();

  std::optional<std::string> find(const Key& key) const;
  // Also to the file. A failure to write is a message, and the choice holds for this process.
  void add(const Key& key, const std::string& choice);

 private:
  void read();
  void say(const std::string& what) const;

  const std::string path_;
  const Say say_;
  bool ours_ = true;  // or there is no file
  mutable std::mutex mutex_;
  std::map<Key, std::string> choices_;
};

// Bytes as hexadecimal digits, and back; nothing when there are not exactly `count` of them.
std::string hex_bytes(const void* data, size_t count);
bool from_hex_bytes(const std::string& text, void* data, size_t count);

}  // namespace gradwire
