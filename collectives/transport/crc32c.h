// CRC-32C of payload on its way, by the processor's instruction where it has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

// Of bytes of which `crc` is the checksum of the first ones (0: of none), and these are the next.
uint32_t crc32c(const void* data, size_t bytes, uint32_t crc);

}  // namespace gradwire
