// A running hash of numbers.
#pragma once

#include <cstdint>
#include <string_view>

namespace gradwire {

inline uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdull;
}

inline uint64_t mix(uint64_t hash, std::string_view text) {
  for (char c : text) hash = mix(hash, static_cast<uint64_t>(c));
  return mix(hash, static_cast<uint64_t>(text.size()));
}

}  // namespace gradwire
