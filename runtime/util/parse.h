// Parses numbers.
#pragma once

#include <charconv>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

namespace gradwire {

// Returns the whole text as a number from `least` to `most`; nullopt if the text is anything else.
template <typename T>
std::optional<T> parse_number(std::string_view text, T least = std::numeric_limits<T>::lowest(),
                              T most = std::numeric_limits<T>::max()) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stopped != end || !(value >= least && value <= most)) return {};
  return value;
}

// Returns two numbers of at least `least` that `separator` separates, as in 10:20.
template <typename T>
std::optional<std::pair<T, T>> parse_pair(std::string_view text, char separator, T least) {
  const size_t at = text.find(separator);
  if (at == std::string_view::npos) return {};
  const auto first = parse_number(text.substr(0, at), least),
             second = parse_number(text.substr(at + 1), least);
  if (!first || !second) return {};
  return std::pair{*first, *second};
}

}  // namespace gradwire
