// Scalar reference of the orthonormalization: Gram-Schmidt in double, each column orthogonalized until it is
// stable, dependent columns last. In exact arithmetic the Cholesky form gives the same columns, so the other
// implementations are tested against this reference.
#include <cmath>
#include <vector>

#include "kernels/math/orthonormalize.h"
#include "kernels/math/small_float.h"
#include "kernels/powersgd/orthonormalize.h"

namespace gradwire::reference {
namespace {

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
