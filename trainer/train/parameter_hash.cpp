#include "trainer/train/parameter_hash.h"

#include <fmt/format.h>

#include <bit>

namespace gradwire {

uint64_t parameter_hash(std::span<const float> values) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (float value : values) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3u;
  return hash;
}

std::string hex(uint64_t value) {
  return fmt::format("{:016x}", value);
}

}  // namespace gradwire
