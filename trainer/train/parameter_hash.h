// A fingerprint of parameters by their bits: equal hashes on all ranks mean equal models.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace gradwire {

// FNV-1a over the values' 32-bit words. Every bit counts: -0 differs from 0, and NaNs from each other.
// In pieces: `hash` is that of the values before.
inline constexpr uint64_t kNoParameters = 0xcbf29ce484222325u;
uint64_t parameter_hash(std::span<const float> values, uint64_t hash = kNoParameters);
// 16 hexadecimal digits.
std::string hex(uint64_t value);

}  // namespace gradwire
