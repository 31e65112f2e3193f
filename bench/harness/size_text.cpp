#include "bench/harness/size_text.h"

#include <fmt/format.h>

namespace gradwire::bench {

std::string size_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"", "K", "M", "G", "T"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  return fmt::format("{:.4g}{}", value, kUnits[unit]);
}

}  // namespace gradwire::bench
