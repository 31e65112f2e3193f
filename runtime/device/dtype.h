// Number types in memory and in files.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

namespace gradwire {

enum class DType : uint8_t { f64, f32, f16, bf16, i64, i32, i16, i8, u8 };

namespace detail {
struct DTypeFacts {
  const char* name;
  int64_t bytes;
};
inline constexpr DTypeFacts kDTypes[] = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},
                                         {"I32", 4}, {"I16", 2}, {"I8", 1},  {"U8", 1}};
}  // namespace detail

// Returns the type's name in safetensors files.
constexpr const char* name(DType dtype) {
  return detail::kDTypes[static_cast<size_t>(dtype)].name;
}
constexpr int64_t bytes_of(DType dtype) {
  return detail::kDTypes[static_cast<size_t>(dtype)].bytes;
}
constexpr std::optional<DType> find_dtype(std::string_view text) {
  for (size_t i = 0; i < std::size(detail::kDTypes); ++i) {
    if (text == detail::kDTypes[i].name) return static_cast<DType>(i);
  }
  return {};
}

}  // namespace gradwire
