// Files that are not data but what a failed or unfinished download leaves.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace gradwire {

// How many bytes foreign_kind() looks at.
inline constexpr size_t kFileKindBytes = 512;

// What the beginning of a file shows it to be, with a remedy, when that is an HTML page, an archive, a compressed file
// or a Git LFS pointer: "a zip archive; unpack it". Empty for anything else.
std::string foreign_kind(std::span<const uint8_t> head);

}  // namespace gradwire
