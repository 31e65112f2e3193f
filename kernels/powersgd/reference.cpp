// Scalar reference of the PowerSGD passes: sums in double, one result element at a time.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/math/small_float.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/powersgd/powersgd.h"

namespace gradwire::reference {
namespace {

// Returns E of element (i, j): the residual plus the pending product, whose terms are added in order. Each
// addition is rounded once, as in the fast paths with an FMA.
float settled(const PendingFactors& pending, int matrix, const MatrixDescriptor& d, int64_t i, int64_t j,
              float residual) {
  if (!pending.exist(matrix)) return residual;
  for (int k = 0; k < d.rank; ++k) {
    residual =
        std::fma(pending.p[d.p_offset + i * d.rank + k], pending.q[d.q_offset + j * d.rank + k], residual);
  }
  return is_finite(residual) ? residual : 0.0f;
}

// Returns M = grad + E of element (i, j) for the product; stores M into the residual if there is one.
template <typename Project>
float form_m(const Project& a, int matrix, const MatrixDescriptor& d, int64_t i, int64_t j) {
  const int64_t at = d.offset + i * d.cols + j;
  float m = a.grad[at];
  if (a.residual != nullptr) {
    const float e = settled(a.pending, matrix, d, i, j, a.residual[at]);
    m += e;
    a.residual[at] = is_finite(a.grad[at]) ? std::clamp(m, -FLT_MAX, FLT_MAX) : e;
  }
  return m;
}

using Column = std::vector<double>;

double dot(const Column& a, const Column& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Makes `column` orthogonal to `done`, with norm 1. Returns false when `column` is zero or depends on `done`.
bool add_column(std::vector<Column>& done, Column column) {
  double before = dot(column, column);
  if (before == 0.0) return false;
  for (int round = 0; round < 3; ++round) {
    for (const auto& other : done) {
      double along = dot(column, other);
      for (size_t i = 0; i < column.size(); ++i) column[i] -= along * other[i];
    }
    if (dot(column, column) <= kDependentPivot * before) return false;
  }
  double scale = 1.0 / std::sqrt(dot(column, column));
  for (auto& x : column) x *= scale;
  done.push_back(column);
  return true;
}

}  // namespace

void powersgd_project(const PowerSgdProject& a) {
  for (int matrix = 0; matrix < a.table->count(); ++matrix) {
    const auto& d = a.table->host()[matrix];
    const float* q = a.q + d.q_offset;
    for (int64_t i = 0; i < d.rows; ++i) {
      std::vector<double> sum(d.rank, 0.0);
      for (int64_t j = 0; j < d.cols; ++j) {
        const double m = form_m(a, matrix, d, i, j);
        for (int k = 0; k < d.rank; ++k) sum[k] += m * q[j * d.rank + k];
      }
      for (int k = 0; k < d.rank; ++k) a.p[d.p_offset + i * d.rank + k] = static_cast<float>(sum[k]);
    }
  }
}

void powersgd_form(const PowerSgdForm& a) {
  for (int matrix = 0; matrix < a.table->count(); ++matrix) {
    const auto& d = a.table->host()[matrix];
    for (int64_t i = 0; i < d.rows; ++i) {
      for (int64_t j = 0; j < d.cols; ++j) {
        if (!is_finite(form_m(a, matrix, d, i, j))) a.marks[matrix] = 1;
      }
    }
  }
}

void powersgd_overwrite(const PowerSgdOverwrite& a) {
  for (int matrix = 0; matrix < a.table->count(); ++matrix) {
    if (!flagged(a.marks, matrix)) continue;
    const auto& d = a.table->host()[matrix];
    const auto rank = static_cast<int64_t>(d.rank);
    if (a.p != nullptr) std::fill_n(a.p + d.p_offset, d.rows * rank, a.value);
    if (a.q != nullptr) std::fill_n(a.q + d.q_offset, d.cols * rank, a.value);
  }
}

void powersgd_back_project(const PowerSgdBackProject& a) {
  for (int matrix = 0; matrix < a.table->count(); ++matrix) {
    const auto& d = a.table->host()[matrix];
    for (int64_t j = 0; j < d.cols; ++j) {
      for (int k = 0; k < d.rank; ++k) {
        double sum = 0.0;
        for (int64_t i = 0; i < d.rows && !flagged(a.flags, matrix); ++i) {
          sum += static_cast<double>(a.m[d.offset + i * d.cols + j]) * a.p[d.p_offset + i * d.rank + k];
        }
        a.q[d.q_offset + j * d.rank + k] = static_cast<float>(sum);
      }
    }
  }
}

void powersgd_project_onto(const PowerSgdProjectOnto& a) {
  for (int matrix = 0; matrix < a.table->count(); ++matrix) {
    const auto& d = a.table->host()[matrix];
    for (int64_t j = 0; j < d.cols; ++j) {
      std::vector<double> sum(d.rank, 0.0);
      for (int64_t i = 0; i < d.rows; ++i) {
        const double m = form_m(a, matrix, d, i, j);
        for (int k = 0; k < d.rank; ++k) sum[k] += m * a.p[d.p_offset + i * d.rank + k];
      }
      for (int k = 0; k < d.rank; ++k) a.q[d.q_offset + j * d.rank + k] = static_cast<float>(sum[k]);
    }
  }
}

void powersgd_reconstruct(const PowerSgdReconstruct& a) {
  for (int matrix = 0; matrix < a.table->count(); ++matrix) {
    const auto& d = a.table->host()[matrix];
    if (flagged(a.flags, matrix)) {
      const int64_t end = d.offset + int64_t{d.rows} * d.cols;
      for (int64_t i = d.offset; a.residual != nullptr && i < end; ++i) restore(a.grad[i], a.residual[i]);
      std::fill(a.grad + d.offset, a.grad + end, std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    for (int64_t i = 0; i < d.rows; ++i) {
      for (int64_t j = 0; j < d.cols; ++j) {
        double sum = 0.0;
        for (int k = 0; k < d.rank; ++k) {
          sum += static_cast<double>(a.p[d.p_offset + i * d.rank + k]) * a.q[d.q_offset + j * d.rank + k];
        }
        a.grad[d.offset + i * d.cols + j] = static_cast<float>(a.scale * sum);
      }
    }
  }
}

void powersgd_settle(const PowerSgdSettle& a) {
  for (int matrix = 0; matrix < a.table->count(); ++matrix) {
    if (a.matrix >= 0 && a.matrix != matrix) continue;
    const auto& d = a.table->host()[matrix];
    for (int64_t i = 0; i < d.rows; ++i) {
      for (int64_t j = 0; j < d.cols; ++j) {
        float& e = a.residual[d.offset + i * d.cols + j];
        e = settled(a.pending, matrix, d, i, j, e);
      }
    }
  }
}

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

// Gram-Schmidt in double, each column orthogonalized until it is stable, dependent columns last. In exact
// arithmetic the Cholesky form gives the same columns, so the other implementations are tested against this
// reference.

void orthonormalize(const Orthonormalize& a) {
  uint64_t step = a.step != nullptr ? *a.step : 0;
  for (int matrix = 0; matrix < a.table->count(); ++matrix) {
    const auto& d = a.table->host()[matrix];
    int64_t offset = a.which == Factor::p ? d.p_offset : d.q_offset;
    int32_t n = a.which == Factor::p ? d.rows : d.cols;
    if (a.keep_flags && a.flags[matrix] != 0) continue;

    std::vector<Column> columns(d.rank, Column(n));
    bool finite = true;
    for (int32_t i = 0; i < n; ++i) {
      for (int k = 0; k < d.rank; ++k) {
        columns[k][i] = a.in[offset + int64_t{i} * d.rank + k];
        finite = finite && std::isfinite(columns[k][i]);
      }
    }
    if (!finite) {
      a.flags[matrix] = 1;
      continue;
    }
    if (!a.keep_flags) a.flags[matrix] = 0;

    std::vector<Column> done;
    std::vector<int> order, dependent;
    for (int k = 0; k < d.rank; ++k) (add_column(done, columns[k]) ? order : dependent).push_back(k);
    for (int k : dependent) {
      bool added = false;
      for (int attempt = 0; !added; ++attempt) {
        Column random(n);
        for (int32_t i = 0; i < n; ++i) {
          random[i] = reseed_value(a.seed, step, d.seed_id, static_cast<int>(a.which), k, attempt, i);
        }
        added = add_column(done, random);
      }
      order.push_back(k);
    }
    for (int c = 0; c < d.rank; ++c) {
      for (int32_t i = 0; i < n; ++i) {
        a.out[offset + int64_t{i} * d.rank + order[c]] = static_cast<float>(done[c][i]);
      }
    }
  }
}

// Scalar reference: one column at a time.

void normalize_columns(const NormalizeColumns& a) {
  for (int matrix = 0; matrix < a.table->count(); ++matrix) {
    if (a.flags[matrix] != 0) continue;
    const MatrixDescriptor& d = a.table->host()[matrix];
    for (int k = 0; k < d.rank; ++k) {
      double squares = 0.0;
      for (int64_t row = 0; row < d.cols; ++row) {
        const double x = a.q[d.q_offset + row * d.rank + k];
        squares += x * x;
      }
      for (int64_t row = 0; row < d.cols; ++row) {
        const int64_t at = d.q_offset + row * d.rank + k;
        if (!a.orthonormal) a.basis[at] = a.q[at] * column_scale(squares);
        a.q[at] = squares > 0 || !a.orthonormal ? shape_scale(d.rows, d.cols) * a.basis[at] : 0.0f;
      }
    }
  }
}

}  // namespace gradwire::reference
