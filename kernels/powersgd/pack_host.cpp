#include "kernels/powersgd/pack.h"

#include <cstring>

namespace gradwire {
namespace reference {

void pack(const Pack& a) {
  for (const Segment& s : a.table->host()) {
    for (int64_t i = 0; i < s.count; ++i) {
      float& scattered = a.scattered[s.scattered + i];
      float& packed = a.packed[s.packed + i];
      (a.unpack ? scattered : packed) = a.unpack ? packed : scattered;
    }
  }
}

}  // namespace reference

namespace host {

void pack(const Pack& a) {
  for (const Segment& s : a.table->host()) {
    float* scattered = a.scattered + s.scattered;
    float* packed = a.packed + s.packed;
    std::memcpy(a.unpack ? scattered : packed, a.unpack ? packed : scattered, s.count * sizeof(float));
  }
}

}  // namespace host
}  // namespace gradwire
