// CRC-32 of zlib, gzip and PNG, and CRC-32C, for which x86-64 has an instruction. The implementation is not
// zlib's, because a program that defines a function named `crc32` would interpose it. Slicing-by-8 processes
// eight bytes at a time, with one table per byte.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace gradwire {

// The reflected polynomials of the two checksums.
inline constexpr uint32_t kCrc32 = 0xedb88320u, kCrc32c = 0x82f63b78u;

namespace detail {

// tables[k][b]: the effect of byte b on the checksum when k more bytes follow it.
template <uint32_t polynomial>
inline constexpr auto kCrcTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? polynomial : 0);
    tables[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t b = 0; b < 256; ++b) {
      tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 255];
    }
  }
  return tables;
}();

}  // namespace detail

// Returns the checksum of the earlier bytes, whose checksum is `crc` (0: none), followed by `data`.
template <uint32_t polynomial = kCrc32>
uint32_t crc32(const void* data, size_t bytes, uint32_t crc = 0) {
  const auto& t = detail::kCrcTables<polynomial>;
  const auto* at = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint32_t low, high;
    std::memcpy(&low, at, 4);
    std::memcpy(&high, at + 4, 4);
    low ^= crc;
    crc = t[7][low & 255] ^ t[6][low >> 8 & 255] ^ t[5][low >> 16 & 255] ^ t[4][low >> 24] ^
          t[3][high & 255] ^ t[2][high >> 8 & 255] ^ t[1][high >> 16 & 255] ^ t[0][high >> 24];
  }
  for (; bytes > 0; --bytes, ++at) crc = (crc >> 8) ^ t[0][(crc ^ *at) & 255];
  return ~crc;
}

// A running hash of numbers.

inline uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdull;
}

inline uint64_t mix(uint64_t hash, std::string_view text) {
  for (char c : text) hash = mix(hash, static_cast<uint64_t>(c));
  return mix(hash, static_cast<uint64_t>(text.size()));
}

}  // namespace gradwire
