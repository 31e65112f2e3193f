// The instruction set for which the host's loops (kernels/simd/simd.h) were compiled and are run in this process.
//
// Sums over vectors have the same bits in two processes only if it is the same in both. What every rank computes for
// itself, and must not differ, needs that.
#pragma once

#include <string>

namespace gradwire {

// "x86-64-v4 (AVX-512)"
std::string simd_level();

}  // namespace gradwire
