// The interposer's settings, and its decision about a call of ncclAllReduce. Makes no CUDA or NCCL calls, so
// tests need no GPU.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <functional>
#include <string>

#include "collectives/spec/spec.h"

namespace gradwire::interposer {

// Settings from the environment; docs/environment.md has the table.
struct Settings {
  bool on = true;
  std::string why_off;  // the reason for the log if `on` is false
  CompressionSpec spec;
  int64_t min_bytes = 1 << 20;
  int64_t max_state_bytes = int64_t{4} << 30;
  int ranks_per_node = 0;
  bool dry_run = false;

  // Reads the settings with `lookup`. Never throws: invalid settings turn the interposer off, with a reason
  // in why_off.
  static Settings read(const std::function<const char*(const char*)>& lookup);
  // Returns a number that is equal on ranks with equivalent settings. A double represents the number exactly.
  // Returns 0 if the interposer is off.
  uint64_t fingerprint() const;
};

// A call of ncclAllReduce.
struct Request {
  int64_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t op = ncclSum;
  int group_depth = 0;
  bool capturing = false;
};

enum class Decision {
  compressed,
  untouched,         // off, unsupported type or operation, or too small
  untouched_group,   // between ncclGroupStart and ncclGroupEnd
  untouched_capture  // captured in a CUDA graph
};
// Decides how to handle a call. Returns the same decision on all ranks with the same settings.
Decision decide(const Settings& settings, const Request& request);

// Returns whether ranks may use this call to compare their settings, once per communicator. The answer is
// independent of the settings, so all ranks get the same answer.
bool may_compare(const Request& request);

// Returns the number of bytes in a text such as "4M" (4194304); -1 if the text is not a size.
int64_t parse_bytes(const std::string& text);

}  // namespace gradwire::interposer
