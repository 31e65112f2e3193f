// CRC-32C checksums of payload in transit. Uses the processor's CRC instruction if the processor has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

// Returns the checksum extended by the next `bytes` bytes of `data`. `crc`: the checksum of the preceding
// bytes; 0 at the start.
uint32_t crc32c(const void* data, size_t bytes, uint32_t crc);

}  // namespace gradwire
