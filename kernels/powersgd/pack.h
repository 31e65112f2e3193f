// Gathers scattered pieces of one array into another, and scatters them back, so that dense tensors share a
// collective with the PowerSGD factors. One launch handles all pieces. Bytes per element: 8. Limit: memory
// bandwidth.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/op.h"

namespace gradwire {

struct Segment {
  int64_t scattered = 0;  // start of the piece in the scattered array, in elements
  int64_t packed = 0;     // start in the packed array, in elements
  int64_t count = 0;
};

// The pieces, on the host and on the device. Built during set-up only; must outlive the ops that use the
// table.
class SegmentTable {
 public:
  SegmentTable() = default;
  SegmentTable(const Stream& stream, std::vector<Segment> segments);

  const std::vector<Segment>& host() const { return host_; }
  const Segment* device() const { return device_.as<const Segment>(); }
  int count() const { return static_cast<int>(host_.size()); }
  int64_t longest() const { return longest_; }

 private:
  std::vector<Segment> host_;
  Buffer device_;
  int64_t longest_ = 0;
};

// Arguments of packing: packed[segment.packed + i] = scattered[segment.scattered + i] for every segment, or
// the reverse. Unpacking from null writes zeros.
struct Pack {
  const SegmentTable* table = nullptr;
  float* scattered = nullptr;
  float* packed = nullptr;
  bool unpack = false;
};
GW_OP(pack, Pack)

}  // namespace gradwire
