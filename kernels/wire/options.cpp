#include "kernels/wire/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "runtime/util/parse.h"

namespace gradwire {

bool FormatOption::set(std::string_view text) const {
  for (size_t i = 0; i < words.size(); ++i) {
    if (text == words[i]) {
      *value = static_cast<int>(i);
      return true;
    }
  }
  const auto number = parse_number<int>(text, least, most);
  if (!words.empty() || !number || (power_of_two && (*number & (*number - 1)) != 0)) return false;
  *value = *number;
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
