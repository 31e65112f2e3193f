// Conversion of values to JSON for all output of this folder, and parsing of untrusted JSON.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>

namespace gradwire {

using Json = nlohmann::ordered_json;

// Returns JSON text. NaN and infinity become null. Bytes that are not UTF-8 are replaced, because a path can
// contain any bytes.
inline std::string json_text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

inline Json or_null(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

// Returns a discarded value (is_discarded(), not an object) if the text is not JSON. Drops values nested
// deeper than Gradwire's output, because printing and comparing such values would overflow the stack.
inline Json parse_json(const std::string& text) {
  constexpr int kDeepest = 50;
  return Json::parse(
      text, [](int depth, Json::parse_event_t, Json&) { return depth <= kDeepest; }, false);
}

// Returns json[key] if the value exists and is a T. T must be one of Json's types (bool, numbers,
// std::string).
template <typename T>
std::optional<T> field(const Json& json, const char* key) {
  const auto at = json.find(key);
  if (at == json.end()) return std::nullopt;
  const bool fits = std::is_same_v<T, std::string> ? at->is_string()
                    : std::is_same_v<T, bool>      ? at->is_boolean()
                    : std::is_floating_point_v<T>  ? at->is_number()
                                                   : at->is_number_integer();
  return fits ? std::optional(at->template get<T>()) : std::nullopt;
}

// Returns json[key], or NaN if the value is not a number.
inline double number_in(const Json& json, const char* key) {
  return field<double>(json, key).value_or(std::numeric_limits<double>::quiet_NaN());
}

// Returns an integer for a whole number (25 instead of 25.0).
inline Json shortest(double value) {
  return value == std::floor(value) ? Json(static_cast<int64_t>(value)) : Json(value);
}

}  // namespace gradwire
