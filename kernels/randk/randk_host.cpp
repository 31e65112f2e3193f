// Random-k on the host: the k chosen elements first, then all other elements in one vectorized pass.
//
// Results do not depend on the number of threads: one thread owns each element and each value. Exception:
// several non-finite elements may write the same NaN to their stratum's value.
#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/math/small_float.h"
#include "kernels/randk/randk.h"
#include "kernels/simd/vector.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

constexpr int64_t kStrataGrain = 4096;  // values per task
constexpr int64_t kGrain = 64 * 1024;   // elements per task
constexpr int64_t kPiece = 4 * 1024;    // elements that stay in the first-level cache between two passes

// Moves strata [begin, end) of a tensor from grad and residual to the values; grad and residual become 0 at
// the chosen elements.
void take(const RandKGather& a, const RandKTensor& t, int64_t begin, int64_t end) {
  const RandKDraw draw = a.draw_of(t);
  const int64_t rotation = draw.rotation(t.count);
  for (int64_t j = begin; j < end; ++j) {
    const int64_t at = t.offset + draw.chosen(t.strata(), j, rotation);
    float value = a.grad[at];
    if (a.residual != nullptr) {
      value += a.residual[at];
      a.residual[at] = 0.0f;
    }
    a.grad[at] = 0.0f;
    a.values[t.packed + j] = value;
    a.chosen[t.packed + j] = at;
  }
}

// Sets the values of the strata of all non-finite elements of [begin, end) to NaN. Non-finite elements are
// rare.
void show_non_finite(const RandKGather& a, int64_t begin, int64_t end) {
  const auto& tensors = a.table->host();
  for (int64_t at = begin; at < end; ++at) {
    if (is_finite(a.grad[at])) continue;
    auto after = std::ranges::upper_bound(tensors, at, {}, &RandKTensor::offset);
    if (after == tensors.begin()) continue;
    const RandKTensor& t = *(after - 1);
    if (at >= t.offset + t.count) continue;
    const RandKDraw draw = a.draw_of(t);
    const int64_t stratum = draw.stratum_of(t.strata(), at - t.offset, draw.rotation(t.count));
    std::atomic_ref<float>(a.values[t.packed + stratum])
        .store(std::numeric_limits<float>::quiet_NaN(), std::memory_order_relaxed);
  }
}

// Returns whether all elements of grad are finite.
GW_SIMD bool all_finite(const float* grad, int64_t count) {
  uint32_t bad = 0;
#pragma omp simd reduction(| : bad)
  for (int64_t i = 0; i < count; ++i) bad |= is_finite(grad[i]) ? 0u : 1u;
  return bad == 0;
}

// Adds grad to the residual and sets grad to 0.
GW_SIMD void keep(float* grad, float* residual, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float g = grad[i], e = residual[i];
    float sum = g + e;
    sum = sum > FLT_MAX ? FLT_MAX : sum;
    sum = sum < -FLT_MAX ? -FLT_MAX : sum;
    residual[i] = is_finite(g) ? sum : e;
    grad[i] = 0.0f;
  }
}

}  // namespace

void randk_gather(const RandKGather& a) {
  for (size_t i = 0; i < a.table->host().size(); ++i) {
    const RandKTensor& t = a.table->host()[i];
    std::fill(a.values + t.packed + t.k, a.values + a.table->gap_end(i), 0.0f);
    std::fill(a.chosen + t.packed + t.k, a.chosen + a.table->gap_end(i), int64_t{-1});
    parallel_for(t.k, kStrataGrain, [&](int64_t begin, int64_t end) { take(a, t, begin, end); });
  }
  parallel_for(a.count, kGrain, [&](int64_t range_begin, int64_t range_end) {
    for (int64_t begin = range_begin; begin < range_end; begin += kPiece) {
      const int64_t end = std::min(begin + kPiece, range_end);
      if (!all_finite(a.grad + begin, end - begin)) show_non_finite(a, begin, end);
      if (a.residual != nullptr) {
        keep(a.grad + begin, a.residual + begin, end - begin);
      } else {
        std::fill(a.grad + begin, a.grad + end, 0.0f);
      }
    }
  });
}

void randk_scatter(const RandKScatter& a) {
  parallel_for(a.count, kStrataGrain, [&](int64_t begin, int64_t end) {
    const int64_t* const chosen = a.chosen;
    const auto scatter = [=](const float* values, float* to) {
      for (int64_t j = begin; j < end; ++j) {
        if (chosen[j] >= 0) to[chosen[j]] = values[j];
      }
    };
    scatter(a.values, a.grad);
    if (a.lost != nullptr) scatter(a.lost, a.residual);
  });
}

}  // namespace gradwire::host

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

// The scalar reference: marks the chosen elements, then processes one element at a time.
namespace gradwire::reference {

void randk_gather(const RandKGather& a) {
  std::fill_n(a.values, a.table->values(), 0.0f);
  std::fill_n(a.chosen, a.table->values(), int64_t{-1});
  for (const RandKTensor& t : a.table->host()) {
    const RandKDraw draw = a.draw_of(t);
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
