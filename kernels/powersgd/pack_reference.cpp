#include "kernels/powersgd/pack.h"

namespace gradwire::reference {

void pack(const Pack& a) {
  for (const Segment& s : a.table->host()) {
    for (int64_t i = 0; i < s.count; ++i) {
      float& scattered = a.scattered[s.scattered + i];
      if (a.unpack) {
        scattered = a.packed == nullptr ? 0.0f : a.packed[s.packed + i];
      } else {
        a.packed[s.packed + i] = scattered;
      }
    }
  }
}

}  // namespace gradwire::reference
