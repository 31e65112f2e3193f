// Wire formats that a program brings along at run time, as callbacks on the host: gw_format_register(), and
// gradwire.register_format() in Python. A registered format is in the table like any other, so specs,
// programs, error feedback and schedules follow.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/wire/format.h"

namespace gradwire {

inline constexpr int64_t kMaxRegisteredBlock = 65536;                     // values
inline constexpr int64_t kMaxRegisteredBytes = 16 * kMaxRegisteredBlock;  // of a block

// Any thread calls them, several at once. They return null, or what went wrong, in a text that stays valid
// until they return again in the same thread. (blocks, block) values, (blocks, bytes) bytes, without gaps, of
// any alignment. What they leave unwritten is 0.
struct FormatCallbacks {
  const char* (*encode)(void* user, const float* values, int64_t blocks, uint8_t* bytes) = nullptr;
  const char* (*decode)(void* user, const uint8_t* bytes, int64_t blocks, float* values) = nullptr;
  void* user = nullptr;
};

// Adds a format to the table, after trying it on a few blocks. A format of this name and these sizes that was
// registered before gets the new callbacks, which ops use from then on; the old ones may still be running.
//
// Throws BadInput that names the format: not a name, taken, sizes out of range, other sizes than before, or a
// callback that fails, writes too much, or writes too little.
//
// In an op, what a callback returns as an error, or writes beyond its blocks, is a CommError on the stream:
// it is as final as a lost peer.
void register_wire_format(const std::string& name, int64_t block, int64_t bytes,
                          const FormatCallbacks& callbacks);

// Whether this thread is in a callback, where it must not wait for other ops.
bool in_format_callback();

}  // namespace gradwire
