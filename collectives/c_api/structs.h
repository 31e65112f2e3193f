// Structs as callers pass them.
#pragma once

#include <algorithm>
#include <cstring>

#include "collectives/c_api/errors.h"

namespace gradwire::c_api {

// A struct from a caller, perhaps compiled against another header: fields unknown here must be zero, and
// those that the caller does not know yet, after its first `least` bytes, are.
template <typename Struct>
Struct read_struct(const void* from, const char* what, size_t least = sizeof(Struct)) {
  constexpr size_t kMostBytes = 4096;  // more is garbage
  size_t size = 0;
  std::memcpy(&size, from, sizeof size);
  require(size >= least && size <= kMostBytes, "{0}.size is {1}; set it to sizeof({0}), which is {2}", what,
          size, sizeof(Struct));
  const auto* bytes = static_cast<const unsigned char*>(from);
  if (std::any_of(bytes + std::min(sizeof(Struct), size), bytes + size,
                  [](unsigned char b) { return b != 0; })) {
    throw Unsupported(fmt::format("{} uses fields that this version of the library does not know", what));
  }
  Struct result{};
  std::memcpy(&result, from, std::min(sizeof result, size));
  return result;
}

// Fills a caller's struct, whose size it has set.
template <typename Struct>
void write_struct(const Struct& from, Struct* to, const char* what) {
  size_t size = 0;
  std::memcpy(&size, to, sizeof size);
  require(size >= sizeof(Struct), "{0}.size is {1}; set it to sizeof({0}), which is {2}", what, size,
          sizeof(Struct));
  std::memcpy(to, &from, sizeof from);
  to->size = size;
}

}  // namespace gradwire::c_api
