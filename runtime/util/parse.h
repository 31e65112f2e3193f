// Parses numbers.
#pragma once

#include <gradwire/gradwire.h>

#include <charconv>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
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

// Returns the product of the extents; 1 for a scalar, which does not have extents.
inline int64_t element_count(std::span<const int64_t> shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace gradwire

// GRADWIRE_VERSION, the version in gradwire.h as a string literal.

#define GRADWIRE_QUOTE_(number) #number
#define GRADWIRE_QUOTE(number) GRADWIRE_QUOTE_(number)
#define GRADWIRE_VERSION \
  GRADWIRE_QUOTE(GW_VERSION_MAJOR) "." GRADWIRE_QUOTE(GW_VERSION_MINOR) "." GRADWIRE_QUOTE(GW_VERSION_PATCH)
