// Copies structs from and to callers, which may have been compiled with another version of the header.
#pragma once

#include <algorithm>
#include <cstring>

#include "collectives/c_api/errors.h"

namespace gradwire::c_api {

// Returns a copy of a caller's struct. A longer struct must have zeros after the fields that this version
// knows. A shorter struct, of at least `least` bytes, is extended with zeros.
template <typename Struct>
Struct read_struct(const void* from, const char* what, size_t least = sizeof(Struct)) {
  constexpr size_t kMostBytes = 4096;  // a larger size means that the caller did not initialize the struct
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

// Fills a caller's struct. The caller has set the struct's field `size`.
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
