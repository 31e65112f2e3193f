// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104). Implemented here instead of taken from a library: a
// program that links another version of the library could replace the library's functions (see
// tests/capi/capture_test.py).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace gradwire {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void update(const void* data, size_t bytes);
  Digest finish();

 private:
  void block(const uint8_t* data);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> pending_{};
  size_t filled_ = 0;
  uint64_t bytes_ = 0;
};

Digest hmac_sha256(std::string_view key, std::string_view message);

// Compares two digests in constant time.
bool equal(const Digest& a, const Digest& b);

}  // namespace gradwire
