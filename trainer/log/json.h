// How values become JSON in what this folder writes, and JSON that somebody else may have written is read.
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

// NaN and infinity become null; bytes that are not UTF-8 (a path may hold anything) are replaced.
inline std::string json_text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

inline Json or_null(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

// Discarded (is_discarded(), no object) where the text is not JSON. What is nested deeper than anything that
// Gradwire writes is left out: printing and comparing such values would overflow the stack.
inline Json parse_json(const std::string& text) {
  constexpr int kDeepest = 50;
  return Json::parse(
      text, [](int depth, Json::parse_event_t, Json&) { return depth <= kDeepest; }, false);
}

// json[key] if it is there and a T, which is one of Json's own types (bool, numbers, std::string).
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

// NaN where there is no number.
inline double number_in(const Json& json, const char* key) {
  return field<double>(json, key).value_or(std::numeric_limits<double>::quiet_NaN());
}

// 25 rather than 25.0.
inline Json shortest(double value) {
  return value == std::floor(value) ? Json(static_cast<int64_t>(value)) : Json(value);
}

}  // namespace gradwire
