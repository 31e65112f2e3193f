#include "trainer/data/file_kind.h"

#include <algorithm>
#include <cctype>
#include <string_view>

namespace gradwire {
namespace {

struct Kind {
  size_t at;  // offset of the signature in the file
  std::string_view signature;
  const char* text;
};

using namespace std::string_view_literals;

constexpr Kind kKinds[] = {
    {0, "version https://git-lfs"sv,
     "a Git LFS pointer, which stands for the file; run git lfs pull in its repository"},
    {0, "PK\x03\x04"sv, "a zip archive; unpack it"},
    {0, "\x1f\x8b"sv, "gzip data; unpack it with gunzip"},
    {0, "BZh"sv, "bzip2 data; unpack it with bunzip2"},
    {0,
     "\xfd"
     "7zXZ\0"sv,
     "xz data; unpack it with unxz"},
    {0, "\x28\xb5\x2f\xfd"sv, "zstd data; unpack it with unzstd"},
    {257, "ustar"sv, "a tar archive; unpack it with tar -xf"},
};

// Returns whether the text begins with a tag, after white space: "<!DOCTYPE html>", "<html>", "<?xml ...".
// Servers answer failed requests with such texts.
bool is_markup(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n\xef\xbb\xbf");
  if (begin == std::string_view::npos) return false;
  std::string word(text.substr(begin, 9));
  std::transform(word.begin(), word.end(), word.begin(), [](unsigned char c) { return std::tolower(c); });
  return word == "<!doctype" || word.starts_with("<html") || word.starts_with("<?xml") ||
         word.starts_with("<head") || word.starts_with("<body") || word.starts_with("<!--");
}

}  // namespace

std::string foreign_kind(std::span<const uint8_t> head) {
  const std::string_view text(reinterpret_cast<const char*>(head.data()),
                              std::min(head.size(), kFileKindBytes));
  if (is_markup(text)) return "an HTML or XML page, as a failed download leaves it; download the file again";
  for (const Kind& kind : kKinds) {
    if (text.size() >= kind.at && text.substr(kind.at).starts_with(kind.signature)) return kind.text;
  }
  return "";
}

}  // namespace gradwire
