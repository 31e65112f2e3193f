// The instruction set for which the host's loops (kernels/simd/simd.h) were compiled and run in this process.
//
// Sums over vectors have the same bits in two processes only if the level is the same. Therefore ranks that
// compute identical values locally must have the same level.
#pragma once

#include <string>

namespace gradwire {

// Returns a name such as "x86-64-v4 (AVX-512)".
std::string simd_level();

}  // namespace gradwire
