#include "collectives/c_api/text.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>

#include "collectives/c_api/errors.h"
#include "runtime/util/mix.h"

namespace gradwire::c_api {
namespace {

constexpr size_t kMostTagBytes = 1000, kShownTagBytes = 72;

// Returns the length in bytes of the UTF-8 character at `at`; 0 for an invalid character, such as an overlong
// form, a surrogate, or a character above U+10FFFF.
size_t character_length(const std::string& text, size_t at) {
  auto byte = [&](size_t i) {
    return at + i < text.size() ? static_cast<uint8_t>(text[at + i]) : uint8_t{0};
  };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
  }
  const bool overlong = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xf0 && byte(1) < 0x90);
  const bool surrogate = first == 0xed && byte(1) > 0x9f;
  const bool too_large = first == 0xf4 && byte(1) > 0x8f;
  return overlong || surrogate || too_large ? 0 : length;
}

bool is_control(char c) {
  return static_cast<unsigned char>(c) < ' ' || c == '\x7f';
}

}  // namespace

void check_text(const std::string& text, const std::string& what) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = character_length(text, at);
    require(length > 0, "{} is not UTF-8: byte {} is 0x{:02x}", what, at, static_cast<uint8_t>(text[at]));
    require(!is_control(text[at]), "{} has a control character: byte {} is 0x{:02x}", what, at,
            static_cast<uint8_t>(text[at]));
    at += length;
  }
}

std::string printable(std::string text) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = character_length(text, at);
    if (length == 0 || is_control(text[at])) text[at] = '?';
    at += length > 0 ? length : 1;
  }
  return text;
}

std::string checked_tag(const char* tag) {
  std::string text = tag != nullptr ? tag : "";
  require(text.size() <= kMostTagBytes, "tag has {} bytes, at most {} are allowed", text.size(),
          kMostTagBytes);
  check_text(text, "tag");
  return text;
}

std::string shown(const std::string& tag) {
  if (tag.empty()) return "";
  if (tag.size() <= kShownTagBytes) return fmt::format(" '{}'", tag);
  // Do not cut UTF-8 characters.
  auto begins = [&](size_t at) { return (static_cast<uint8_t>(tag[at]) & 0xc0) != 0x80; };
  size_t front = kShownTagBytes / 2, back = tag.size() - kShownTagBytes / 2;
  while (!begins(front)) --front;
  while (back < tag.size() && !begins(back)) ++back;
  return fmt::format(" '{}...{}' #{:08x}", tag.substr(0, front), tag.substr(back), mix(0, tag) >> 32);
}

}  // namespace gradwire::c_api
