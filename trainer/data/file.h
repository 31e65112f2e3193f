// Whole files, plain or gzip, into memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradwire {

// Contents of `path`, decompressed when it is gzip. Throws BadInput that names the file when it is missing,
// unreadable, truncated or corrupt, or longer than `limit_bytes`; `remedy` closes the text.
std::vector<uint8_t> read_file(const std::string& path, size_t limit_bytes, const std::string& remedy);

}  // namespace gradwire
