// A buffer for packed operands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradwire::host {

// A buffer that begins with a cache line, since loads that cross lines take twice as long. The buffer only
// grows.
template <typename T>
class AlignedMemory {
 public:
  // Returns room for at least `count` elements; the old contents are lost.
  T* reserve(int64_t count) {
    constexpr int64_t kPerLine = sizeof(Line) / sizeof(T);
    const auto lines = static_cast<size_t>((count + kPerLine - 1) / kPerLine);
    if (lines_.size() < lines) lines_.resize(lines);
    return reinterpret_cast<T*>(lines_.data());
  }

 private:
  struct alignas(64) Line {
    T elements[64 / sizeof(T)];
  };
  std::vector<Line> lines_;
};

}  // namespace gradwire::host
