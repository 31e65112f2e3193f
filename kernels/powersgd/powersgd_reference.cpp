// Scalar reference of the PowerSGD passes: sums in double, one element of the result after another.
#include <algorithm>
#include <cfloat>
#include <limits>
#include <vector>

#include "kernels/math/bf16.h"
#include "kernels/powersgd/powersgd.h"

namespace gradwire::reference {
namespace {

bool flagged(const int32_t* flags, int matrix) {
  return flags != nullptr && flags[matrix] != 0;
}

// M = grad + residual of one element, for the product; stored into the residual if there is one.
float form_m(const float* grad, float* residual, int64_t at) {
  float m = grad[at];
  if (residual != nullptr) {
    m += residual[at];
    if (is_finite(grad[at])) residual[at] = std::clamp(m, -FLT_MAX, FLT_MAX);
  }
  return m;
}

// The residual M of a matrix that was not finite becomes the previous step's.
void restore(const float* grad, float* residual, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; ++at) {
    if (!is_finite(grad[at])) continue;  // holds the old residual already
    float old = residual[at] - grad[at];
    residual[at] = is_finite(old) ? old : 0.0f;
  }
}

}  // namespace

void powersgd_project(const PowerSgdProject& a) {
  for (const auto& d : a.table->host()) {
    const float* q = a.q + d.q_offset;
    for (int64_t i = 0; i < d.rows; ++i) {
      std::vector<double> sum(d.rank, 0.0);
      for (int64_t j = 0; j < d.cols; ++j) {
        float m = form_m(a.grad, a.residual, d.offset + i * d.cols + j);
        for (int k = 0; k < d.rank; ++k) sum[k] += static_cast<double>(m) * q[j * d.rank + k];
      }
      for (int k = 0; k < d.rank; ++k) a.p[d.p_offset + i * d.rank + k] = static_cast<float>(sum[k]);
    }
  }
}

void powersgd_back_project(const PowerSgdBackProject& a) {
  for (int matrix = 0; matrix < a.table->count(); ++matrix) {
    const auto& d = a.table->host()[matrix];
    float* q = a.q + d.q_offset;
    const float* p = a.p + d.p_offset;
    int64_t elements = int64_t{d.rows} * d.cols;
    if (flagged(a.flags, matrix)) {
      std::fill(q, q + int64_t{d.cols} * d.rank, 0.0f);
      if (a.residual != nullptr) restore(a.grad, a.residual, d.offset, d.offset + elements);
      continue;
    }
    const float* m = (a.residual != nullptr ? a.residual : a.grad) + d.offset;
    for (int64_t j = 0; j < d.cols; ++j) {
      for (int k = 0; k < d.rank; ++k) {
        double sum = 0.0;
        for (int64_t i = 0; i < d.rows; ++i)
          sum += static_cast<double>(m[i * d.cols + j]) * p[i * d.rank + k];
        q[j * d.rank + k] = static_cast<float>(sum);
      }
    }
    if (a.residual == nullptr) continue;
    for (int64_t i = 0; i < d.rows; ++i) {
      for (int64_t j = 0; j < d.cols; ++j) {
        double left = m[i * d.cols + j];
        for (int k = 0; k < d.rank; ++k) left -= static_cast<double>(p[i * d.rank + k]) * q[j * d.rank + k];
        float e = static_cast<float>(left);
        a.residual[d.offset + i * d.cols + j] = is_finite(e) ? e : 0.0f;
      }
    }
  }
}

void powersgd_project_onto(const PowerSgdProjectOnto& a) {
  for (const auto& d : a.table->host()) {
    for (int64_t j = 0; j < d.cols; ++j) {
      std::vector<double> sum(d.rank, 0.0);
      for (int64_t i = 0; i < d.rows; ++i) {
        float m = form_m(a.grad, a.residual, d.offset + i * d.cols + j);
        for (int k = 0; k < d.rank; ++k) sum[k] += static_cast<double>(m) * a.p[d.p_offset + i * d.rank + k];
      }
      for (int k = 0; k < d.rank; ++k) a.q[d.q_offset + j * d.rank + k] = static_cast<float>(sum[k]);
    }
  }
}

void powersgd_reconstruct(const PowerSgdReconstruct& a) {
  for (int matrix = 0; matrix < a.table->count(); ++matrix) {
    const auto& d = a.table->host()[matrix];
    if (flagged(a.flags, matrix) && a.restore && a.residual != nullptr) {
      restore(a.grad, a.residual, d.offset, d.offset + int64_t{d.rows} * d.cols);
    }
    for (int64_t i = 0; i < d.rows; ++i) {
      for (int64_t j = 0; j < d.cols; ++j) {
        int64_t at = d.offset + i * d.cols + j;
        if (flagged(a.flags, matrix)) {
          a.grad[at] = std::numeric_limits<float>::quiet_NaN();
          continue;
        }
        double sum = 0.0, lost = 0.0;
        for (int k = 0; k < d.rank; ++k) {
          const int64_t p_at = d.p_offset + i * d.rank + k, q_at = d.q_offset + j * d.rank + k;
          sum += static_cast<double>(a.p[p_at]) * a.q[q_at];
          if (a.p_lost != nullptr) lost += static_cast<double>(a.p_lost[p_at]) * a.q[q_at];
          if (a.q_lost != nullptr) lost += static_cast<double>(a.p[p_at]) * a.q_lost[q_at];
        }
        a.grad[at] = static_cast<float>(a.scale * sum);
        if (a.p_lost != nullptr || a.q_lost != nullptr) {
          float e = static_cast<float>(a.residual[at] + lost);
          if (is_finite(e)) a.residual[at] = e;
        }
      }
    }
  }
}

}  // namespace gradwire::reference
