#include "kernels/wire/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>

namespace gradwire {

bool FormatOption::set(std::string_view text) const {
  for (size_t i = 0; i < words.size(); ++i) {
    if (text == words[i]) {
      *value = static_cast<int>(i);
      return true;
    }
  }
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (!words.empty() || error != std::errc() || end != text.data() + text.size()) return false;
  if (number < least || number > most || (power_of_two && (number & (number - 1)) != 0)) return false;
  *value = number;
  return true;
}

std::string FormatOption::text() const {
  return words.empty() ? fmt::format("{}", *value) : fmt::format("{}", words[static_cast<size_t>(*value)]);
}

std::string FormatOption::legal() const {
  if (!words.empty()) return fmt::format("one of {}", fmt::join(words, "|"));
  return fmt::format("a {} from {} to {}", power_of_two ? "power of two" : "number", least, most);
}

}  // namespace gradwire
