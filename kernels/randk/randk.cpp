#include "kernels/randk/randk.h"

#include <algorithm>
#include <cmath>

namespace gradwire {

int64_t randk_count(int64_t count, double ratio) {
  if (count == 0) return 0;
  // Use enough strata that a stratum's size fits into 32 bits.
  const int64_t least = count / (int64_t{1} << 31) + 1;
  return std::clamp<int64_t>(std::llround(static_cast<double>(count) * ratio), least, count);
}

RandKTable::RandKTable(const Stream& stream, const std::vector<RandKTensor>& tensors, double ratio,
                       int64_t unit) {
  for (RandKTensor t : tensors) {
    if (t.count == 0) continue;
    t.packed = (values_ + unit - 1) / unit * unit;
    t.k = randk_count(t.count, ratio);
    values_ = t.packed + t.k;
    host_.push_back(t);
  }
  device_ = make_buffer<RandKTensor>(stream.device(), count());
  to_device(stream, device_.as<RandKTensor>(), std::span<const RandKTensor>(host_));
}

}  // namespace gradwire
