// Reads whole files, plain or gzip, into memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradwire {

// The maximum size of a dataset file, in bytes.
inline constexpr size_t kDatasetFileLimit = size_t{1} << 30;

// Returns the contents of `path`, decompressed if the file is gzip. Throws BadInput, which names the file and
// ends with `remedy`, when the file is missing, unreadable, truncated, corrupt, or longer than `limit_bytes`.
std::vector<uint8_t> read_file(const std::string& path, size_t limit_bytes, const std::string& remedy);

}  // namespace gradwire
