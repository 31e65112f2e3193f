// Counter-based random bits: a value is a pure function of (seed, stream, counter), so host, GPU and every
// rank draw the same without any state to keep or to checkpoint.
//
// Generator: Philox-4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
#pragma once

#include <cstdint>

#include "kernels/math/hd.h"

namespace gradwire {

struct Random4 {
  uint32_t v[4];
};

GW_HD Random4 philox(uint64_t seed, uint64_t stream, uint64_t counter) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A draw serves eight elements with 16 bits each: element i of a (seed, stream) takes half-word i % 8 of
// counter i / 8.
GW_HD uint32_t random16_of(const Random4& draw, int lane) {
  // Spelled out, because an array indexed at run time would leave the GPU's registers.
  uint32_t low = (lane & 2) ? draw.v[1] : draw.v[0], high = (lane & 2) ? draw.v[3] : draw.v[2];
  return (((lane & 4) ? high : low) >> (16 * (lane & 1))) & 0xffffu;
}

GW_HD uint32_t random16(uint64_t seed, uint64_t stream, uint64_t element) {
  return random16_of(philox(seed, stream, element >> 3), static_cast<int>(element & 7));
}

// Uniform in (0, 1), never 0 and never 1.
GW_HD float uniform01(uint32_t bits) {
  return (static_cast<float>(bits >> 9) + 0.5f) * (1.0f / 8388608.0f);
}

// Roughly normal with mean 0 and variance 1, which is enough for a random direction: four uniforms, scaled.
GW_HD float rough_normal(const Random4& r) {
  float sum = uniform01(r.v[0]) + uniform01(r.v[1]) + uniform01(r.v[2]) + uniform01(r.v[3]) - 2.0f;
  return sum * 1.7320508f;
}

}  // namespace gradwire
