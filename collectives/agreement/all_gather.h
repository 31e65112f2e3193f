// All-gather of a few values, for agreement between ranks at set-up.
#pragma once

#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "collectives/transport/transport.h"

namespace gradwire {

// Gathers every rank's bytes; result[r] holds rank r's bytes. All ranks pass the same number of bytes. The
// exchange runs on `stream`, after earlier work on `stream`. Collective; blocks.
std::vector<std::string> all_gather_bytes(Transport& transport, const Stream& stream, std::string_view mine,
                                          const std::string& what);

// Gathers every rank's numbers, or structs without pointers and padding. Otherwise like all_gather_bytes().
template <typename T = double>
std::vector<std::vector<T>> all_gather(Transport& transport, const Stream& stream, const std::vector<T>& mine,
                                       const std::string& what) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<std::vector<T>> result;
  const std::string_view bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(T));
  for (const std::string& theirs : all_gather_bytes(transport, stream, bytes, what)) {
    std::vector<T>& values = result.emplace_back(mine.size());
    if (!values.empty()) std::memcpy(values.data(), theirs.data(), theirs.size());
  }
  return result;
}

// Gathers one value of every rank.
template <typename T>
std::vector<T> all_gather_value(Transport& transport, const Stream& stream, const T& mine,
                                const std::string& what) {
  std::vector<T> values;
  for (const auto& theirs : all_gather(transport, stream, std::vector<T>{mine}, what))
    values.push_back(theirs[0]);
  return values;
}

}  // namespace gradwire
