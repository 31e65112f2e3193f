// A fingerprint of parameters by their bits: equal hashes on all ranks mean equal models.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace gradwire {

// Returns the FNV-1a hash of the values' 32-bit words. Every bit affects the hash: -0 differs from 0, and
// NaNs with different bits differ.
uint64_t parameter_hash(std::span<const float> values);
// Returns the value as 16 hexadecimal digits.
std::string hex(uint64_t value);

}  // namespace gradwire
