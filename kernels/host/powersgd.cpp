#include "kernels/powersgd.h"

#include <algorithm>
#include <cfloat>
#include <limits>
#include <vector>

#include "kernels/math/bf16.h"
#include "kernels/thread_pool.h"

namespace gradwire::host {
namespace {

bool flagged(const int32_t* flags, int matrix) {
  return flags != nullptr && flags[matrix] != 0;
}

// Cuts every matrix along `lines` (rows or columns) into tasks of `grain` lines and runs body(matrix, begin,
// end).
template <typename Lines, typename Body>
void for_each_slice(const MatrixTable& table, int64_t grain, const Lines& lines, const Body& body) {
  std::vector<int64_t> first_task{0};
  for (const auto& d : table.host()) first_task.push_back(first_task.back() + (lines(d) + grain - 1) / grain);
  parallel_for(first_task.back(), 1, [&](int64_t task, int64_t) {
    auto after = std::upper_bound(first_task.begin(), first_task.end(), task);
    int matrix = static_cast<int>(after - first_task.begin()) - 1;
    int64_t begin = (task - first_task[matrix]) * grain;
    body(matrix, begin, std::min<int64_t>(lines(table.host()[matrix]), begin + grain));
  });
}

}  // namespace

void powersgd_project(const PowerSgdProject& a) {
  auto rows = [](const MatrixDescriptor& d) { return d.rows; };
  for_each_slice(*a.table, 32, rows, [&](int matrix, int64_t begin, int64_t end) {
    const auto& d = a.table->host()[matrix];
    const float* q = a.q + d.q_offset;
    for (int64_t i = begin; i < end; ++i) {
      float sum[kMaxPowerSgdRank] = {};
      for (int64_t j = 0; j < d.cols; ++j) {
        int64_t at = d.offset + i * d.cols + j;
        float m = a.grad[at];
        if (a.residual != nullptr) {
          m += a.residual[at];
          if (is_finite(a.grad[at])) a.residual[at] = std::clamp(m, -FLT_MAX, FLT_MAX);
        }
        for (int k = 0; k < d.rank; ++k) sum[k] += m * q[j * d.rank + k];
      }
      std::copy(sum, sum + d.rank, a.p + d.p_offset + i * d.rank);
    }
  });
}

void powersgd_back_project(const PowerSgdBackProject& a) {
  auto cols = [](const MatrixDescriptor& d) { return d.cols; };
  constexpr int64_t kPanel = 64;
  for_each_slice(*a.table, kPanel, cols, [&](int matrix, int64_t begin, int64_t end) {
    const auto& d = a.table->host()[matrix];
    const float* p = a.p + d.p_offset;
    float* q = a.q + d.q_offset;
    if (flagged(a.flags, matrix)) {
      std::fill(q + begin * d.rank, q + end * d.rank, 0.0f);
      for (int64_t i = 0; a.residual != nullptr && i < d.rows; ++i) {
        for (int64_t at = d.offset + i * d.cols + begin; at < d.offset + i * d.cols + end; ++at) {
          if (!is_finite(a.grad[at])) continue;  // holds the old residual already
          float old = a.residual[at] - a.grad[at];
          a.residual[at] = is_finite(old) ? old : 0.0f;
        }
      }
      return;
    }
    const float* m = (a.residual != nullptr ? a.residual : a.grad) + d.offset;
    float sum[kMaxPowerSgdRank][kPanel] = {};
    for (int64_t i = 0; i < d.rows; ++i) {
      for (int k = 0; k < d.rank; ++k) {
        float pik = p[i * d.rank + k];
        for (int64_t j = begin; j < end; ++j) sum[k][j - begin] += pik * m[i * d.cols + j];
      }
    }
    for (int64_t j = begin; j < end; ++j) {
      for (int k = 0; k < d.rank; ++k) q[j * d.rank + k] = sum[k][j - begin];
    }
    for (int64_t i = 0; a.residual != nullptr && i < d.rows; ++i) {
      float* e = a.residual + d.offset + i * d.cols;
      float left[kPanel];
      std::copy(e + begin, e + end, left);
      for (int k = 0; k < d.rank; ++k) {
        float pik = p[i * d.rank + k];
        for (int64_t j = 0; j < end - begin; ++j) left[j] -= pik * sum[k][j];
      }
      for (int64_t j = begin; j < end; ++j) e[j] = is_finite(left[j - begin]) ? left[j - begin] : 0.0f;
    }
  });
}

void powersgd_reconstruct(const PowerSgdReconstruct& a) {
  auto rows = [](const MatrixDescriptor& d) { return d.rows; };
  for_each_slice(*a.table, 32, rows, [&](int matrix, int64_t begin, int64_t end) {
    const auto& d = a.table->host()[matrix];
    const float* q = a.q + d.q_offset;
    const float* q_lost = a.q_lost != nullptr ? a.q_lost + d.q_offset : nullptr;
    for (int64_t i = begin; i < end; ++i) {
      const float* p = a.p + d.p_offset + i * d.rank;
      for (int64_t j = 0; j < d.cols; ++j) {
        int64_t at = d.offset + i * d.cols + j;
        if (flagged(a.flags, matrix)) {
          a.grad[at] = std::numeric_limits<float>::quiet_NaN();
          continue;
        }
        float sum = 0.0f, lost = 0.0f;
        for (int k = 0; k < d.rank; ++k) sum += p[k] * q[j * d.rank + k];
        a.grad[at] = a.scale * sum;
        if (q_lost == nullptr) continue;
        for (int k = 0; k < d.rank; ++k) lost += p[k] * q_lost[j * d.rank + k];
        float e = a.residual[at] + lost;
        if (is_finite(e)) a.residual[at] = e;
      }
    }
  });
}

}  // namespace gradwire::host
