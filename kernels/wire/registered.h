// Wire formats that a program adds at run time, as callbacks on the host: gw_format_register(), and
// gradwire.register_format() in Python. A registered format is in the table like any other format, so specs,
// programs, error feedback and schedules work with it.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/wire/format.h"

namespace gradwire {

inline constexpr int64_t kMaxRegisteredBlock = 65536;                     // values per block
inline constexpr int64_t kMaxRegisteredBytes = 16 * kMaxRegisteredBlock;  // bytes per block

// The callbacks of a format, called from any thread, concurrently. They return null, or an error text that
// stays valid until the same thread's next call returns. Arrays are (blocks, block) values and (blocks,
// bytes) bytes, contiguous, of any alignment. Output that a callback does not write is 0.
struct FormatCallbacks {
  const char* (*encode)(void* user, const float* values, int64_t blocks, uint8_t* bytes) = nullptr;
  const char* (*decode)(void* user, const uint8_t* bytes, int64_t blocks, float* values) = nullptr;
  void* user = nullptr;
};

// Adds a format to the table, after trying the callbacks on a few blocks. If a format of this name and these
// sizes is registered, replaces its callbacks. New ops use the new callbacks; the old callbacks may still be
// running.
//
// Throws BadInput that names the format if the name is invalid or taken, if sizes are out of range or differ
// from the registered sizes, or if a callback fails, writes too much, or writes too little.
//
// In an op, a callback's error, or a write beyond the callback's blocks, is a CommError on the stream, with
// the same consequences as the loss of a peer.
void register_wire_format(const std::string& name, int64_t block, int64_t bytes,
                          const FormatCallbacks& callbacks);

// Returns whether this thread is inside a callback. A callback must not wait for other ops.
bool in_format_callback();

}  // namespace gradwire
