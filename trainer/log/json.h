// How values become JSON in what this folder writes.
#pragma once

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace gradwire {

using Json = nlohmann::ordered_json;

// NaN and infinity become null; bytes that are not UTF-8 (a path may hold anything) are replaced.
inline std::string json_text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

inline Json or_null(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

// 25 rather than 25.0.
inline Json shortest(double value) {
  return value == std::floor(value) ? Json(static_cast<int64_t>(value)) : Json(value);
}

}  // namespace gradwire
