// Detects files left by a failed or unfinished download.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace gradwire {

// Number of bytes that foreign_kind() reads.
inline constexpr size_t kFileKindBytes = 512;

// Returns the kind of a file from its first bytes, with a remedy: "a zip archive; unpack it". Detects HTML
// pages, archives, compressed files and Git LFS pointers. Returns "" for any other file.
std::string foreign_kind(std::span<const uint8_t> head);

}  // namespace gradwire
