#include "kernels/powersgd/pack.h"

namespace gradwire::reference {

void pack(const Pack& a) {
  for (const Segment& s : a.table->host()) {
    for (int64_t i = 0; i < s.count; ++i) {
      float& scattered = a.scattered[s.scattered + i];
      float& packed = a.packed[s.packed + i];
      (a.unpack ? scattered : packed) = a.unpack ? packed : scattered;
    }
  }
}

}  // namespace gradwire::reference
