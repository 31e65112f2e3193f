// What the interposer does with a call of ncclAllReduce, and its settings. No CUDA and no NCCL calls here, so
// that all of it can be tested anywhere.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <functional>
#include <string>

#include "collectives/spec/spec.h"

namespace gradwire::interposer {

// From the environment; docs/for-nccl-users.md has the table.
struct Settings {
  bool on = true;
  std::string why_off;  // when not `on`: for the log line
  CompressionSpec spec;
  int64_t min_bytes = 1 << 20;
  int64_t max_state_bytes = int64_t{4} << 30;
  int ranks_per_node = 0;
  bool dry_run = false, quiet = false;

  // Never throws: settings that cannot be used turn the interposer off, and say so.
  static Settings read(const std::function<const char*(const char*)>& lookup);
  // Equal on ranks that compress the same; exact as a double. 0 when off.
  uint64_t fingerprint() const;
};

// What one call looks like before anything is done.
struct Request {
  int64_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t op = ncclSum;
  int group_depth = 0;
  bool capturing = false;
};

enum class Path {
  compressed,
  untouched,        // another type, operation, or too small
  untouched_group,  // between ncclGroupStart and ncclGroupEnd
  untouched_capture
};
// The same on all ranks whose settings agree: it depends on nothing that may differ between them.
Path decide(const Settings& settings, const Request& request);

// Whether ranks may use this call to compare their settings, which they do once per communicator: whatever
// the settings are, all ranks answer alike.
bool may_compare(const Request& request);

// "4M" -> 4194304; negative when it is not a size.
int64_t parse_bytes(const std::string& text);

}  // namespace gradwire::interposer
