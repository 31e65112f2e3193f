// Checks that all ranks agree, so that a disagreement is reported at once and with its cause.
#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "collectives/transport/transport.h"

namespace gradwire {

// Checks that all ranks make the same statements in the same order. Otherwise fails the group and throws
// CommError, which quotes two ranks on the first statement that differs:
//   ranks disagree: gw_reducer_create has "tensor 1: 'a' (8)" on rank 0, "tensor 1: 'b' (8)" on rank 1
// `what`: the call that makes the statements. Sends 16 bytes to each peer if the ranks agree. Collective.
void agree_on(Transport& transport, const Stream& stream, const std::vector<std::string>& statements,
              const std::string& what);

// All-gather of a few values, for agreement between ranks at set-up.

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

// An instant expressed on every rank's clock, even if the clocks differ. It aligns traces of different
// processes.

struct SharedInstant {
  std::chrono::steady_clock::time_point here;  // the instant on this process's clock
  double error_us = 0;                         // upper bound of the error
};

// Returns one instant on every rank's clock, by a few round trips between rank 0 and each other rank. The
// error is half of the shortest round trip. Clocks whose difference is at most the error are treated as
// equal, as for processes on one machine. Afterwards, clocks of two machines drift apart by some microseconds
// per second. `now`: reads this process's clock; tests replace it. Collective; blocks.
SharedInstant agree_on_instant(
    Transport& transport,
    const std::function<std::chrono::steady_clock::time_point()>& now = std::chrono::steady_clock::now);

}  // namespace gradwire
