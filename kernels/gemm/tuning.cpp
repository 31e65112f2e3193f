#include "kernels/gemm/tuning.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "runtime/util/environment.h"

namespace gradwire {
namespace {

constexpr const char* kHeader = "gradwire tuning 1";
constexpr int kLinesNamed = 5;

// Returns a device's name with tabs and line ends replaced, because they would end the field.
std::string field(std::string text) {
  for (char end : {'\t', '\n', '\r'}) std::ranges::replace(text, end, ' ');
  return text.empty() ? "-" : text;
}

TuningFile::Key cleaned(const TuningFile::Key& key) {
  return {field(key.device), field(key.maker), field(key.kind)};
}

}  // namespace

TuningFile::TuningFile(std::string path, Say say) : path_(std::move(path)), say_(std::move(say)) {
  read();
}

TuningFile* TuningFile::shared() {
  static const char* const path = path_in_environment("GRADWIRE_TUNING");
  if (path == nullptr) return nullptr;
  static TuningFile file(path);
  return &file;
}

void TuningFile::say(const std::string& what) const {
  const std::string message = fmt::format("gradwire: {}: {}", path_, what);
  say_ ? say_(message) : fmt::print(stderr, "{}\n", message);
}

void TuningFile::read() {
  std::error_code error;
  const auto status = std::filesystem::status(path_, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    ours_ = false;  // reading a FIFO would wait for its writer
    return say("not a regular file, so it is neither read nor written");
  }
  std::ifstream in(path_);
  std::string line;
  if (!in || !std::getline(in, line)) return;  // missing or empty: add() writes the file
  if (line != kHeader) {
    ours_ = false;
    return say(fmt::format("does not begin with '{}', so it is neither read nor written", kHeader));
  }
  int ignored = 0;
  for (int number = 2; std::getline(in, line); ++number) {
    std::vector<std::string> fields;
    for (size_t begin = 0; begin <= line.size();) {
      const size_t end = std::min(line.find('\t', begin), line.size());
      fields.push_back(line.substr(begin, end - begin));
      begin = end + 1;
    }
    const auto empty = std::count(fields.begin(), fields.end(), "");
    if (fields.size() != 4 || empty > 0 || line.find('\r') != std::string::npos) {
      if (++ignored > kLinesNamed) continue;
      say(fmt::format(
          "line {} is ignored: expected a device, a maker, a kind and a choice, with tabs in between",
          number));
      continue;
    }
    choices_[{fields[0], fields[1], fields[2]}] = fields[3];
  }
  if (ignored > kLinesNamed) say(fmt::format("{} more lines are ignored", ignored - kLinesNamed));
}

std::optional<std::string> TuningFile::find(const Key& key) const {
  std::lock_guard lock(mutex_);
  const auto at = choices_.find(cleaned(key));
  return at == choices_.end() ? std::nullopt : std::optional(at->second);
}

void TuningFile::add(const Key& key, const std::string& choice) {
  const Key clean = cleaned(key);
  std::lock_guard lock(mutex_);
  choices_[clean] = choice;
  if (!ours_) return;
  const int file = open(path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  bool written = file >= 0 && flock(file, LOCK_EX) == 0;
  if (written) {
    struct stat status = {};
    std::string text = fmt::format("{}\t{}\t{}\t{}\n", clean.device, clean.maker, clean.kind, field(choice));
    char last = '\n';
    if (fstat(file, &status) == 0 && status.st_size == 0) text = fmt::format("{}\n{}", kHeader, text);
    // Ends a partial line, from a process that died or an editor, so that the next line is not lost.
    if (status.st_size > 0 && pread(file, &last, 1, status.st_size - 1) == 1 && last != '\n')
      text = "\n" + text;
    written = write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  }
  if (!written) {
    say(fmt::format("cannot add a choice: {}; from here on none is saved", std::strerror(errno)));
    ours_ = false;
  }
  if (file >= 0) close(file);  // also unlocks it
}

std::string hex_bytes(const void* data, size_t count) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::string text;
  for (size_t i = 0; i < count; ++i) text += fmt::format("{:02x}", bytes[i]);
  return text;
}

bool from_hex_bytes(const std::string& text, void* data, size_t count) {
  if (text.size() != 2 * count) return false;
  auto* bytes = static_cast<unsigned char*>(data);
  for (size_t i = 0; i < count; ++i)
    std::from_chars(text.data() + 2 * i, text.data() + 2 * i + 2, bytes[i], 16);
  return hex_bytes(data, count) == text;  // refuses all but lower-case digits
}

}  // namespace gradwire
