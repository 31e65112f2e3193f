// Scalar reference of random-k: marks the chosen elements, then processes one element at a time.
#include <algorithm>
#include <cfloat>
#include <limits>

#include "kernels/math/small_float.h"
#include "kernels/randk/randk.h"

namespace gradwire::reference {

void randk_gather(const RandKGather& a) {
  std::fill_n(a.values, a.table->values(), 0.0f);
  std::fill_n(a.chosen, a.table->values(), int64_t{-1});
  for (const RandKTensor& t : a.table->host()) {
    const RandKDraw draw{a.seed, a.step != nullptr ? *a.step : 0, t.index};
    const int64_t rotation = draw.rotation(t.count);
    // The stratum of a chosen element; -1: not chosen.
    std::vector<int64_t> stratum_of(static_cast<size_t>(t.count), -1);
    for (int64_t j = 0; j < t.k; ++j) {
      const int64_t element = draw.chosen(t.strata(), j, rotation);
      stratum_of[static_cast<size_t>(element)] = j;
      a.chosen[t.packed + j] = t.offset + element;
    }
    for (int64_t i = 0; i < t.count; ++i) {
      const int64_t j = stratum_of[static_cast<size_t>(i)];
      if (j < 0) continue;
      const float old = a.residual != nullptr ? a.residual[t.offset + i] : 0.0f;
      a.values[t.packed + j] = a.grad[t.offset + i] + old;
      if (a.residual != nullptr) a.residual[t.offset + i] = 0.0f;
    }
    for (int64_t i = 0; i < t.count; ++i) {
      if (stratum_of[static_cast<size_t>(i)] >= 0) continue;
      const float g = a.grad[t.offset + i];
      if (!is_finite(g)) {
        a.values[t.packed + draw.stratum_of(t.strata(), i, rotation)] =
            std::numeric_limits<float>::quiet_NaN();
      } else if (a.residual != nullptr) {
        float& e = a.residual[t.offset + i];
        e = std::clamp(g + e, -FLT_MAX, FLT_MAX);
      }
    }
  }
  std::fill(a.grad, a.grad + a.count, 0.0f);
}

void randk_scatter(const RandKScatter& a) {
  for (int64_t j = 0; j < a.count; ++j) {
    if (a.chosen[j] < 0) continue;
    a.grad[a.chosen[j]] = a.values[j];
    if (a.lost != nullptr) a.residual[a.chosen[j]] = a.lost[j];
  }
}

}  // namespace gradwire::reference
