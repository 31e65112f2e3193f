#include "kernels/powersgd/pack.h"

#include <algorithm>

namespace gradwire {

SegmentTable::SegmentTable(const Stream& stream, std::vector<Segment> segments) : host_(std::move(segments)) {
  for (const Segment& s : host_) longest_ = std::max(longest_, s.count);
  device_ = make_buffer<Segment>(stream.device(), count());
  to_device(stream, device_.as<Segment>(), std::span<const Segment>(host_));
}

}  // namespace gradwire
