#include "trainer/train/parameter_hash.h"

#include <bit>
#include <cstdio>

namespace gradwire {

uint64_t parameter_hash(std::span<const float> values) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (float value : values) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3u;
  return hash;
}

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace gradwire
