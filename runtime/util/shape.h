#pragma once

#include <cstdint>
#include <functional>
#include <numeric>
#include <span>

namespace gradwire {

// Returns the product of the extents; 1 for a scalar, which does not have extents.
inline int64_t element_count(std::span<const int64_t> shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace gradwire
