#include <algorithm>
#include <cstring>

#include "kernels/powersgd/pack.h"

namespace gradwire {

SegmentTable::SegmentTable(const Stream& stream, std::vector<Segment> segments) : host_(std::move(segments)) {
  for (const Segment& s : host_) longest_ = std::max(longest_, s.count);
  device_ = make_buffer<Segment>(stream.device(), count());
  to_device(stream, device_.as<Segment>(), std::span<const Segment>(host_));
}

void host::pack(const Pack& a) {
  for (const Segment& s : a.table->host()) {
    float* scattered = a.scattered + s.scattered;
    if (a.unpack && a.packed == nullptr) {
      std::fill_n(scattered, s.count, 0.0f);
      continue;
    }
    float* packed = a.packed + s.packed;
    std::memcpy(a.unpack ? scattered : packed, a.unpack ? packed : scattered, s.count * sizeof(float));
  }
}

}  // namespace gradwire
