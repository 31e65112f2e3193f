// What the elements of a buffer are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

enum class Dtype : uint8_t { fp32, bf16 };

inline size_t bytes_of(Dtype dtype) {
  return dtype == Dtype::fp32 ? 4 : 2;
}
inline const char* name(Dtype dtype) {
  return dtype == Dtype::fp32 ? "fp32" : "bf16";
}

}  // namespace gradwire
