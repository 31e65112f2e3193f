// Wire formats that a program adds at run time, as callbacks on the host: gw_format_register(), and
// gradwire.register_format() in Python. A registered format is in the table like any other, so specs,
// programs, error feedback and schedules work with it.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/wire/format.h"

namespace gradwire {

inline constexpr int64_t kMaxRegisteredBlock = 65536;                     // values
inline constexpr int64_t kMaxRegisteredBytes = 16 * kMaxRegisteredBlock;  // per block

// Called from any thread, concurrently. They return null, or an error text that stays valid until the same
// thread's next call returns. Arrays are (blocks, block) values and (blocks, bytes) bytes, contiguous, of any
// alignment. Output that they do not write is 0.
struct FormatCallbacks {
  const char* (*encode)(void* user, const float* values, int64_t blocks, uint8_t* bytes) = nullptr;
  const char* (*decode)(void* user, const uint8_t* bytes, int64_t blocks, float* values) = nullptr;
  void* user = nullptr;
};

// Adds a format to the table, after trying it on a few blocks. If a format of this name and these sizes is
// registered, replaces its callbacks; ops use the new ones, while the old ones may still be running.
//
// Throws BadInput that names the format: not a name, taken, sizes out of range, sizes that differ from the
// registered ones, or a callback that fails, writes too much, or writes too little.
//
// In an op, a callback's error, or a write beyond its blocks, is a CommError on the stream, as final as a
// lost peer.
void register_wire_format(const std::string& name, int64_t block, int64_t bytes,
                          const FormatCallbacks& callbacks);

// Returns whether this thread is in a callback, where it must not wait for other ops.
bool in_format_callback();

}  // namespace gradwire
